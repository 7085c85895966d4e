"""KV caches as programs see them: tensors or pages of each layer, and a table of addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paceline.kernels.paged import Plane, head_width


class KVCacheView(Protocol):
    """The KV cache of one sequence.

    Slot s holds the key and value of position s for committed tokens. The decoder writes those of
    the query block to the slots after them.
    """

    @property
    def table(self) -> LayerTable | None:
        """Addresses of all layers, made anew when the memory changes; None: KV in pages."""
        ...

    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Keys and values of a layer, each ``[Hkv, capacity, D]``, writable, last dim dense; int8
        as in :mod:`paceline.kernels.cache_rows`."""
        ...


class LayerTable:
    """Addresses and strides of the keys and values of one sequence, for compiled programs.

    The memory must outlive the table's use: the cache keeps both.

    Attributes:
        address: Address of the C array ``Cache [layers][2]``, keys then values.
        layers: Number of layers.
        heads: Kv heads of every layer.
        capacity: Slots of every layer.
        dim: Width of a head.
        dtype: Type of keys and values.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make the table of planes ``[Hkv, capacity, D]`` of one shape and type.

        Raises:
            ValueError: Shapes or types differ, or a last dimension is not dense.
        """
        first = layers[0][0]
        self.layers, self.dtype = len(layers), first.dtype
        self.heads, self.capacity, self.dim = first.shape[0], first.shape[1], head_width(first)
        self._rows = (ctypes.c_int64 * (6 * len(layers)))()
        self.address = ctypes.addressof(self._rows)
        for index, plane in enumerate(plane for both in layers for plane in both):
            if (plane.shape, plane.dtype, plane.stride(2)) != (first.shape, first.dtype, 1):
                raise ValueError(
                    f"a plane is {plane.dtype} {tuple(plane.shape)} with strides {plane.stride()}, "
                    f"expected {self.dtype} {tuple(first.shape)} with a dense last dimension"
                )
            for at, number in enumerate((plane.data_ptr(), plane.stride(0), plane.stride(1))):
                self._rows[3 * index + at] = number
