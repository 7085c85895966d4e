"""Products of routed experts: each row by its expert's matrix, in one order, with no wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.decoder.experts import Experts
from paceline.decoder.weights import Linear
from paceline.kernels._native import CpuKernels

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_rows_are_multiplied_by_their_experts(
    experts: tuple[Tensor, Tensor], route: str, has_bias: bool, dtype: torch.dtype
) -> None:
    from paceline.kernels._triton.products import multiply_by_experts

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


class Waits(TorchDispatchMode):
    """Refuses what a capture on a GPU refuses: to read the device's numbers on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), f"{name} waits"
        return func(*args, **(kwargs or {}))


def test_a_layer_of_experts_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, experts: tuple[Tensor, Tensor]
) -> None:
    """On every GPU and in every type; PyTorch's grouped products copy to the host on most."""
    none = CpuKernels("none", None, "")
    monkeypatch.setattr("paceline.decoder.weights.cpu_kernels", lambda: none)
    weights, biases = experts
    layers = Experts([Linear(w, b) for w, b in zip(weights, biases, strict=True)])
    chosen, x = torch.tensor(ROUTES["a tile and a row"]), torch.randn(66, INS)
    expected = layers(x, chosen)
    layers.stack()
    torch.testing.assert_close(layers(x, chosen), expected), "without Triton"
    from paceline.kernels._triton.products import multiply_by_experts

    assert layers._stacked is not None
    with Waits():
        found = multiply_by_experts(x, layers._stacked, layers._bias, chosen)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
