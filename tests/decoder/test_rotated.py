"""Weights in 8 bits over rotated inputs: their definition, products, decoders, what is refused.

CPUs have packed ones. Here PyTorch multiplies on a CPU, as it does on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_cases import save_model
from torch import Tensor

from paceline.bench.reference import rotate
from paceline.convert import Packer, open_model
from paceline.cuda import CudaDevice
from paceline.decoder import Decoder, UnsupportedModelError
from paceline.kernels.rotated import (
    DOWN_SIZE,
    LARGEST,
    MAX_INS,
    SIZE,
    RotatedMatrix,
    block_size,
    quantise_rows,
)


def hadamard(size: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


@pytest.mark.parametrize(
    ("ins", "most", "size"),
    [
        (4096, SIZE, 64), (14336, DOWN_SIZE, 512), (576, SIZE, 64), (1536, DOWN_SIZE, 512),
        (11008, DOWN_SIZE, 256), (168, SIZE, 8), (9, SIZE, 1), (32, DOWN_SIZE, 32),
    ],
)  # fmt: skip
def test_rotations_are_hadamard_transforms_of_whole_blocks(ins: int, most: int, size: int) -> None:
    assert block_size(ins, most) == size
    x = torch.randint(-9, 9, (3, ins)).float()  # exact in any order
    blocks = x.double().unflatten(1, (-1, size)) @ hadamard(size)
    assert torch.equal(rotate(x, size).double(), blocks.flatten(1))


def test_rows_are_rounded_to_the_nearest_of_255_values_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 63.4, -0.5, 126.6]])
    values, scale = quantise_rows(x, 1)
    assert values.tolist() == [[127, 0, 2, -2, -127, 63, 0, 127]]
    assert scale.tolist() == [1.0]
    x = torch.randn(50, 96) * torch.logspace(-20, 20, 50)[:, None]
    values, scale = quantise_rows(x, 32)
    turned = rotate(x, 32)
    assert values.abs().amax(1).tolist() == [LARGEST] * 50
    assert torch.equal(scale, torch.div(turned.abs().amax(1), torch.full((50,), 127.0)))
    assert ((values * scale[:, None] - turned).abs() <= scale[:, None] * 0.5001).all()
    for row in (0, 17, 49):
        alone = quantise_rows(x[row : row + 1], 32)
        assert torch.equal(alone[0][0], values[row])
        assert torch.equal(alone[1][0], scale[row])


def test_rows_without_values_stay_finite_and_those_with_bad_ones_do_not() -> None:
    x = torch.zeros(4, 64)
    x[1] = 1e-38
    x[2, 5] = torch.nan
    values, scale = quantise_rows(x, 64)
    assert not values.any()
    assert scale.isfinite().tolist() == [True, True, False, True]
    matrix = RotatedMatrix.of(torch.randn(24, 64))
    found = matrix.multiply(x, None)
    assert found.isfinite().all(1).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("rows", "outs", "dtype"),
    [(1, 96, torch.float32), (17, 50, torch.bfloat16), (80, 50, torch.float32)],
)
def test_products_are_those_of_the_rounded_factors(
    rows: int, outs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(outs, 320).to(dtype), torch.randn(rows, 320).to(dtype)
    x[rows // 2] *= 1e4  # a row that must not change the others
    bias, matrix = torch.randn(outs), RotatedMatrix.of(weight)
    values, scale = quantise_rows(x, matrix.size)
    exact = values.double() @ matrix.values[:outs].double().T
    expected = exact * scale[:, None].double() * matrix.scale.double() + bias
    found = matrix.multiply(x, bias)
    assert (found.dtype, matrix.shape) == (dtype, (outs, 320))
    largest = expected.abs().amax(1, keepdim=True)
    assert ((found - expected).abs() <= 2 * torch.finfo(dtype).eps * largest).all()
    whole = x.double() @ weight.double().T + bias
    assert (found - whole).norm() < 0.02 * whole.norm()
    alone = matrix.multiply(x[-1:], bias)
    assert torch.equal(alone[0], found[-1]), "bits depend on no other row"


@pytest.mark.usefixtures("rotated")
def test_a_device_that_multiplies_no_integers_is_told(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    refusal = "weights are 'int8', and cpu refuses .*: CUBLAS_STATUS_NOT_SUPPORTED; use bfloat16"
    with pytest.raises(UnsupportedModelError, match=refusal):
        CudaDevice("cpu").check_model(open_model(models["llama"]).config("int8"), "auto")


def test_sums_fit_32_bits() -> None:
    assert MAX_INS * 255 * 127 < 2**31
    for ins in (MAX_INS + 8 - MAX_INS % 8, 20):
        with pytest.raises(ValueError, match=f"it has {ins} inputs, expected a multiple of 8"):
            RotatedMatrix.of(torch.zeros(1, ins))


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 on the CPU means what it means on a GPU."""
    for module in ("cuda.device", "convert.pack", "convert.weights", "convert.model_source"):
        monkeypatch.setattr(
            f"paceline.{module}.is_rotated", lambda weights, device: weights == "int8"
        )


@pytest.mark.usefixtures("rotated")
def test_what_it_cannot_run_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="routed experts have no products in 8 bits"):
        CudaDevice("cpu").check_model(open_model(models["qwen3-moe"]).config("int8"), "auto")
    source = open_model(save_model(tmp_path, "llama", intermediate_size=164))
    config = source.config("int8")
    with pytest.raises(UnsupportedModelError, match=r"'layers.0.down'.* 164 inputs"):
        Decoder(config, Packer(config, source.weights(config), "cpu"), "cpu")
