"""KV and hidden states in the verifier's POSIX shared memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.drafter.kv.description import read_kv, read_states, resolve
from paceline.drafter.kv.mapping import MappedReader
from paceline.drafter.kv.reader import MappedKv, StateReader, StreamingReader
from paceline.kernels.cache_rows import from_rows
from paceline.kv.segment import TAP_AHEAD
from paceline.v1 import kv_pb2


class SharedKv(MappedReader, StreamingReader, MappedKv):
    """K and V of some layers in the verifier's own memory.

    For the safety contract see :class:`MappedReader`.
    """

    def __init__(
        self, response: kv_pb2.MapCacheResponse, read_grant: bytes, layers: Iterable[int]
    ) -> None:
        """Map the memory that a verifier described, after checking the description.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            layers: Layers to map. Negative ones count from the last; ``response`` must then
                describe all layers.

        Raises:
            KvNotShared: The description is wrong, or the file is not as described.
        """
        description = read_kv(response, paged=False)
        self.layers = tuple(layers)
        numbers = resolve(self.layers, description.layers)
        super().__init__(description.file, read_grant, description.capacity)
        self.byte_size = len(self.layers) * description.layer_bytes
        elements = self._elements(description.dtype)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, number in zip(self.layers, numbers, strict=True):
            keys, values = description.layers[number]
            self._views[layer] = (keys.view(elements), values.view(elements))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys (after RoPE) and values of a layer on the CPU, each ``[heads, capacity,
        head_dim]``, last dimension dense; int8 as in :mod:`paceline.kernels.cache_rows`.

        Args:
            index: One of :attr:`layers`.

        Raises:
            KeyError: The layer was not mapped, or the mapping was closed.
        """
        return self._views[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`MappedKv`."""
        keys, values = self._views[layer]
        return (
            from_rows(keys.index_select(1, positions)),
            from_rows(values.index_select(1, positions)),
        )

    def close(self) -> None:
        """See :class:`MappedReader`."""
        self._views = {}
        super().close()


class SharedStates(MappedReader, StateReader):
    """Hidden states of some layers in the verifier's own memory.

    Each layer has a ring: position p lies in slot ``p % slots``. :meth:`read` copies, and drops
    rows that may have been overwritten during the copy (see
    :class:`paceline.kv.segment.SegmentHeader`).
    """

    def __init__(
        self,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Sequence[int],
        window: int,
    ) -> None:
        """Map the memory that a verifier described, after checking the description.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            layers: Layers, in the order in which they are read.
            window: Newest positions that are read; 0: all.

        Raises:
            KvNotShared: The description is wrong, or the file is not as described.
        """
        file, rings = read_states(response, layers, window)
        super().__init__(file, read_grant, sys.maxsize)
        self.byte_size = file.byte_size
        self._window = window
        self._slots = rings[0].shape[0]
        elements = self._elements()
        self._rings = [ring.view(elements) for ring in rings]

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """See :class:`StateReader`."""
        begin = min(end, max(begin, self._oldest()))
        slots = torch.arange(begin, end) % self._slots
        states = torch.cat([ring.index_select(0, slots) for ring in self._rings], dim=1)
        # Rows may have been overwritten while they were copied.
        first = min(end, max(begin, self._oldest()))
        return first, states[first - begin :]

    def close(self) -> None:
        """See :class:`MappedReader`."""
        self._rings = []
        super().close()

    def _oldest(self) -> int:
        """Returns the oldest position whose row cannot be overwritten now."""
        committed = self.committed
        kept = committed - self._window if self._window else 0
        return max(kept, committed + TAP_AHEAD - self._slots, 0)
