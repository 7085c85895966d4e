"""Rows of a linear layer do not depend on one another."""

from __future__ import annotations

import pytest
import torch

from paceline.decoder.linear import MOST_ROWS, Linear, product_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ins", "outs"), [(48, 80), (1024, 384), (4864, 896), (8192, 256)])
def test_a_row_has_the_same_bits_in_any_batch(ins: int, outs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(ins)
    weight = torch.randn(outs, ins, generator=generator).mul_(ins**-0.5).to(dtype)
    layer = Linear(weight, torch.randn(outs, generator=generator).to(dtype))
    x = torch.randn(64, ins, generator=generator).to(dtype)
    together = layer(x)
    for row in range(64):
        assert torch.equal(layer(x[row : row + 1])[0], together[row]), row
    for rows in (2, 3, 5, 9, 16, 18, 33, 34):
        assert torch.equal(layer(x[:rows]), together[:rows]), rows


def test_few_numbers_of_rows_are_ever_multiplied() -> None:
    padded = {rows: product_rows(rows) for rows in range(1, 3 * MOST_ROWS)}
    assert all(rows <= more <= max(2, rows * 9 / 8) for rows, more in padded.items())
    assert list(padded.values()) == sorted(padded.values())
    products = {more % MOST_ROWS or MOST_ROWS for more in padded.values()}
    assert len(products) == 56


def test_many_rows_make_several_products_of_the_same_bits() -> None:
    layer = Linear(torch.randn(48, 32))
    x = torch.randn(2 * MOST_ROWS + 20, 32)
    together = layer(x)
    assert together.shape == (len(x), 48)
    for rows in (slice(0, 3), slice(MOST_ROWS - 2, MOST_ROWS + 2), slice(len(x) - 1, len(x))):
        assert torch.equal(layer(x[rows]), together[rows])
