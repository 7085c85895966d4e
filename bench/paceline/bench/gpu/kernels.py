"""Times of kernels: products, sampling, and attention beside PyTorch's.

The matrices are those of an 8B model, and the head of a drafter. A product is timed inside a CUDA
graph that goes through several copies of the weights, so that they come from memory. Times of
integers include the rotation and the scaling of their inputs, which a step partly does in other
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from paceline.bench.gpu.cases import (
    DRAFTED,
    EIGHT_BILLION,
    SMALL,
    Case,
    copy_bandwidth,
    fail_if_missed,
    graphed,
    make_case,
    median_ms,
    report,
)
from paceline.decoder import DecoderConfig
from paceline.decoder.products import FIXED_ROWS, use_library_without_splits
from paceline.kernels import (
    Probe,
    SamplingParams,
    choose_tokens,
    tree_attention,
)
from paceline.kernels.caches import span
from paceline.kernels.linear import multiply_floats
from paceline.kernels.rotated import DOWN_SIZE, SIZE, RotatedMatrix

PRODUCT_ROWS = (1, 8, 16, 64, 128, 288, 512)
# Weights that the copies of a matrix have at least: more bytes than a GPU's cache.
COPIED = 200_000_000
LIBRARY, SERVED = "bfloat16 as the library chooses", "bfloat16 as served"
ROTATED = "int8 over rotated inputs"
Product = Callable[[Tensor], Tensor]  # multiplies bfloat16 `[rows, ins]` to `[rows, outs]`
SAMPLED_ROWS, SAMPLED_VOCAB = 64, 151_936
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
}  # sampling parameters by name
SHAPES: dict[str, tuple[list[int], int]] = {
    "64 rows, 8 x 32k": ([32768] * 8, 16),
    "1 x 128k, 16 nodes": ([131072], 16),
    "1 x 128k, 1 node": ([131072], 1),
    "1 x 32k, 16 nodes": ([32768], 16),
    "1 x 32k, 1 node": ([32768], 1),
    "1 x 32k, 64 nodes": ([32768], 64),
    "ragged": ([131072, 40000, 3000, 200], 16),
}  # prefix lengths and nodes; 32 query heads share 8 kv heads of 128
MIN_SHARES = {
    "64 rows, 8 x 32k": 0.85,
    "1 x 128k, 16 nodes": 0.80,
    "1 x 32k, 16 nodes": 0.60,
}  # of the copy bandwidth, paged
MAX_COST_OF_SCORES = 1.05  # time of these shapes with recorded scores, over that without


def matrices(config: DecoderConfig, drafted: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's matrices, and of the head of a drafter of some tokens."""
    hidden, q = config.hidden, config.q_heads * config.head_dim
    return {
        "qkv": (q + 2 * config.kv_heads * config.head_dim, hidden),
        "out": (hidden, q),
        "gate_up": (2 * config.intermediate, hidden),
        "down": (hidden, config.intermediate),
        "head": (config.vocab_size, hidden),
        "head of a drafter": (drafted, hidden),
    }


def ways(weight: Tensor, size: int) -> dict[str, Callable[[], Product]]:
    """What makes the product by a weight ``[outs, ins]`` in each way, over memory of its own."""
    return {
        LIBRARY: lambda: partial(linear, weight=weight.clone()),
        SERVED: lambda: partial(
            multiply_floats, weight=weight.clone(), bias=None, sizes=FIXED_ROWS
        ),
        ROTATED: lambda: partial(RotatedMatrix.of(weight, size).multiply, bias=None),
    }


def measure_product(copies: Sequence[Product], x: Tensor) -> dict[str, Any]:
    """Microseconds of a product by its number of rows, and the numbers with which a row has other
    bits than in the product of all rows.
    """
    together = copies[0](x)
    other_bits, us = [], {}
    for rows in PRODUCT_ROWS:
        part = x[:rows].clone()
        if not torch.equal(copies[0](part), together[:rows]):
            other_bits.append(rows)

        def run(part: Tensor = part) -> None:
            for product in copies:
                product(part)

        ms = median_ms(graphed(run, x.device), x.device)
        us[str(rows)] = round(ms * 1e3 / len(copies), 1)
    return {"rows_with_other_bits": other_bits, "us": us}


