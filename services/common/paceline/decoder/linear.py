"""Linear layers: the bits of a row do not depend on the other rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from paceline.decoder.quantised import Weight
from paceline.kernels import cpu_kernels
from paceline.kernels._torch_linear import multiply_floats
from paceline.kernels.blocks import Blocks
from paceline.kernels.linear import PackedMatrix, multiply, pack, pack_blocks


class Linear:
    """``x @ weight.T + bias``, by the compiled kernels on the CPU and by torch elsewhere.

    Attributes:
        packed: The packed weight of the compiled kernels; None: torch multiplies.
    """

    def __init__(self, weight: Weight | PackedMatrix, bias: Tensor | None = None) -> None:
        """Make a layer.

        Args:
            weight: ``[out, in]`` in float32, bfloat16 or blocks. A packed one contains its bias.
            bias: ``[out]``, or None.
        """
        self.packed: PackedMatrix | None = None
        if isinstance(weight, PackedMatrix):
            self.packed = weight
            self.out_features, self.in_features = weight.outs, weight.ins
            return
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, Blocks):
            self.packed = pack_blocks(weight, bias)
        elif weight.device.type == "cpu" and cpu_kernels().library is not None:
            self.packed = pack(weight, bias, str(weight.dtype).removeprefix("torch."))
        else:
            self._weight = weight
            self._bias = None if bias is None else bias.to(weight.dtype)

    @property
    def weight(self) -> Tensor | PackedMatrix:
        """What the layer can be made of again."""
        return self._weight if self.packed is None else self.packed

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` in the type of ``x``."""
        if not len(x):
            return x.new_empty(0, self.out_features)
        if self.packed is not None:
            return multiply(x.float().contiguous(), self.packed).to(x.dtype)
        if x.device.type != "cpu":
            return linear(x, self._weight, self._bias)
        return multiply_floats(x, self._weight, self._bias)
