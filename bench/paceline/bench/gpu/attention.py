"""Attention kernels against float64, over the shapes they must serve."""

from __future__ import annotations

import torch

from paceline.bench.gpu.cases import Case, expected, make_case
from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.kernels import Probe, tree_attention
from paceline.kernels.probes import note_scores

HEADS = ((4, 4), (8, 2), (32, 8), (28, 4), (5, 1))
DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(case: Case, name: str) -> dict[str, float]:
    """Errors of ours and of a plain computation in the same type, against float64.

    The largest of a hundred thousand errors is half chance, hence its wider bound.
    """
    out = torch.full_like(case.q, torch.nan)
    tree_attention(case.q, case.keys, case.values, case.plan, scale=case.scale,
                   window=case.window, out=out)  # fmt: skip
    right = expected(case, torch.float64)
    errors = {}
    for kind, found in (("ours", out), ("plain", expected(case, case.q.dtype))):
        difference = found.double() - right
        errors[f"{kind}_rms"] = float(difference.square().mean().sqrt())
        errors[f"{kind}_max"] = float(difference.abs().max())
    for measure, factor in (("rms", 2), ("max", 4)):
        ours, plain = errors[f"ours_{measure}"], errors[f"plain_{measure}"]
        require(
            ours <= factor * plain + 1e-7,  # also false for NaN
            f"{name}: {measure} error {ours:.2e}, expected at most {factor} times {plain:.2e}",
        )
    return errors


def check_notes(device: torch.device, window: int | None) -> float:
    """Scores noted on the way are those of a product of its own, and change no bit."""
    case = make_case(device, [5000, 70], [16, 1], (32, 8), 128, torch.float16, window=window)
    rooms = [torch.full((8, 5000), torch.nan, device=device) for _ in range(4)]
    probes = [Probe(0, 0, rooms[0]), Probe(0, 15, rooms[1])]
    wanted = [Probe(0, 0, rooms[2]), Probe(0, 15, rooms[3])]
    plain = tree_attention(case.q, case.keys, case.values, case.plan, scale=case.scale,
                           window=window)  # fmt: skip
    noted = tree_attention(case.q, case.keys, case.values, case.plan, scale=case.scale,
                           window=window, probes=probes)  # fmt: skip
    require(plain.equal(noted), "noting scores changed the attention")
    note_scores(case.q, case.keys, case.plan, wanted, scale=case.scale, window=window, lse=None)
    worst = 0.0
    for ours, theirs in ((rooms[0], rooms[2]), (rooms[1], rooms[3])):
        require(ours.isinf().equal(theirs.isinf()), "other positions are hidden by the window")
        difference = (ours - theirs)[theirs.isfinite()].abs().max()
        worst = max(worst, float(difference))
    require(worst < 0.05, f"noted scores differ by {worst}")
    return worst


def main() -> None:
    """All of it: wide shapes small, then few shapes long."""
    device, _ = arguments()
    short, long = [0, 1, 63, 255, 1000], 131072
    if device.type == "cpu":
        long = 300
    for dtype in DTYPES:
        errors = {}
        for heads in HEADS:
            for dim in DIMS:
                nodes = torch.randint(1, 65, (len(short),)).tolist()
                case = make_case(device, short, nodes, heads, dim, dtype, paged=dim % 64 == 0)
                name = f"{heads[0]}:{heads[1]}/{dim}"
                errors[name] = check(case, f"{dtype}/{name}")
        report(str(dtype).removeprefix("torch."), errors)
    more = {
        "256 nodes": make_case(device, [777], [256], (32, 8), 128, torch.bfloat16),
        "window": make_case(
            device, [0, 300, 5000], [40, 64, 9], (28, 4), 128, torch.bfloat16, window=256
        ),
        "long": make_case(device, [long, 0, 9000], [64, 256, 1], (32, 8), 128, torch.bfloat16),
        "long in pages": make_case(
            device, [long, 33000], [5, 17], (8, 2), 128, torch.float16, paged=True
        ),
        "longspec cross-attention": make_case(device, [512], [1], (68 * 8, 8), 128, torch.bfloat16),
    }
    report("more", {name: check(case, name) for name, case in more.items()})
    report("noted", [check_notes(device, None), check_notes(device, 900)])
    finish()


if __name__ == "__main__":
    main()
