"""A method that guesses from the target's own KV: for tests in real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    LoadError,
    Needs,
    Resources,
    TokenTree,
    Update,
)
from paceline.drafter.kv.mapped import SharedKv

LAYERS = (0, -1)


class _Sequence(DraftSequence):
    """Repeats the token after the committed position whose last key is nearest the newest one."""

    def __init__(self, kv: SharedKv, generation: GenerationInfo) -> None:
        self._kv = kv
        self._text = list(generation.tokens)

    def extend(self, update: Update) -> None:
        self._text += update.tokens

    def draft(self, budget: Budget) -> TokenTree:
        committed = min(self._kv.committed, len(self._text) - 1)
        assert committed >= 2
        near = 0.0
        for layer in LAYERS:
            keys, values = (plane[:, :committed] for plane in self._kv.layer(layer))
            near = near + (keys @ keys[:, -1:].mT).sum(0) + (values @ values[:, -1:].mT).sum(0)
        guess = self._text[int(near[:-1].argmax()) + 1]
        self._kv.check()
        return TokenTree((guess,), (-1,))


class KvReader(Drafter):
    """Needs the first and the last layer."""

    method: ClassVar[str] = "kv-reader"
    needs = Needs(kv_layers=LAYERS)

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        if folder is not None:
            raise LoadError("FOLDER_NOT_WANTED", "it has no weights")
        return cls()

    def start(self, generation: GenerationInfo) -> _Sequence:
        assert generation.kv is not None
        return _Sequence(generation.kv, generation)
