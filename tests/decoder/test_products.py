"""Products whose bits do not depend on the number of rows, on a device whose library chooses."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_layers import keep_plain
from torch import Tensor
from torch.nn.functional import linear

from paceline.cuda import products
from paceline.cuda.products import FIXED_ROWS, SLICES, fix_products
from paceline.decoder.linear import Experts, Linear
from paceline.kernels import linear as linear_module
from paceline.kernels.linear import multiply_floats

Library = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Linear]:
    """Two layers of one shape and one of another, multiplied as on a GPU."""
    keep_plain(monkeypatch)
    torch.manual_seed(0)
    return [Linear(torch.randn(outs, 32)) for outs in (48, 48, 16)]


def off_the_cpu(monkeypatch: pytest.MonkeyPatch, library: Library) -> list[int]:
    """Have layers multiply by a library; returns the numbers of rows that it was asked for."""
    asked: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked.append(len(x))
        return library(x, weight, bias)

    monkeypatch.setattr(linear_module, "linear", counted)

    def multiply(layer: Linear, x: Tensor) -> Tensor:
        sizes = layer.fixed_rows
        return (
            counted(x, layer.weight)
            if sizes is None
            else multiply_floats(x, layer.weight, layer.bias, sizes)
        )

    monkeypatch.setattr(Linear, "__call__", multiply)
    return asked


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Any order of additions gives these."""
    return linear(x.double(), weight.double()).round(decimals=3).float()


def test_products_have_few_sizes_and_the_rows_of_the_input(
    monkeypatch: pytest.MonkeyPatch, layers: list[Linear]
) -> None:
    asked = off_the_cpu(monkeypatch, exact)
    found = fix_products(layers)
    assert (found.differs, {each.fixed_rows for each in layers}) == ("", {FIXED_ROWS})
    assert set(asked) <= set(FIXED_ROWS), "no number of rows is left unchecked"
    for rows in (1, 63, 64, 65, 512, 513, 1024, 1025, 2560):
        asked.clear()
        x = torch.randn(rows, 32)
        expected = exact(x, layers[0].weight, None)
        assert torch.equal(layers[0](x), expected)
        assert set(asked) <= set(FIXED_ROWS)
        assert sum(asked) < rows + 256


def test_a_matrix_whose_bits_depend_on_rows_is_multiplied_in_slices(
    monkeypatch: pytest.MonkeyPatch, layers: list[Linear]
) -> None:
    """Each matrix has a rule of its own, whichever number of rows is at fault."""

    for split in FIXED_ROWS[1:]:

        def splitting(x: Tensor, weight: Tensor, bias: Tensor | None, split: int = split) -> Tensor:
            out = exact(x, weight, bias)
            return out * (1 + 2**-20) if len(x) == split and len(weight) == 48 else out

        with monkeypatch.context() as patch:
            asked = off_the_cpu(patch, splitting)
            found = fix_products(layers)
            assert [each.fixed_rows for each in layers] == [SLICES, SLICES, FIXED_ROWS]
            assert not found.differs
            assert str(found).startswith("products of 64 rows: 48x32, products of 64 to 1024 rows")
            asked.clear()
            layers[0](torch.randn(200, 32))
            assert asked == [64] * 4


def test_what_slices_do_not_mend_is_told(
    monkeypatch: pytest.MonkeyPatch, layers: list[Linear]
) -> None:
    """The last row of a product has bits of its own."""

    def placed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = exact(x, weight, bias)
        out[-1] *= 1 + 2**-20
        return out

    off_the_cpu(monkeypatch, placed)
    found = fix_products(layers)
    assert "a linear layer of 32 to 48 in torch.float32 gives a row other bits" in found.differs


@pytest.mark.parametrize("experts", [3, 40])
def test_equal_products_and_no_others_have_equal_digests(
    monkeypatch: pytest.MonkeyPatch, layers: list[Linear], experts: int
) -> None:
    """Those of experts too, whether there are fewer experts than test rows or more."""
    weights = [torch.randn(experts, outs, 32) for outs in (24, 8)]

    def found(*scales: float) -> str:
        routed = [
            Experts([Linear(scale * each) for each in weight])
            for scale, weight in zip(scales, weights, strict=False)
        ]
        return fix_products(layers, routed).digest

    off_the_cpu(monkeypatch, lambda x, w, b: exact(x, w, b) * (1 + 2**-20))
    others = {found()}
    off_the_cpu(monkeypatch, exact)
    assert found(1, 1) == found(1, 1)
    assert len({found(), found(1), found(1, 1), found(2, 1), found(1, 2)} | others) == 6


def test_a_gpu_is_described_by_what_its_products_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whose bits may differ have two descriptions."""
    card = {"major": 9, "minor": 0, "multi_processor_count": 132}
    facts: dict[str, str] = {"torch": "2.11.0", "cuda": "13.0", "cublas": "130100", "triton": "3.6"}

    def described(**changes: Any) -> str:
        found = SimpleNamespace(**{each: changes.get(each, card[each]) for each in card})
        known = facts | changes
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch, "__version__", known["torch"])
        monkeypatch.setattr(torch.version, "cuda", known["cuda"])
        monkeypatch.setattr(products, "_cublas_version", lambda: known["cublas"])
        monkeypatch.setattr(products, "version", lambda name: known[name])
        return products.describe_device(torch.device("cuda", 0))

    assert described() == (
        "sm_90, 132 multiprocessors, torch 2.11.0, CUDA 13.0, cuBLAS 130100, Triton 3.6"
    )
    changes: list[dict[str, Any]] = [{each: 8} for each in card] + [{each: "x"} for each in facts]
    assert len({described(), *(described(**each) for each in changes)}) == len(changes) + 1

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(products, "version", missing)
    assert "Triton" not in products.describe_device(torch.device("cuda", 0))
    assert products.describe_kernels().startswith("kernels ")
