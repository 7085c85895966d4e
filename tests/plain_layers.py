"""Linear layers that are not packed, as on a GPU, on the CPU."""

from typing import Any

import pytest
from torch import Tensor

from paceline.decoder.linear import Linear


def keep_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on layers keep plain weights as they come, and PyTorch multiplies."""
    packing = Linear.__init__

    def keep(layer: Any, weight: Any, bias: Tensor | None = None) -> None:
        packing(layer, weight.to("meta") if isinstance(weight, Tensor) else weight, bias)
        if isinstance(weight, Tensor):
            layer._weight = weight

    monkeypatch.setattr(Linear, "__init__", keep)
