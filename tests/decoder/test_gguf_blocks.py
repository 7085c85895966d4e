"""Tensors of GGUF files: the values of the gguf package, exactly where formats are blocks."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoder import UnsupportedModelError
from paceline.decoder.gguf_file import GgufFile, GgufTensor, converts, decode
from paceline.kernels.blocks import Blocks

EXACT = {Kind.Q8_0: 8, Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4}
CONVERTED = [Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL]
HALVES = {
    Kind.Q8_0: [0], Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q4_K: [0, 2], Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2], Kind.Q2_K: [80, 82], Kind.Q3_K: [108], Kind.Q5_K: [0, 2], Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
}  # fmt: skip
"""Offsets of float16 numbers in a stored block."""
FILE = GgufFile(Path("model.gguf"), {}, {})


def stored(kind: Kind, outs: int, blocks: int, seed: int) -> GgufTensor:
    """A matrix of any bytes, with finite scales."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (outs * blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0, 0.1, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8)
    return GgufTensor("blk.0.ffn_up.weight", (outs, blocks * values), kind, raw.reshape(-1))


def expected(tensor: GgufTensor) -> torch.Tensor:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return torch.from_numpy(gguf.quants.dequantize(rows, tensor.kind))


@given(
    kind=st.sampled_from(sorted(EXACT)),
    outs=st.integers(1, 7),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_blocks_have_the_bits_of_the_file(kind: Kind, outs: int, blocks: int, seed: int) -> None:
    tensor = stored(kind, outs, blocks, seed)
    found = decode(FILE, tensor)
    assert isinstance(found, Blocks)
    assert not converts(kind)
    assert found.bits == EXACT[kind]
    bits = found.dequantise().view(torch.int32)
    assert torch.equal(bits, expected(tensor).view(torch.int32))


def test_large_matrices_are_decoded_in_pieces() -> None:
    tensor = stored(Kind.Q4_1, 600, 80, 0)
    found = decode(FILE, tensor)
    assert isinstance(found, Blocks)
    assert torch.equal(found.dequantise(), expected(tensor))


@pytest.mark.parametrize("kind", CONVERTED)
def test_other_formats_become_eight_bits(kind: Kind) -> None:
    tensor = stored(kind, 5, 3, 1)
    found, weight = decode(FILE, tensor), expected(tensor)
    assert isinstance(found, Blocks)
    assert converts(kind)
    assert found.bits == 8
    most = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (found.dequantise() - weight).unflatten(1, (-1, 32)).abs()
    assert (error <= most * (0.5 / 127 + 0.002)).all()


def test_floats_keep_their_type() -> None:
    weight = torch.randn(3, 4)
    for kind, dtype in (
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
    ):
        raw = weight.to(dtype).view(torch.uint8).numpy().reshape(-1)
        found = decode(FILE, GgufTensor("output.weight", (3, 4), kind, raw))
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weight.to(dtype))


def test_a_quantised_vector_becomes_floats() -> None:
    matrix = stored(Kind.Q8_0, 1, 2, 0)
    found = decode(FILE, GgufTensor("output_norm.weight", (64,), Kind.Q8_0, matrix.data))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected(matrix)[0])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(kind: Kind, bad: float) -> None:
    tensor = stored(kind, 2, 2, 0)
    at = HALVES[kind][-1]
    tensor.data[at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(
        UnsupportedModelError, match=r"model.gguf.*'blk.0.ffn_up.weight' is damaged"
    ):
        decode(FILE, tensor)


def test_a_format_that_nothing_decodes() -> None:
    tensor = GgufTensor("output.weight", (2, 2), Kind.I32, np.zeros(16, np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"'output.weight' has the format I32.*Q4_K"):
        decode(FILE, tensor)
