"""Quantised matrices: what they mean, how close they are, how they are joined."""

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.quantised import QuantisedMatrix, concatenate, quantise

TYPES = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_1}


def matrix(outs: int, blocks: int, seed: int, outlier: float = 1.0) -> Tensor:
    weight = torch.randn(outs, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    weight[:, ::37] *= outlier
    return weight


def reference(weight: Tensor, bits: int) -> Tensor:
    """The weights as the plain rules of the gguf package quantise them."""
    stored = gguf.quants.quantize(weight.numpy(), TYPES[bits])
    return torch.from_numpy(gguf.quants.dequantize(stored, TYPES[bits]))


@given(
    outs=st.integers(1, 9),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 99),
    outlier=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_eight_bits_are_q8_0_and_four_err_less_than_q4_1(
    outs: int, blocks: int, seed: int, outlier: float
) -> None:
    weight = matrix(outs, blocks, seed, outlier)
    assert torch.equal(quantise(weight, 8).dequantise(), reference(weight, 8))
    small = quantise(weight, 4)
    assert int(small.values.max()) <= 15
    error = (small.dequantise() - weight).square().sum()
    assert error <= 1.01 * (reference(weight, 4) - weight).square().sum()


def test_every_chunk_of_rows_is_quantised() -> None:
    weight = matrix(700, 16, 0)
    assert torch.equal(quantise(weight, 8).dequantise(), reference(weight, 8))
    assert (quantise(weight, 4).dequantise() - weight).abs().max() < 0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_blocks(bits: int) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.75
    weight[2] = -2.0
    torch.testing.assert_close(quantise(weight, bits).dequantise(), weight, rtol=1e-3, atol=0)
    assert torch.equal(quantise(weight, bits).dequantise()[0], weight[0])


def formats(weight: Tensor) -> list[QuantisedMatrix]:
    """The matrix in every format, 4 bits without a minimum included."""
    plain = quantise(weight, 4)
    return [
        quantise(weight, 8),
        plain,
        QuantisedMatrix(plain.values, plain.scale, None, bits=4, offset=8),
    ]


@given(choice=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_joined_matrices_keep_their_bits(choice: list[int]) -> None:
    parts = [formats(matrix(2 + i, 3, i))[which] for i, which in enumerate(choice)]
    joined = concatenate(parts)
    assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))
    assert joined.shape == (sum(part.shape[0] for part in parts), 96)
    assert joined.bits == (4 if len(set(choice)) == 1 and choice[0] else 8)


def test_rows_are_chosen_in_order() -> None:
    order = torch.tensor([3, 0, 2])
    for blocks in formats(matrix(4, 2, 0)):
        assert torch.equal(blocks.rows(order).dequantise(), blocks.dequantise()[order])


@pytest.mark.parametrize(
    ("weight", "bits", "message"),
    [
        (torch.zeros(2, 48), 8, "48 inputs are not a multiple of 32"),
        (torch.zeros(2, 64), 5, "8 or 4 bits, not 5"),
        (torch.full((2, 64), float("nan")), 8, "not finite"),
        (torch.full((2, 64), float("inf")), 4, "not finite"),
        (torch.full((2, 64), 1e30), 8, "too large for a float16"),
        (torch.linspace(-1e9, 1e9, 64)[None], 4, "too large for a float16"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: Tensor, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(weight, bits)
