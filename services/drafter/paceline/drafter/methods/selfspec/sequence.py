"""The state of one generation of ``selfspec``: the round's sparse KV and its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import KvReader
from paceline.drafter.methods.base import Generation
from paceline.drafter.methods.decoder_sequence import DecoderSequence
from paceline.kernels import LayerTable

if TYPE_CHECKING:
    from paceline.drafter.methods.selfspec.drafter import SelfSpecDrafter

MAX_NEW_TOKENS = 128
"""Most tokens behind the target's KV that a round feeds. With more of them, as after a lost
connection, catching up would take longer than a draft saves: the tree is empty. Unit: tokens."""

_GROWTH = 256


class SelfSpecSequence(DecoderSequence):
    """One generation of ``selfspec``; a ``KVCacheView`` for the decoder.

    Each round begins with a table of the target's selected positions, in any order, since their
    keys are rotated already. They are followed by the tokens that the target's KV does not contain
    yet, which include the anchor, and then by the nodes of the tree.
    """

    _drafter: SelfSpecDrafter

    def __init__(self, drafter: SelfSpecDrafter, generation: Generation, kv: KvReader) -> None:
        super().__init__(drafter, generation)
        self.kv = kv
        self._set_slots(0)
        self._begin = self._slot = 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, each ``[Hkv, capacity, D]``."""
        return self._layers[index]

    def prepare(self) -> bool:
        """Copies the selected positions of all layers. Returns False without any, or too few."""
        self.kv.check()
        below = self.length - 1
        budget = self._drafter.needs.kv_budget_at(below)
        self._begin = self.kv.refresh(below, budget)
        layers = [self.kv.parts(layer) for layer in range(self._drafter.decoder.config.layers)]
        self._slot = sum(keys.shape[1] for keys, _ in layers[0])
        new = self.length - self._begin
        if not self._slot or new > MAX_NEW_TOKENS:
            return False
        slots = self._slot + new + self._drafter.options.drafted
        if slots > self._layers[0][0].shape[1]:
            self._set_slots(-(-slots // _GROWTH) * _GROWTH)
        for (own_keys, own_values), parts in zip(self._layers, layers, strict=True):
            begin = 0
            for keys, values in parts:
                stop = begin + keys.shape[1]
                own_keys[:, begin:stop] = keys
                own_values[:, begin:stop] = values
                begin = stop
        return True

    @property
    def begin_position(self) -> int:
        return self._begin

    @property
    def begin_slot(self) -> int:
        return self._slot

    def commit_text(self) -> None:
        self._slot += self.length - self._begin

    def finish(self) -> None:
        self.kv.check()

    def close(self) -> None:
        super().close()
        self._set_slots(0)

    def _set_slots(self, slots: int) -> None:
        """Makes new memory of so many slots; its content is 0."""
        decoder = self._drafter.decoder
        config = decoder.config
        shape = (config.layers, 2, config.kv_heads, slots, config.head_dim)
        with torch.inference_mode(False):
            store = torch.zeros(shape, dtype=config.dtype, device=decoder.device)
        self._layers = [(both[0], both[1]) for both in store]
        self.table = LayerTable(self._layers)
