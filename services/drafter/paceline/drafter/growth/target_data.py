"""The target's KV and hidden states as a draft reads them.

In pages of a GPU they stay where they are until the draft: its CUDA graph gathers them for all
texts by tables. Everything else that reads them makes copies first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.drafter.kv.reader import KvReader, StateSlice
from paceline.kernels import LayerTable


class KvLayers(Protocol):
    """Layers of a drafter, as far as what they read and write depends on them."""

    config: Any  # shape, a :class:`~paceline.drafter.methods.layers.LayerShape`
    dtype: torch.dtype  # type of the layers
    device: torch.device  # device of the layers
    bits: int  # of their matrices, 8 or 4; 0: as they came
    cached_layers: int  # layers with keys and values of a text
    context_layers: int  # layers that attend to contexts

    def states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states ``[n, taps * hidden]`` as inputs of the layers."""


class TargetKv:
    """A layer of the target's KV that a round of one generation reads; a ``KVCacheView`` of it."""

    # The copies for compiled programs; None if there are none on the CPU.
    table: LayerTable | None = None

    def __init__(self, kv: KvReader, number: int, layer: KvLayers) -> None:
        """Take what the newest :meth:`KvReader.refresh` selected of layer ``number``, for the
        ``layer`` that reads it. Keys and values are copied if they are of another type or device,
        or come in several parts; of pages when :meth:`layer` is called."""
        self._kv, self._number, self._reader = kv, number, layer
        self._planes: tuple[Tensor, Tensor] | None = None
        self.pages = kv.pages(number)  # where they lie in pages; None if copies were made
        # Number of positions, 1 or more.
        self.length = self.pages.length if self.pages is not None else self.layer(0)[0].shape[1]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each ``[Hkv, n, D]``. Raises ``KvGone`` if the page table is
        invalid."""
        if self._planes is None:
            reader, parts = self._reader, self._kv.parts(self._number)
            if not parts:  # an all-zero value row contributes nothing
                nothing = torch.zeros(reader.config.kv_heads, 1, reader.config.head_dim)
                parts = [(nothing, nothing)]
            keys, values = (
                (planes[0] if len(planes) == 1 else torch.cat(planes, dim=1)).to(
                    reader.device, reader.dtype
                )
                for planes in zip(*parts, strict=True)
            )
            self._planes = keys, values
            self.table = LayerTable.of([self._planes])
        return self._planes


class StateRows:
    """Hidden states of the rows of a pass."""

    def __init__(
        self, blocks: Sequence[StateSlice], convert: Callable[[Tensor], Tensor], repeats: int = 1
    ) -> None:
        """Take blocks, and what makes inputs ``[n, width]`` of states ``[n, layers * hidden]``."""
        self.blocks = blocks  # their positions, block after block
        # How often each position of a block is read, one row after the other.
        self.repeats = repeats
        self._convert = convert

    def tensor(self) -> Tensor:
        """Return the inputs ``[rows, width]``.

        Raises:
            KvGone: See :meth:`StateSlice.read`.
        """
        return self._convert(torch.cat([self.rows(block) for block in self.blocks]))

    def rows(self, block: StateSlice) -> Tensor:
        """Return the states of the rows of one of the blocks; errors as for :meth:`tensor`."""
        states = block.read()
        return states if self.repeats == 1 else states.repeat_interleave(self.repeats, 0)
