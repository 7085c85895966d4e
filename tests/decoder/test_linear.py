"""Rows of a linear layer do not depend on one another."""

from __future__ import annotations

import pytest
import torch

from paceline.decoder.weights import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ins", "outs"), [(48, 80), (1024, 384), (4864, 896), (8192, 256)])
def test_a_row_has_the_same_bits_in_any_batch(ins: int, outs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(ins)
    weight = torch.randn(outs, ins, generator=generator).mul_(ins**-0.5).to(dtype)
    bias = torch.randn(outs, generator=generator).to(dtype)
    layer = Linear(weight, bias)
    x = torch.randn(150, ins, generator=generator).to(dtype)
    together = layer(x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(together.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    for row in range(150):
        assert torch.equal(layer(x[row : row + 1])[0], together[row]), row
    for rows in (2, 3, 5, 9, 16, 18, 33, 34, 64, 65):
        assert torch.equal(layer(x[:rows]), together[:rows]), rows
    assert layer(x[:0]).shape == (0, outs)
