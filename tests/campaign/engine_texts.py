"""Texts of tiny models by the verifier's engine, in this process: each is generated alone, a token
a step, and then in parts beside others, behind a fork or a prompt, with trees of all kinds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from decoder_cases import VOCAB, save_model
from draws import CONSTRAINTS, Draws, draw_border, draw_model, draw_sampling
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from test_gguf import UNKNOWN
from test_grammar import SCHEMA, TOKENIZER
from trees import SHAPES, draw_tree

from paceline.convert import load_decoder
from paceline.decoder import Decoder
from paceline.kv.selection import AttentionScores, Rows
from paceline.text import Text
from paceline.tree import TokenTree
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import (
    CachedSequence,
    ConstraintFailed,
    Decode,
    EngineJob,
    Prefill,
    Request,
)
from paceline.verifier.engine.local import LocalGuesses, LocalSources
from paceline.verifier.engine.report import LOCAL, FinishReason
from paceline.verifier.grammar import Grammar, Grammars, Guide
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.segment import SegmentMemory
from paceline.verifier.options import SOURCES

PARTS = 300
"""Texts of a case, about."""

LENGTHS = {48: 5, 120: 2, 300: 1}
"""Most tokens of a reference."""

BATCHES = {1: 1, 3: 1, 8: 2, 24: 3}
MANY = 1 << 30
STREAMS = {
    "whole": (MANY, MANY), "resumed each step": (1, MANY), "resumed each third step": (3, MANY),
    "left after a step": (1, 1), "left after two steps": (2, 1),
}  # fmt: skip
"""Steps of a stream, and streams."""
STREAMS_DRAWN = dict(zip(STREAMS, (4, 1, 1, 4, 3), strict=True))

WRITTEN = {
    "json_schema": json.dumps(SCHEMA),
    "regex": "([a-h]{1,3} ){20,60}",
    "grammar": 'start: item+ "."\nitem: /[a-z]{1,4}/ ("," | " ") | "{" item+ "}"',
}
"""Constraints."""

Writing = Generator[EngineJob, None, None]
"""Yields each job of a text, and goes on when that is done."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_GRAMMARS = Grammars(TOKENIZER.to_str().encode(), VOCAB, [0])


@cache
def compiled(kind: Any) -> Grammar:
    """One of the constraints."""
    return asyncio.run(_GRAMMARS.compile(kind, WRITTEN[kind]))


class Script(LocalGuesses):
    """Draws a tree for each step of a part, in the place of the verifier's own guesses."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part

    def propose(self, nodes: int, depth: int, least: float) -> TokenTree:
        """A tree that knows the text, whatever ``least`` is."""
        part = self._part
        right = part.reference.tokens[part.sequence.text.output_length :]
        return draw_tree(part.draws, right, VOCAB, nodes, depth, part.shape)


class Scripts(LocalSources):
    """Scripts of parts, by their texts. The verifier's own sources guess for the others."""

    def __init__(self) -> None:
        super().__init__(SOURCES)
        self.parts: dict[Text, Part] = {}

    def begin(self, text: Text, guide: Guide | None, owner: str) -> LocalGuesses | None:
        """The script of a part."""
        part = self.parts.get(text)
        return super().begin(text, guide, owner) if part is None else Script(part)