@torch.inference_mode()
def products(device: torch.device) -> None:
    """Report every matrix in every way."""
    large = device.type == "cuda"
    small = replace(SMALL, hidden=64, intermediate=160, q_heads=2, head_dim=32, vocab_size=512)
    config = EIGHT_BILLION if large else small
    for name, (outs, ins) in matrices(config, min(DRAFTED, config.vocab_size // 2)).items():
        x = torch.randn(PRODUCT_ROWS[-1], ins, device=device).bfloat16()
        weight = torch.randn(outs, ins, device=device).bfloat16()
        number = -(-COPIED // weight.numel()) if large else 1
        for way, make in ways(weight, DOWN_SIZE if name == "down" else SIZE).items():
            if large:
                use_library_without_splits(fixed=way == SERVED)
            report(f"{name}, {way}", measure_product([make() for _ in range(number)], x))


def sampling(device: torch.device) -> None:
    """Report milliseconds by kind."""
    vocab = SAMPLED_VOCAB if device.type == "cuda" else 1024
    logits = torch.randn(SAMPLED_ROWS, vocab, device=device).bfloat16()
    times = {}
    for kind, fields in KINDS.items():
        params = [SamplingParams(**fields, seed=row) for row in range(SAMPLED_ROWS)]  # type: ignore[arg-type]

        def choose(params: list[SamplingParams] = params) -> None:
            choose_tokens(logits, params, range(SAMPLED_ROWS))

        times[kind] = median_ms(choose, device, repeats=5)
    report(f"ms_{SAMPLED_ROWS}_rows_of_{vocab}", times)


def bandwidth(device: torch.device) -> None:
    """Report every shape, contiguous and paged, with and without recorded scores, and beside
    PyTorch where there is one sequence. Fails if a shape misses its target."""
    missed: list[str] = []
    copied = copy_bandwidth(device)
    report("copy_gb_s", copied)
    for name, (lengths, nodes) in SHAPES.items():
        if device.type == "cpu":
            lengths = [max(1, length // 256) for length in lengths]
        figures: dict[str, Any] = {}
        for paged in (False, True):
            case = make_case(
                device, lengths, [nodes] * len(lengths), (32, 8), 128, torch.bfloat16, paged=paged
            )
            size = sum(block.stop for block in case.plan.blocks) * 2 * 8 * 128 * 2
            ms = _timed(_ours(case, ()), device)
            kind = "paged" if paged else "contiguous"
            figures[kind] = {"ms": ms, "of_copy": size / ms / 1e6 / copied}
            if paged:
                figures["scores_over_without"] = _timed(_ours(case, _probes(case)), device) / ms
            elif len(lengths) == 1:
                figures["sdpa_ms"] = sdpa = _timed(_sdpa(case), device)
                figures["sdpa_over_ours"] = sdpa / ms
        figures |= {"kv_bytes": size, "target": (target := MIN_SHARES.get(name))}
        report(name, figures)
        if target is not None:
            if figures["paged"]["of_copy"] < target:
                missed.append(f"{name}: below {target:.0%} of copy bandwidth")
            if figures["scores_over_without"] > MAX_COST_OF_SCORES:
                more = f"{MAX_COST_OF_SCORES - 1:.0%}"
                missed.append(f"{name}: recorded scores take more than {more}")
    fail_if_missed(missed, device)


def _sdpa(case: Case) -> Callable[[], Tensor]:
    """PyTorch's attention of a contiguous sequence with the mask of its tree."""
    (block,) = case.plan.blocks
    keys, values = (span(planes[0], 0, block.stop)[None] for planes in (case.keys, case.values))
    mask = torch.ones(block.length, block.stop, dtype=torch.bool)
    mask[:, block.start :] = torch.from_numpy(block.ancestors())
    return partial(
        scaled_dot_product_attention, case.q.transpose(0, 1)[None], keys, values,
        mask.to(case.q.device), scale=case.scale, enable_gqa=True,
    )  # fmt: skip


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a replay."""
    return median_ms(graphed(action, device), device)


def _ours(case: Case, probes: tuple[Probe, ...]) -> Callable[[], Tensor]:
    out = torch.full_like(case.q, torch.nan)
    return lambda: tree_attention(
        case.q, case.keys, case.values, case.plan, scale=case.scale, out=out, probes=probes
    )


def _probes(case: Case) -> tuple[Probe, ...]:
    return tuple(
        Probe(index, node, torch.empty(8, block.start, device=case.q.device))
        for index, block in enumerate(case.plan.blocks)
        for node in dict.fromkeys((0, block.length - 1))
    )
