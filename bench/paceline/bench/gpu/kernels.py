"""Times of products by matrix, way and number of rows, and whether rows keep their bits.

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
from torch.nn.functional import linear

from paceline.bench.gpu.cases import DRAFTED, EIGHT_BILLION, SMALL, median_ms, report
from paceline.cuda.graphs import Capturing
from paceline.cuda.products import FIXED_ROWS, use_library_without_splits
from paceline.decoder import DecoderConfig
from paceline.kernels.linear import multiply_floats
from paceline.kernels.rotated import DOWN_SIZE, SIZE, RotatedMatrix

PRODUCT_ROWS = (1, 8, 16, 64, 128, 288, 512)
# Weights that the copies of a matrix have at least: more bytes than a GPU's cache.
COPIED = 200_000_000
LIBRARY, SERVED = "bfloat16 as the library chooses", "bfloat16 as served"
ROTATED = "int8 over rotated inputs"
Product = Callable[[Tensor], Tensor]  # multiplies bfloat16 `[rows, ins]` to `[rows, outs]`


def matrices(config: DecoderConfig, drafted: int) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a model's matrices, and of the head of a drafter."""
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
    """Return, by way, what makes the product by a weight ``[outs, ins]``, in its own memory."""
    return {
        LIBRARY: lambda: partial(linear, weight=weight.clone()),
        SERVED: lambda: partial(
            multiply_floats, weight=weight.clone(), bias=None, sizes=FIXED_ROWS
        ),
        ROTATED: lambda: partial(RotatedMatrix.of(weight, size).multiply, bias=None),
    }


def measure_product(copies: Sequence[Product], x: Tensor) -> dict[str, Any]:
    """Return the microseconds of a product by its number of rows, and the numbers with which a row
    has other bits than in the product of all rows."""
    together = copies[0](x)
    other_bits, us = [], {}
    for rows in PRODUCT_ROWS:
        part = x[:rows].clone()
        if not torch.equal(copies[0](part), together[:rows]):
            other_bits.append(rows)

        def run(part: Tensor = part) -> None:
            for product in copies:
                product(part)

        ms = median_ms(Capturing(x.device).capture(run), x.device)
        us[str(rows)] = round(ms * 1e3 / len(copies), 1)
    return {"rows_with_other_bits": other_bits, "us": us}


@torch.inference_mode()
def products(device: torch.device) -> None:
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
