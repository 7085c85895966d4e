"""Linear layers, also of routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from paceline.device import device_of
from paceline.kernels import kernels_for
from paceline.kernels.linear import PackedMatrix, multiply, multiply_floats, pack, pack_quantised
from paceline.kernels.quantised import QuantisedMatrix
from paceline.kernels.rotated import IntSums, RotatedMatrix


def is_rotated(weights: str, device: torch.device) -> bool:
    """Return whether torch multiplies matrices of a format in 8 bits over rotated inputs on a
    device: a CPU has packed ones."""
    return weights == "int8" and not device_of(device).packs


class Linear:
    """``x @ weight.T + bias``, by the compiled kernels on the CPU and by torch elsewhere."""

    # Rising numbers of rows that products have off the CPU, see paceline.cuda.products;
    # None: as many as the input.
    fixed_rows: tuple[int, ...] | None = None

    def __init__(
        self,
        weight: Tensor | QuantisedMatrix | PackedMatrix | RotatedMatrix,
        bias: Tensor | None = None,
    ) -> None:
        """Make a layer of a weight ``[out, in]`` in float32, bfloat16, blocks, or 8 bits over
        rotated inputs, and a bias ``[out]`` or None. A packed weight contains its bias."""
        # The packed weight of the compiled kernels; None: torch multiplies.
        self.packed: PackedMatrix | None = None
        self._int8: RotatedMatrix | None = None
        if isinstance(weight, PackedMatrix):
            self.packed = weight
            self.out_features, self.in_features = weight.outs, weight.ins
            return
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, QuantisedMatrix):
            self.packed = pack_quantised(weight, bias)
        elif isinstance(weight, RotatedMatrix):
            self._int8 = weight
            self._bias = None if bias is None else bias.float().to(weight.scale.device)
        elif device_of(weight.device).packs:
            self.packed = pack(weight, bias, str(weight.dtype).removeprefix("torch."))
        else:
            self._weight = weight
            self._bias = None if bias is None else bias.to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """``[out]``, or None."""
        return self._bias if self.packed is None else self.packed.bias

    @property
    def weight(self) -> Tensor | PackedMatrix | RotatedMatrix:
        """What the layer can be made of again."""
        if self.packed is not None:
            return self.packed
        return self._weight if self._int8 is None else self._int8

    @property
    def dtype(self) -> torch.dtype:
        """Type of its inputs off the CPU."""
        return torch.bfloat16 if self._int8 is not None else self._weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weight is."""
        if self.packed is not None:
            return self.packed.values.device
        return self._weight.device if self._int8 is None else self._int8.values.device

    @property
    def exact(self) -> bool:
        """Whether its sums are integers, so that no order changes them."""
        return self._int8 is not None

    @property
    def shape_key(self) -> tuple[object, ...]:
        """Equal for layers whose products libraries compute alike."""
        quantised = self.packed is not None or self._int8 is not None
        kind = "quantised" if quantised else self._weight.dtype
        return self.out_features, self.in_features, kind, self.bias is None

    def sums(self, x: Tensor) -> IntSums | None:
        """Return the product before its scales, if the layer's sums are integers."""
        return self._int8.sums(x, self._bias) if self._int8 is not None else None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` in the type of ``x``; a ``bias`` ``[out]`` of this type
        replaces the layer's."""
        if self.packed is not None:
            wide = None if bias is None else bias.float()
            return multiply(x.float().contiguous(), self.packed, wide).to(x.dtype)
        bias = self._bias if bias is None else bias
        if self._int8 is not None:
            return self._int8.multiply(x, None if bias is None else bias.float())
        if self.fixed_rows is not None:
            return multiply_floats(x, self._weight, bias, self.fixed_rows)
        return linear(x, self._weight, bias)


class Experts:
    """The linear layers of the experts of a layer, see
    :class:`~paceline.kernels.program.ExpertMatrices`."""

    def __init__(self, experts: Sequence[Linear]) -> None:
        """Take the layers, which have one shape."""
        self.experts = experts  # the matrix of each expert
        self._stacked: Tensor | None = None
        self._bias: Tensor | None = None
        if not isinstance(experts[0].weight, Tensor):
            return
        # Views of one tensor, for products that run all experts in one call.
        weights, biases = zip(*((expert.weight, expert.bias) for expert in experts), strict=True)
        self._stacked = torch.stack(weights)
        self._bias = None if biases[0] is None else torch.stack(biases).to(weights[0].dtype)
        self.experts = [Linear(*pair) for pair in zip(self._stacked, biases, strict=True)]

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """``[slots, in]`` to ``[slots, out]``, each by its expert: int64 ``[slots]``, rising.

        On a GPU the shapes of all calculations depend on the number of slots alone.
        """
        if self._stacked is not None:
            multiply = kernels_for(x.device).multiply_by_experts
            return multiply(x, self._stacked, self._bias, chosen)
        numbers = torch.arange(len(self.experts), device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(self.experts, x.split(counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


@dataclass(frozen=True)
class FixedProducts:
    """How the products of a model are computed."""

    # For each shape `OUTSxINS` the numbers of rows that its products have, or that they are sums of
    # integers, which are exact in any order.
    rules: dict[str, str]
    differs: str  # why the bits of a row still depend on other rows; empty if they do not
    digest: str  # SHA-256 (hex) of test products

    def __str__(self) -> str:
        """Return what bits depend on: the rules with the shapes that have them, and the digest."""
        shapes: dict[str, list[str]] = {}
        for shape, rule in self.rules.items():
            shapes.setdefault(rule, []).append(shape)
        named = [f"products of {rule}: {' '.join(names)}" for rule, names in shapes.items()]
        return ", ".join([*named, f"digest {self.digest[:16]}"])
