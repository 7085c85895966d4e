"""Attention kernels against float64, over the shapes they must serve."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.bench.gpu.cases import PAGE, Case, expected, make_case
from paceline.bench.gpu.checking import arguments, finish, part, report, require
from paceline.kernels import PagedPlane, Probe, tree_attention
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


def sweep(device: torch.device, dtype: torch.dtype) -> None:
    """All heads and head sizes, over short prefixes and any trees."""
    short = [0, 1, 63, 255, 1000]
    errors = {}
    for heads in HEADS:
        for dim in DIMS:
            nodes = torch.randint(1, 65, (len(short),)).tolist()
            case = make_case(device, short, nodes, heads, dim, dtype, paged=dim % 64 == 0)
            name = f"{heads[0]}:{heads[1]}/{dim}"
            errors[name] = check(case, f"{dtype}/{name}")
    report("errors", errors)


def more(device: torch.device) -> None:
    """Few shapes: long, wide, with windows, and with noted scores."""
    long = 131072 if device.type == "cuda" else 300
    half, brain = torch.float16, torch.bfloat16
    cases = {
        "1 to 256 nodes": make_case(device, [777] * 4, [256, 255, 129, 1], (32, 8), 128, brain),
        "256 nodes, heads of 256": make_case(device, [777], [256], (8, 2), 256, brain),
        "window": make_case(device, [0, 300, 5000], [40, 64, 9], (28, 4), 128, brain, window=256),
        "long": make_case(device, [long, 0, 9000], [64, 256, 1], (32, 8), 128, brain),
        "long, heads of 96": make_case(device, [long, 7], [3, 256], (5, 1), 96, half, paged=True),
        "longspec cross-attention": make_case(device, [512], [1], (68 * 8, 8), 128, brain),
    }
    report("errors", {name: check(case, name) for name, case in cases.items()})
    ragged = {}
    for heads in HEADS:
        case = make_case(device, [long, long // 4, 0], [5, 256, 17], heads, 128, brain, paged=True)
        ragged[f"{heads[0]}:{heads[1]}"] = check(case, f"ragged, {heads}")
    report("ragged", ragged)
    if device.type == "cuda":
        report("offsets beyond 32 bits", check(far_apart(device), "offsets beyond 32 bits"))
    report("noted", [check_notes(device, None), check_notes(device, 900)])


def far_apart(device: torch.device) -> Case:
    """One sequence in the first and the last pages of a pool of more than 2^32 elements."""
    case = make_case(device, [1000], [9], (8, 2), 128, torch.float16, paged=True)
    per_page = 2 * 2 * PAGE * 128
    count = (1 << 32) // per_page + 8
    pool = torch.full((count, 2, 2, PAGE, 128), torch.nan, dtype=torch.float16, device=device)
    places = torch.tensor([[0, count - 1, 1, count - 2]], dtype=torch.int32, device=device)
    for plane, kind in ((case.keys[0], 0), (case.values[0], 1)):
        assert isinstance(plane, PagedPlane)
        pages = plane.tables[0, :4].long()
        pool[places[0].long(), kind] = plane.pool[pages]
    planes = [[PagedPlane(pool[:, kind], places, 0, 4 * PAGE)] for kind in (0, 1)]
    return replace(case, keys=planes[0], values=planes[1])


def main() -> None:
    """One type, or the few shapes; all of it by itself."""
    device, _ = arguments()
    for dtype in DTYPES:
        if part() in ("", str(dtype).removeprefix("torch.")):
            sweep(device, dtype)
    if part() in ("", "more"):
        more(device)
    finish()


if __name__ == "__main__":
    main()