class World:
    """A tiny model, and an engine that is run in this thread."""

    def __init__(self, folder: Path, key: str) -> None:
        """Make what the key draws; models are kept in the folder."""
        draws = Draws(key)
        name, changes = draw_model(draws)
        self.drawn = draws.drawn
        torch.set_num_threads(1)
        self.decoder = self._load(folder, name, changes)
        assert self.decoder.native is not None, "equal bits are promised by compiled kernels alone"
        self.window = max((w for w in self.decoder.config.windows if w), default=None)
        self.layout = KvLayout.of(self.decoder.config)
        self.memory = SegmentMemory(self.layout, 1 << 34)
        self.scripts = Scripts()
        self.engine = Engine(
            self.decoder, step_tokens=self.drawn["step_tokens"], sources=self.scripts,
            prefill_tokens=self.drawn["prefill_tokens"], max_prefixes=self.drawn["prefixes"],
        )  # fmt: skip
        longest = min(self.drawn["longest"], self.decoder.config.max_position - max(LENGTHS))
        self.text = [draws.randrange(VOCAB) for _ in range(longest)]
        self.base = self.open(Request(Text(tuple(self.text), limit=len(self.text) + 1)))
        self.run([self.write(self.base)])

    def _load(self, folder: Path, name: str, changes: dict[str, Any]) -> Decoder:
        weights, format = self.drawn["weights"], None
        if weights.startswith("Q"):
            changes = changes | UNKNOWN.get(name, {}) | {"eos_token_id": 0}
            format, weights = GGMLQuantizationType[weights], "auto"
        made = "-".join([name, *(str(value) for value in changes.values())]).replace(" ", "")
        path = folder / made
        if not path.exists():
            unfinished = folder / f"{made}.{os.getpid()}"
            save_model(unfinished, name, **changes)
            unfinished.rename(path)
        if format is not None:
            file = path / f"{format.name}.gguf"
            path = file if file.exists() else write_gguf(file, path, format)
        options = {"kv_cache_dtype": self.drawn["kv"], "numerics": self.drawn["numerics"]}
        return load_decoder(path, weights, **options)

    def open(self, request: Request) -> CachedSequence:
        """A new sequence."""
        capacity, taps = self.layout.capacity(request.text.limit), None
        if request.taps is not None:
            taps = TapLayout.of(request.taps, self.layout, capacity)
        return CachedSequence(request, self.memory.allocate(capacity, taps))

    def write(
        self,
        sequence: CachedSequence,
        parent: CachedSequence | None = None,
        drafter: str | None = None,
        steps: int = MANY,
        streams: int = MANY,
    ) -> Writing:
        """Write a text. After so many steps its stream ends, and another goes on, if there is
        one."""
        job: Prefill | Decode = Prefill(sequence)
        self.engine.prefill(job, parent)
        yield job
        while job.error is None and sequence.finish is None and streams:
            streams -= 1
            job = Decode(sequence, drafter=drafter, credits=steps)
            self.engine.decode(job)
            yield job
        if job.error is not None:
            raise job.error

    @torch.inference_mode()  # as the engine's own thread
    def run(self, writings: list[Writing]) -> None:
        """Run the engine until all texts are written."""
        waiting = {writing: next(writing) for writing in writings}
        while waiting:
            self.engine.turn()
            for writing, job in list(waiting.items()):
                if job.done:
                    following = next(writing, None)
                    if following is None:
                        del waiting[writing]
                    else:
                        waiting[writing] = following
                elif isinstance(job, Decode) and not job.credits:
                    self.engine.cancel(job)

    def close(self) -> None:
        """Free its memory."""
        self.engine._close(self.base)
        self.engine.prefixes.clear()
        self.engine._thread.waiter.close()


class Reference:
    """A text that is generated alone, one token a step."""

    def __init__(self, world: World, draws: Draws) -> None:
        """Generate it. Raises ``ConstraintFailed``: no token of the vocabulary continues it."""
        self.world = world
        length = draws.pick("length", LENGTHS)
        self.border = draw_border(draws, world.window, len(world.text))
        self.position = max(1, self.border - draws.randint(0, min(length, 60)))
        kind = draws.pick("constraint", CONSTRAINTS)
        stop_ids = (
            [0] if kind != "none" else draws.sample(range(VOCAB), draws.pick("stops", [0, 1]))
        )
        taps = draws.pick("taps", {"none": 6, "all": 1, "window": 1})
        count = world.decoder.config.layers
        layers = tuple(sorted(draws.sample(range(count), draws.randint(1, count))))
        text = Text(
            world.text[: self.position],
            sampling=draw_sampling(draws, VOCAB),
            limit=self.position + length,
            stop_ids=frozenset(stop_ids),
        )
        self.request = Request(
            text,
            top_logprobs=draws.pick("top_logprobs", {0: 3, 4: 1}),
            taps=None if taps == "none" else Taps(layers, 40 if taps == "window" else 0),
            grammar=None if kind == "none" else compiled(kind),
        )
        self.drawn = draws.drawn
        self.sequence = world.open(self.request)
        try:
            world.run([world.write(self.sequence, world.base)])
        except ConstraintFailed:
            world.engine._close(self.sequence)
            raise
        self.tokens = self.sequence.tokens[self.position :].tolist()


