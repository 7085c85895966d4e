"""Products of routed experts, and the steps around products of 8-bit integers."""

import pytest
import torch
from torch import Tensor

from paceline.cuda.triton.products import multiply_by_experts, quantise_rotated, scaled_sums
from paceline.kernels.rotated import block_size, quantise_rows, scale_sums

EXPERTS, OUTS, INS = 5, 70, 48
ROUTES = {
    "all to one": [3] * 70,
    "a tile and a row": [0] * 32 + [1] * 33 + [4],
    "one row": [4],
    "none to the first and last": [1, 1, 2, 3, 3, 3],
    "every one": [0, 1, 2, 3, 4],
}


@pytest.fixture
def experts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, OUTS, INS), torch.randn(EXPERTS, OUTS)


@pytest.mark.parametrize(
    ("route", "has_bias", "dtype"),
    [
        ("all to one", False, torch.float32),
        ("a tile and a row", True, torch.float16),
        ("one row", True, torch.float32),
        ("none to the first and last", False, torch.float16),
        ("every one", True, torch.float32),
    ],
)
def test_rows_are_multiplied_by_their_experts(
    experts: tuple[Tensor, Tensor], route: str, has_bias: bool, dtype: torch.dtype
) -> None:
    weights, biases = (each.to(dtype) for each in experts)
    chosen = torch.tensor(ROUTES[route])
    x = torch.randn(len(chosen), INS).to(dtype)
    found = multiply_by_experts(x, weights, biases if has_bias else None, chosen)
    expected = torch.einsum("ri,roi->ro", x.double(), weights.double()[chosen])
    expected = expected + biases.double()[chosen] if has_bias else expected
    torch.testing.assert_close(found.double(), expected, atol=2e-2 if dtype.itemsize == 2 else 1e-4,
                               rtol=1e-3)  # fmt: skip
    # A row alone has the same bits, whatever rows are beside it.
    for row in {0, len(x) // 2, len(x) - 1}:
        alone = multiply_by_experts(
            x[row : row + 1], weights, biases if has_bias else None, chosen[row : row + 1]
        )
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("ins", "most"), [(256, 64), (72, 64), (40, 512), (384, 512), (768, 512), (1536, 512)]
)
def test_rows_in_8_bits_are_those_of_the_definition(
    ins: int, most: int, dtype: torch.dtype
) -> None:
    """Bit by bit, with every number of parts that a block has."""
    torch.manual_seed(0)
    x = torch.randn(6, ins).to(dtype)
    x[1], x[2], x[3, 7], x[4, -1] = 0, x[2] * 1e-5, torch.nan, torch.inf
    size = block_size(ins, most)
    values, scales = quantise_rotated(x, size)
    expected, factors = quantise_rows(x, size)
    assert torch.equal(values, expected)
    assert torch.equal(scales.view(torch.int32)[:3], factors.view(torch.int32)[:3])
    assert scales[3:5].isnan().all()
    assert scales[5] == factors[5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_integer_sums_are_scaled_as_defined(has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sums = torch.randint(-(2**31), 2**31 - 1, (9, 1304)).int()
    rows, outs, bias = 1e-7 * torch.randn(5), torch.randn(1300), torch.randn(1300)
    given = (sums, rows, outs, bias if has_bias else None, dtype)
    assert torch.equal(scaled_sums(*given), scale_sums(*given))
