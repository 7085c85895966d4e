"""KV cache of one sequence in private memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig
from paceline.kernels import LayerTable, RecurrentStates
from paceline.kernels.caches import row_width

_GROWTH = 256


class LocalCache:
    """A cache in the memory of one process, which grows as needed; a ``KVCacheView``.

    In a round, ``reserve`` slots for the block, run the decoder with a block that starts at
    ``len(cache)``, then ``commit`` the accepted path.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        """Make an empty cache for a model."""
        self._shape = (config.kv_layers, 2, config.kv_heads)
        self._width = row_width(config.head_dim, config.kv_dtype)
        self._dtype = config.kv_dtype
        self._device = device
        self._length = 0
        self.states = None if config.delta is None else RecurrentStates(config.delta)
        self._keep(self._allocate(_GROWTH))

    def __len__(self) -> int:
        """Return the number of committed tokens."""
        return self._length

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._store.shape[3]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[Hkv, capacity, D]`` (int8 as in
        :mod:`paceline.kernels.caches`); stale after ``reserve``."""
        return self._views[index]

    def reserve(self, nodes: int) -> None:
        """Make room for ``nodes`` slots after the committed ones."""
        need = self._length + nodes
        if need <= self.capacity:
            return
        grown = self._allocate(-(-max(need, self.capacity * 3 // 2) // _GROWTH) * _GROWTH)
        grown[..., : self.capacity, :] = self._store
        self._keep(grown)

    def commit(self, path: Sequence[int]) -> None:
        """Commit these nodes of the block, by strictly rising indices from the root down, and drop
        the others. Raises ``ValueError`` if the indices do not rise or lie outside the cache."""
        nodes = list(path)
        if any(b <= a for a, b in zip([-1, *nodes], nodes, strict=False)):
            raise ValueError(f"path {nodes} must be strictly rising block indices")
        if nodes and self._length + nodes[-1] >= self.capacity:
            raise ValueError(
                f"path ends at node {nodes[-1]}, but only {self.capacity - self._length} slots "
                "are reserved"
            )
        start, count = self._length, len(nodes)
        if nodes != list(range(count)):
            slots = torch.tensor(nodes, device=self._store.device) + start
            self._store[..., start : start + count, :] = self._store[..., slots, :]
            if self.states is not None:
                self.states.compact([start + node for node in nodes], start)
        self._length = start + count

    def take(self, other: LocalCache, slots: Sequence[int] | Tensor) -> None:
        """Commit copies of slots of another cache of the same model, in that order.

        Keys are stored after RoPE, so a slot's position does not change. Recurrent states are not
        taken.
        """
        count = len(slots)
        self.reserve(count)
        chosen = torch.as_tensor(slots, dtype=torch.int64, device=self._store.device)
        self._store[..., self._length : self._length + count, :] = other._store[..., chosen, :]
        self._length += count

    def truncate(self, length: int) -> None:
        """Drop all positions from ``length`` on. Recurrent states are kept for few lengths: the
        next pass fails where they are not. Raises ``ValueError``: ``length`` is above the committed
        length."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: {self._length} tokens are committed")
        self._length = length

    def _keep(self, store: Tensor) -> None:
        self._store = store
        self._views = [(both[0], both[1]) for both in store]
        self.table = LayerTable.of(self._views)

    def _allocate(self, capacity: int) -> Tensor:
        with torch.inference_mode(False):  # tensors of inference mode are read-only outside of it
            shape = (*self._shape, capacity, self._width)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
