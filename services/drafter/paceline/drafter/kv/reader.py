"""The interface by which methods read the target's committed KV and hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import streaming
from paceline.kernels.caches import from_rows


@dataclass(frozen=True)
class KvPages:
    """Where the selected positions of a layer lie on the GPU that reads, for kernels that gather.

    The first ``SINKS`` selected positions are the text's first; the others follow one another.
    """

    dtype: torch.dtype  # type of keys and values
    # Shape of the layer's keys in a page, `(Hkv, page_size, D)`; its values follow them.
    shape: tuple[int, int, int]
    address: int  # address of the layer's keys in page 0
    page_bytes: int  # distance between two pages
    length: int  # number of positions, 1 or more
    first: int  # position of number ``SINKS``
    # The page of position 0, then those from the page of `first` on, int32.
    pages: NDArray[np.int32]


class StateSlice:
    """Hidden states at neighbouring positions, which were copied or still lie in pages."""

    def __init__(
        self,
        first: int,
        states: Tensor | Callable[[], Tensor],
        addresses: NDArray[np.int64] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take states ``[count, layers * hidden]``; or addresses, a type and what copies them."""
        self.first = first  # the first position
        self.dtype = dtype  # type of states that lie in pages
        # Addresses of each position's rows, by layer, on the GPU that reads, int64 `[count,
        # layers]`; None if they were copied.
        self.addresses = addresses
        self._states = states
        if addresses is not None:
            self.count = len(addresses)  # number of positions
        else:
            assert isinstance(states, Tensor)
            self.count = len(states)

    def read(self) -> Tensor:
        """Return the states ``[count, layers * hidden]``. Raises ``KvGone`` if the page table is
        invalid, or rows may have been overwritten."""
        if not isinstance(self._states, Tensor):
            self._states = self._states()
        return self._states


class CacheReader(ABC):
    """Reads the committed part of one cache.

    One thread at a time. The caller that opened a reader closes it, once, after its last use.
    """

    # How the contents get here: map (the verifier's memory is mapped) or follow (over gRPC).
    transport: str = "map"

    @property
    def received(self) -> int:
        """Bytes received over gRPC so far."""
        return 0

    @property
    @abstractmethod
    def committed(self) -> int:
        """Positions below this may be read. It grows with each round. Unit: tokens."""

    @abstractmethod
    def check(self) -> None:
        """Check that the cache still exists: call it after reading, before using what was read.
        Raises ``KvGone`` if the cache was released, its verifier has ended, or its updates are
        invalid."""

    def settle(self) -> None:
        """Wait for the copies that were asked for, then :meth:`check`: for a caller that has not
        waited for what it computed from them. Raises ``KvGone`` as it does."""
        self.check()

    @abstractmethod
    def close(self) -> None:
        """Release memory and connections. Closing twice is safe."""


class KvReader(CacheReader):
    """Keys (after RoPE) and values of some layers.

    In each round a method calls :meth:`refresh` once, then :meth:`parts` for each layer.
    """

    # Layers as the method named them; negative ones count from the last.
    layers: tuple[int, ...] = ()

    @abstractmethod
    def refresh(self, below: int, budget: int) -> int:
        """Begin a round: apply newer updates, and select at most ``budget`` positions per layer (0:
        all) by the selection policy, below ``below``: the verifier may be ahead of the drafter's
        text. Returns the length that the selection covers: positions from here on are not in
        :meth:`parts`.

        A selection that the verifier sends may be a round or two old. Newer positions of a mapped
        cache are then read in addition to the budget; of a cache that is followed they are missing.
        Raises ``KvGone`` as :meth:`check`.
        """

    @abstractmethod
    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of the selected positions of one of :attr:`layers`, read-only: one
        part after the other, each ``[Hkv, n, D]`` with n > 0, floats whatever the type of the
        cache. They stay unchanged until the next :meth:`refresh`. Raises ``KvGone`` as
        :meth:`check`."""

    def order(self, layer: int) -> Tensor | None:
        """Return the places of the selected positions in :meth:`parts` by rising position, int64
        ``[n]``; None if they rise."""
        return None

    def pages(self, layer: int) -> KvPages | None:
        """Return where the selected positions of a layer lie; None if they do not lie in pages of
        one GPU, or no kernel can gather them. Raises ``KvGone`` if the page table is invalid."""
        return None


class StreamingReader(KvReader):
    """Selects the first positions and the newest (policy ``streaming``), of contiguous memory."""

    _ranges: Sequence[range] = ()

    @abstractmethod
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[Hkv, capacity, D]``; int8 as in
        :mod:`paceline.kernels.caches`."""

    def refresh(self, below: int, budget: int) -> int:
        length = min(self.committed, below)
        self._ranges = streaming(length, budget)
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """See :class:`KvReader`. The parts are views; of int8 they are copies."""
        keys, values = self.layer(layer)
        return [
            (
                from_rows(keys[:, part.start : part.stop]),
                from_rows(values[:, part.start : part.stop]),
            )
            for part in self._ranges
        ]


class StateReader(CacheReader):
    """Hidden states: outputs of some layers."""

    paged: bool = False  # whether :meth:`slice` returns addresses

    async def wait_for(self, committed: int, seconds: float) -> None:
        """Wait until positions below ``committed`` can be read, at most ``seconds``. Event loop."""

    @abstractmethod
    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """Copy the outputs of all layers, side by side, of positions ``begin`` to ``end``, at most
        :attr:`committed`. Returns the first position that is available, ``begin`` or a later one if
        that is no longer kept, and the rows ``[end - first, layers * hidden]``."""

    def slice(self, begin: int, end: int) -> StateSlice:
        """As :meth:`read`, but states in pages of a GPU are not copied yet."""
        first, states = self.read(begin, end)
        return StateSlice(first, states)