class Part:
    """A part of a reference, generated again with drafts."""

    def __init__(self, reference: Reference, draws: Draws) -> None:
        self.reference, self.draws, world = reference, draws, reference.world
        whole = reference.request
        self.shape = draws.pick("shape", {"mixed": 6, "local": 0.4, **SHAPES})
        self.behind = draws.pick("behind", {"fork": 8, "prompt": 3, "found": 1})
        if self.behind == "found" and reference.position > 700 and not world.drawn["prefixes"]:
            draws.drawn["behind"] = self.behind = "prompt"
        self.stream = draws.pick("stream", STREAMS_DRAWN)
        # The first tree is below the token at this position.
        near = reference.border - draws.choice((draws.randint(-1, 2), draws.randint(0, 30)))
        first = max(0, near - reference.position)
        if first >= len(reference.tokens) or draws.random() < 0.3:
            first = draws.randrange(len(reference.tokens))
        self.first, left = first, len(reference.tokens) - first
        count = (
            left if STREAMS[self.stream][1] <= 2 else draws.randint(1, draws.choice((3, 8, left)))
        )
        count = min(count, left)
        self.drawn = draws.drawn
        output = reference.tokens[:first]
        self.sequence = world.open(
            replace(
                whole,
                text=Text(
                    world.text[: reference.position],
                    output,
                    limit=reference.position + first + count,
                    sampling=whole.text.sampling,
                    stop_ids=whole.text.stop_ids,
                ),
                grammar=whole.grammar and whole.grammar.after(output),
            )
        )
        if draws.pick("scores", {"none": 9, "of attention": 1}) != "none":
            layers, rows = range(world.decoder.config.kv_layers), draws.choice(list(Rows))
            weights, observed = draws.random() < 0.5, self.sequence.kv
            observer = AttentionScores(observed, layers, rows, weights=weights)
            self.sequence.observers.append(observer)
            self.sequence.prompt_observers.append(observer)
        if self.shape != "local":
            world.scripts.parts[self.sequence.text] = self
            self.shape = "" if self.shape == "mixed" else self.shape

    def write(self) -> Writing:
        """Write it."""
        world = self.reference.world
        parents = {"fork": self.reference.sequence, "prompt": world.base, "found": None}
        return world.write(self.sequence, parents[self.behind], LOCAL.name, *STREAMS[self.stream])

    def differences(self) -> list[str]:
        """What differs from the reference, bit for bit."""
        own, reference = self.sequence, self.reference.sequence
        first, stop = self.first, own.text.output_length
        finish, full = None, len(own.tokens) == own.text.limit
        if stop == len(self.reference.tokens):
            finish = reference.finish
        elif full or STREAMS[self.stream][1] > 1:
            finish = FinishReason.LENGTH
        begin = max(0, self.reference.position - 1)
        compared = {
            "tokens": own.tokens[-(stop - first) :].tolist() == self.reference.tokens[first:stop],
            "finish": own.finish == finish and (full or own.finish != FinishReason.LENGTH),
            "log-probabilities": own.logprobs == reference.logprobs[first:stop],
            "likeliest tokens": own.top_logprobs == reference.top_logprobs[first:stop],
            "keys and values": _same_kv(own, reference, begin),
            "hidden states": _same_states(own, reference, begin),
        }
        return [name for name, same in compared.items() if not same]

    def close(self) -> None:
        """Free its memory, or leave it to later prompts."""
        self.reference.world.scripts.parts.pop(self.sequence.text, None)
        self.reference.world.engine._close(self.sequence)


def _same_kv(own: CachedSequence, reference: CachedSequence, begin: int) -> bool:
    """Whether committed keys and values from a position on are the same."""
    mine, theirs = (
        each.kv.kv[..., begin : own.committed, :].view(_BITS[each.kv.kv.itemsize])
        for each in (own, reference)
    )
    return torch.equal(mine, theirs)


def _same_states(own: CachedSequence, reference: CachedSequence, begin: int) -> bool:
    """Whether the hidden states from a position on that both keep are the same."""
    mine, theirs = own.kv.taps, reference.kv.taps
    if mine is None or theirs is None:
        return True
    stop = min(own.committed, reference.committed)
    kept = mine.first_kept(own.committed), theirs.first_kept(reference.committed)
    begin = max(begin, *kept)
    layers = mine.layout.taps.layers
    pairs = zip(mine.gather(layers, begin, stop), theirs.gather(layers, begin, stop), strict=True)
    return begin >= stop or all(torch.equal(a, b) for a, b in pairs)


def run_case(world: World, key: str) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Generate references, and then many parts of them; yields what was drawn for each text and
    what differs."""
    draws = Draws(key, world.drawn)
    torch.set_num_threads(1)
    references = []
    for _ in range(draws.pick("references", {1: 3, 2: 1, 3: 1})):
        own = Draws(f"{key}/{draws.random()}", draws.drawn)
        with suppress(ConstraintFailed):
            references.append(Reference(world, own))
            yield own.drawn, []
    written = 0
    while references and written < PARTS:
        threads, count = draws.pick("threads", {1: 9, 2: 1}), draws.pick("batch", BATCHES)
        torch.set_num_threads(threads)
        parts = []
        for _ in range(count):
            reference = draws.choice(references)
            drawn = {**reference.drawn, "threads": threads, "batch": count}
            parts.append(Part(reference, Draws(f"{key}/{draws.random()}", drawn)))
        world.run([part.write() for part in parts])
        for part in parts:
            yield part.drawn, part.differences()
        for part in parts:
            part.close()
        written += count
    for reference in references:
        world.engine._close(reference.sequence)
    world.engine.prefixes.clear()
