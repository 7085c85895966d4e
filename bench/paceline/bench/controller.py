"""`paceline bench controller`: whether the verifier finds where drafting pays.

Every prompt is generated without drafts, with drafts in every round, and with the controller, in
turns, by the same two services. The controller should be as fast as the better of the two others.
Prompts that repeat themselves are source files of this project; the others are questions answered
at temperature 1. Then a drafter that takes 0.8 s for a tree, and one whose trees are wrong for the
first half of a text and right for the second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from paceline.bench.plugins import register
from paceline.bench.prompts import tokenizer
from paceline.bench.record import Results, digest
from paceline.bench.replay_method import (
    Records,
    ReplayDrafter,
    ReplayOptions,
    ReplaySequence,
    read_records,
)
from paceline.bench.services import ALWAYS, generate, recording, services
from paceline.client import Client
from paceline.drafter import Budget, GenerationInfo, Resources, TokenTree
from paceline.drafter.methods.base import parse_options

MODES = ("none", "always", "controller")
SOURCES = ("_generation", "_client", "_transport", "_options", "_output", "_text", "_errors")
QUESTIONS = (
    "Why is the sky blue at noon and red in the evening?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do bees tell each other where flowers are?",
    "Describe a walk through a market in a small town by the sea.",
    "What should I think about before I buy an old bicycle?",
    "Explain to a child how a bridge carries a train.",
    "Give me ideas for a dinner with friends who do not eat meat.",
    "What happened to the cities of the Maya?",
)


def repeating(count: int, characters: int = 5000) -> list[tuple[str, dict[str, Any]]]:
    """Prompts whose continuation repeats much of them."""
    texts = []
    for index in range(count):
        spec = find_spec(f"paceline.client.{SOURCES[index % len(SOURCES)]}")
        assert spec is not None
        assert spec.origin is not None
        texts.append((Path(spec.origin).read_text()[:characters], {"temperature": 0.0}))
    return texts


def varied(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts whose continuation repeats little."""
    return [
        (QUESTIONS[index % len(QUESTIONS)] + "\n\n", {"temperature": 1.0, "seed": index})
        for index in range(count)
    ]


