"""Drafters that record how they are used."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    GenerationInfo,
    LoadError,
    Needs,
    Resources,
    TokenTree,
    Update,
)

TARGET = "f" * 64
TOKENIZER = "a" * 64


class FakeSequence(DraftSequence):
    """Drafts the newest token once more."""

    def __init__(self, drafter: FakeDrafter, generation: GenerationInfo) -> None:
        self.drafter = drafter
        self.kv = generation.kv
        self.prefixes: list[list[Tensor]] = []
        self.text = list(generation.tokens)
        self.pending = len(self.text)
        self.stuck = False
        self.updates: list[Update] = []
        self.threads: set[str] = set()
        self.closed = 0

    @property
    def backlog(self) -> int:
        return 10**15 if self.stuck else self.pending

    def warm(self, limit: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.drafter.journal.append(("warm", min(limit, self.pending)))
        self.pending -= min(limit, self.pending)

    def extend(self, update: Update) -> None:
        self.threads.add(threading.current_thread().name)
        self.updates.append(update)
        self.text.extend(update.tokens)
        self.pending += len(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        assert not self.closed, "drafted after its end"
        self.threads.add(threading.current_thread().name)
        self.drafter.journal.append(("draft", len(self.text)))
        self.pending = 0
        if self.kv is not None:
            committed = self.kv.committed
            pairs = [self.kv.layer(index) for index in self.kv.layers]
            self.prefixes.append([plane[:, :committed] for pair in pairs for plane in pair])
            self.kv.check()
        if self.text[-1] == self.drafter.poison:
            raise RuntimeError("poisoned")
        return TokenTree((self.text[-1],), (-1,))

    def close(self) -> None:
        assert self.kv is None or self.kv.committed >= 0, "its KV was closed before it"
        self.closed += 1


class FakeDrafter(Drafter):
    """Every instance is in `loaded`."""

    method: ClassVar[str] = "fake"
    loaded: ClassVar[list[FakeDrafter]] = []
    poison = -1

    def __init__(self) -> None:
        self.journal: list[tuple[str, int]] = []
        self.batches: list[int] = []
        self.sequences: list[FakeSequence] = []
        self.closed = 0
        self.hold = threading.Event()
        self.hold.set()
        self.holding = threading.Event()
        FakeDrafter.loaded.append(self)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> FakeDrafter:
        if options.get("fail") == "memory":
            raise MemoryError("nothing is left")
        if "fail" in options:
            raise LoadError("BROKEN", options["fail"])
        made = cls()
        made.fit = Fit(
            target_fingerprint=options.get("target", ""),
            tokenizer_digest=options.get("tokenizer", ""),
            vocab_size=int(options.get("vocab", "0")),
        )
        if "kv" in options:
            made.needs = Needs(kv_layers=tuple(map(int, options["kv"].split("/"))))
        if "hidden" in options:
            made.needs = Needs(hidden_state_layers=(1, 2), hidden_state_window=7)
        return made

    def start(self, generation: GenerationInfo) -> FakeSequence:
        self.sequences.append(FakeSequence(self, generation))
        return self.sequences[-1]

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[TokenTree]:
        self.holding.set()
        assert self.hold.wait(60)
        self.batches.append(len(rounds))
        return super().draft_many(rounds)

    def close(self) -> None:
        assert all(sequence.closed == 1 for sequence in self.sequences), "closed before its streams"
        self.closed += 1


class SlowLoad(FakeDrafter):
    """Its load waits for `go_on`."""

    method: ClassVar[str] = "slow-load"
    go_on: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> FakeDrafter:
        assert cls.go_on.wait(60)
        return super().load(folder, options, resources)


def write_records(path: Path, *texts: tuple[list[int], list[int]]) -> Path:
    lines = [json.dumps({"prompt": prompt, "tokens": tokens}) for prompt, tokens in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


METHODS = {kind.method: f"{__name__}:{kind.__name__}" for kind in (FakeDrafter, SlowLoad)}