async def measure(
    target: Path, weights: str, drafter: str, users: Sequence[int], tokens: int, repeats: int
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Tokens per second by kind of prompt and users, each with its name.

    Args:
        target: A Hugging Face folder.
        weights: Format of the target's weights.
        drafter: METHOD[:DIR][,KEY=VALUE...].
        users: Numbers of generations at a time.
        tokens: Tokens of a generation.
        repeats: Times that each mode generates all prompts, in turn with the others.
    """
    async with AsyncExitStack() as stack:
        running = stack.enter_context(
            services(target, dict.fromkeys(("controller", "always"), drafter), weights)
        )
        adaptive = await stack.enter_async_context(running.client())
        always = await stack.enter_async_context(running.client(ALWAYS))
        clients = {"none": adaptive, "controller": adaptive, "always": always}
        for kind, prompts in (("repeating", repeating), ("varied", varied)):
            for count in users:
                texts = prompts(8)
                for mode in MODES:  # the first time everything is slower
                    await _all(clients[mode], mode, texts[:count], 32, count)
                rates: dict[str, list[float]] = {mode: [] for mode in MODES}
                for turn in range(repeats):
                    for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                        rates[mode].append(await _all(clients[mode], mode, texts, tokens, count))
                yield f"{kind}, {count} users", _summary(rates)


@dataclass(frozen=True)
class _ChangingOptions(ReplayOptions):
    seconds: float = 0.0
    wrong_until: int = 0


class _ChangingSequence(ReplaySequence):
    _options: _ChangingOptions

    def draft(self, budget: Budget) -> TokenTree:
        time.sleep(self._options.seconds)
        tree = super().draft(budget)
        if self._emitted >= self._options.wrong_until:
            return tree
        return TokenTree(tuple(token ^ 1 for token in tree.tokens), tree.parents)


class Changing(ReplayDrafter):
    """``replay`` that takes ``seconds`` for a tree, and drafts wrong tokens up to a position."""

    method: ClassVar[str] = "changing"
    _options: _ChangingOptions

    def __init__(self, options: _ChangingOptions, records: Records) -> None:
        super().__init__(options, records)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> Changing:
        assert folder is not None
        return cls(parse_options(_ChangingOptions, options), read_records(folder))

    def start(self, generation: GenerationInfo) -> _ChangingSequence:
        return _ChangingSequence(self._options, self._records, generation)


async def adapt(target: Path, weights: str, tokens: int = 1000) -> dict[str, dict[str, Any]]:
    """One generation with a slow drafter, and one with a drafter that becomes good.

    Args:
        target: A Hugging Face folder.
        weights: Format of the target's weights.
        tokens: Tokens of each generation.
    """
    [(text, sampling)] = varied(1)
    prompt = tokenizer(target).encode(text).ids
    half = tokens // 2
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        environment = register(Path(folder), {"changing": "paceline.bench.controller:Changing"})
        file = Path(folder) / "recording.jsonl"
        file.write_text(await recording(target, weights, prompt, tokens, **sampling))
        drafters = {
            "slow": f"changing:{file},p=0.9,seconds=0.8",
            "improving": f"changing:{file},p=0.9,wrong_until={half}",
        }
        found: dict[str, dict[str, Any]] = {}
        with services(target, drafters, weights, environment=environment) as running:
            async with running.client() as client:
                for name in ("none", *drafters):
                    stats = (await generate(client, prompt, tokens, name, **sampling)).stats
                    decoding = (stats.total_ms - stats.first_token_ms) / 1e3
                    ends = list(accumulate(entry.emitted for entry in stats.rounds))
                    found[name] = {
                        "tokens_per_second": round((tokens - 1) / decoding, 1),
                        "drafted_rounds": stats.drafted_rounds,
                        "rounds_before_half": sum(
                            bool(entry.drafted)
                            for entry, end in zip(stats.rounds, ends, strict=True)
                            if end < half
                        ),
                        "first_accepted_after": next(
                            (
                                end - entry.emitted
                                for entry, end in zip(stats.rounds, ends, strict=True)
                                if entry.accepted and end > half
                            ),
                            None,
                        ),
                    }
    return found


async def _all(
    client: Client, mode: str, texts: list[tuple[str, dict[str, Any]]], tokens: int, users: int
) -> float:
    """Tokens per second after the first tokens: the mean over generations, times the users."""
    waiting = iter(texts)
    rates: list[float] = []

    async def user() -> None:
        for text, sampling in waiting:
            began = time.perf_counter()
            result = await client.generate(
                text,
                max_new_tokens=tokens,
                ignore_eos=True,
                drafter=mode,
                **sampling,
            )
            decoding = time.perf_counter() - began - result.stats.first_token_ms / 1e3
            rates.append((tokens - 1) / decoding)

    await asyncio.gather(*(user() for _ in range(users)))
    return users * statistics.harmonic_mean(rates)


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    middle = {mode: statistics.median(each) for mode, each in rates.items()}
    best = [
        ours / max(none, every)
        for none, every, ours in zip(*(rates[mode] for mode in MODES), strict=True)
    ]
    return {
        **{mode: round(rate, 1) for mode, rate in middle.items()},
        "over_better": round(middle["controller"] / max(middle["none"], middle["always"]), 3),
        "over_better_by_turn": [round(each, 3) for each in best],
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print and record."""
    target = args.target or args.models / "target"
    results = Results(
        "controller", args.output, target=digest(target), weights=args.weights, tokens=args.tokens
    )

    async def record() -> None:
        async for name, cell in measure(
            target, args.weights, args.drafter, args.users, args.tokens, args.repeats
        ):
            print(f"{args.drafter}, {name}: {cell}", flush=True)
            results.add(f"{args.drafter}, {name}", cell)
        results.add("changing drafters", {"cells": await adapt(target, args.weights)})
        print(results.entries["changing drafters"])

    asyncio.run(record())
    print(f"written to {results.file}")
    return 0
