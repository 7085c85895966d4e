"""What the experiments share: target, drafters, texts, and the cells of a result file.

A cell compares arms on the same texts; its figures are ratios of sums over texts, with 95%
intervals by drawing texts again, and each arm's over the first one's with the texts paired.
Accepted lengths are measured along texts that the target wrote once, without services, so they do
not depend on the machine's load. Nothing is looked up in earlier texts.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import uvloop
from rich.table import Table
from torch import Tensor

from paceline.bench.acceptance import load_drafters, write_answer
from paceline.bench.chart import draw_arms
from paceline.bench.models import Models
from paceline.bench.record import Results, make_console
from paceline.bench.table.run import PROMPTS, read
from paceline.cli.command import CommandError
from paceline.decoder import Decoder, open_model
from paceline.drafter import Drafter
from paceline.kernels import MAX_TREE_NODES, SELECTION_CHUNK, QueryBlock, plan_trees
from paceline.kernels.caches import from_rows
from paceline.kv.policies import load_policy
from paceline.train.acceptance import RecordedKv, TargetRecording, rounds
from paceline.tree import TokenTree, accepted_tokens
from paceline.verifier.engine.batch import BatchObserver

Pairs = list[tuple[float, float]]
"""Numerator and denominator of a ratio, by text."""

Samples = dict[str, dict[str, dict[float, Pairs]]]
"""By arm, measure, and place on the x axis."""

LENGTH = "accepted length"
"""Name of that measure."""

Name = TypeVar("Name")
_RESAMPLES = 1000
_MINUTES = 10_000  # a limit that no training reaches: steps end it, on a slow machine too


def samples() -> Samples:
    """Make an empty collection of samples."""
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def estimate(pairs: Pairs, other: Pairs | None = None) -> list[float]:
    """The ratio of sums over texts, with the ends of its interval before and after it.

    Args:
        pairs: Of the texts.
        other: Of the same texts in another arm: the ratio of both ratios.
    """
    found = np.array(pairs, dtype=float)
    count = len(found)
    drawn = np.random.default_rng(1).integers(count, size=(_RESAMPLES, count))
    drawn = np.concatenate([np.arange(count)[None], drawn])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.divide(*found[drawn].sum(axis=1).T)
        if other is not None:
            ratios /= np.divide(*np.array(other, dtype=float)[drawn].sum(axis=1).T)
    ratios = ratios[np.isfinite(ratios)]
    low, high = np.percentile(ratios[1:], (2.5, 97.5))
    return [round(float(each), 3) for each in (low, ratios[0], high)]


def figures(found: Samples) -> dict[str, Any]:
    """Of a result file: ``arms`` by measure and place, and ``over``, each over the first arm."""
    entry: dict[str, Any] = {"arms": {}, "over": {}}
    first = next(iter(found.values()), {})
    for arm, measures in found.items():
        for measure, line in measures.items():
            lines: list[dict[str, list[float]]] = [{}, {}]
            for x, pairs in line.items():
                if not any(below for _, below in pairs):
                    continue
                lines[0][f"{x:g}"] = estimate(pairs)
                others = first.get(measure, {}).get(x, [])
                if measures is not first and any(above for above, _ in others):
                    lines[1][f"{x:g}"] = estimate(pairs, others)
            for kind, each in zip(entry.values(), lines, strict=True):
                if each:
                    kind.setdefault(arm, {})[measure] = each
    return entry


class PolicyKv(RecordedKv):
    """A recording's KV as a selection policy of the verifier shows it to a drafter.

    It is an :class:`~paceline.kv.selection.ObservedCache`.
    """

    def __init__(self, target: Decoder, text: TargetRecording, drafter: Drafter) -> None:
        super().__init__(text.cache)
        text.cache.reserve(MAX_TREE_NODES)
        self.capacity, self.device = text.cache.capacity, torch.device(target.device)
        self._target, self._text = target, text
        self._layers = [each % target.config.layers for each in drafter.needs.kv_layers]
        self._policy = load_policy(drafter.needs.kv_options.kv_policy)(self, self._layers)
        self._chosen: list[Tensor] = []
        end = text.prompt_length
        if self._policy.observer is not None and end > SELECTION_CHUNK:  # as in a prefill
            start = end - SELECTION_CHUNK
            self._observe(QueryBlock(0, start, None, SELECTION_CHUNK), text.tokens[start:end])

    def refresh(self, below: int, budget: int) -> int:
        length = min(self.committed, below)
        self._chosen = self._policy.choose(length, budget or length)
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        keys, values = self.layer(layer)
        chosen = self._chosen[self._layers.index(layer % self._target.config.layers)]
        return [(from_rows(keys[:, chosen]), from_rows(values[:, chosen]))]

    def verify(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Run the tree of a round through the target: its rows score the prefix.

        Args:
            tree: The drafted tokens.
            accepted: Those on the path that equals the text.
        """
        if self._policy.observer is None:
            return
        start, parents = self.committed, (-1, *(parent + 1 for parent in tree.parents))
        tokens = [self._text.tokens[start], *tree.tokens]
        self._observe(QueryBlock(0, start, parents, len(tokens)), tokens)
        paths = [[], *(list(tree.path(node)) for node in range(len(tree.tokens)))]
        self._policy.observer.accepted(paths.index(list(accepted)))

    def _observe(self, block: QueryBlock, tokens: Sequence[int]) -> None:
        observer = self._policy.observer
        assert observer is not None
        start, count = block.start, block.length
        observers = BatchObserver()
        observers.add(observer, 0, block, 0)
        cache = self._text.cache
        layers = map(cache.layer, range(self._target.config.layers))
        planes = [plane for both in layers for plane in both]
        # The rows overwrite the recording behind the prefix.
        kept = [plane[:, start : start + count].clone() for plane in planes]
        plan, rows = plan_trees([block]), torch.tensor([0])
        self._target.forward(
            torch.tensor(tokens), plan, [cache], logit_rows=rows, observer=observers
        )
        observers.publish(self._target.config.q_heads)
        for plane, before in zip(planes, kept, strict=True):
            plane[:, start : start + count] = before


@dataclass(frozen=True)
class Round:
    """One round along a text."""

    place: int
    """Tokens of the answer before its tree."""

    tree: TokenTree
    """The drafted tokens."""

    accepted: int
    """How many the target accepted."""

    ms: float
    """Time of the draft."""


class Bench:
    """What the experiments share: target, drafters, texts, and the result file of each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.console = args, make_console()
        self.models = Models.of(args)
        self.source = open_model(self.models.target)
        [self.weights] = args.weights
        self._drafters: dict[str, Drafter] = {}
        topic = f"papers-{args.experiment}"
        self.results = Results(topic, args.output, self.models.target, tokens=args.tokens)

    def draw(self) -> None:
        """Draw all cells of the result file, a panel a measure."""
        picture = self.results.file.with_suffix(".svg")
        picture.write_text(draw_arms(self.results.entries))
        self.console.print(f"written to {self.results.file} and {picture}")

    def cell(
        self, title: str, panel: str, measure: Callable[[], Samples | Coroutine[Any, Any, Samples]]
    ) -> None:
        """Measure a cell, unless the result file has it, and record it.

        Args:
            title: Its name in the result file.
            panel: Of the picture, beside the name of the measure; cells may share one.
            measure: Does so.
        """
        if self.args.steps:
            title += f", trained for {self.args.steps} steps"
        if title in self.results.entries:
            self.console.log(f"{title}: already in {self.results.file}")
            return
        began = time.monotonic()
        found = measure()
        if isinstance(found, Coroutine):
            found = uvloop.run(found)
        measured = figures(found)
        lengths = (
            len(each) for arm in found.values() for line in arm.values() for each in line.values()
        )
        facts = {"panel": panel, "weights": self.weights, "texts": max(lengths, default=0)}
        facts["minutes"] = round((time.monotonic() - began) / 60, 1)
        self.results.add(title, facts | measured)
        table = Table(
            "arm", "measure", "value (95% interval)", "relative to the first arm", title=title
        )
        for arm, measures in measured["arms"].items():
            for name, line in measures.items():
                over = measured["over"].get(arm, {}).get(name, {})
                table.add_row(arm, name, _words(line), _words(over))
        self.console.print(table)

    @cached_property
    def target(self) -> Decoder:
        """The target in this process."""
        return Decoder.load(self.source, self.weights)

    def drafter(self, spec: str) -> Drafter:
        """The drafter of METHOD[:DIR][,KEY=VALUE...]."""
        if spec not in self._drafters:
            [(_, found)] = load_drafters([f"drafter={spec}"], self.models.target)
            self._drafters[spec] = found
        return self._drafters[spec]

    def given(self, default: Mapping[str, str]) -> dict[str, str]:
        """Specifications by name: those of `--drafter`, else these."""
        found = dict(each.split("=", 1) for each in self.args.drafter) or dict(default)
        self.results.uses(found)
        return found

    def trained(self, method: str, arms: Mapping[str, str]) -> dict[str, str]:
        """Train a drafter for each arm, by name and more arguments, unless it is there.

        All arms have the same conversations, what the target computed for them, seed and steps.
        """
        args = self.args
        if not args.steps or not args.own_text:
            raise CommandError(
                "give --steps to train each drafter, and --own-text with conversations of "
                "`paceline train own-text`"
            )
        shared = ["--preset", "smollm2", "--no-card", f"--target={self.models.target}"]
        shared += ["--signals", str(args.signals or args.work / "signals")]
        shared += ["--own-text", *map(str, args.own_text), *shlex.split(args.train)]
        found = {}
        for name, more in arms.items():
            title = f"{args.experiment} {name} {args.steps}".replace(",", "").replace(" ", "-")
            folder = str(args.work / title)
            found[name] = f"{method}:{folder}"
            if Path(folder, "config.json").exists():
                continue
            command = [sys.executable, "-m", "paceline.train", method, *shared]
            command += ["--steps", str(args.steps), "--minutes", str(_MINUTES)]
            command += ["--out", folder, "--work", f"{folder}-work"]
            command += shlex.split(more)
            self.console.log(shlex.join(command[1:]))
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                raise CommandError(
                    f"the training of {name} ended with code {error.returncode}"
                ) from error
        self.results.uses(found)
        return found

    def prompts(self, *categories: str) -> list[list[int]]:
        """The prompts of `--prompts`, or of categories of the table in turn; `--texts` of them."""
        files = self.args.prompts or [PROMPTS / f"{name}.jsonl" for name in categories]
        found = zip_longest(*read(files, self.source, self.args.tokens).values())
        ids = (each.ids for row in found for each in row if each is not None)
        return list(islice(ids, self.args.texts))

    def documents(self, length: int) -> list[list[int]]:
        """The last `length` tokens of long prompts, each behind the ones before it."""
        files = self.args.prompts or [PROMPTS / "long.jsonl"]
        every = [each.ids for found in read(files, self.source, 0).values() for each in found]
        found = []
        for number in range(self.args.texts):
            place, text = number, list[int]()
            while len(text) < length:
                text = every[place % len(every)] + text
                place -= 1
            found.append(text[-length:])
        return found

    def contexts(self) -> list[int]:
        """Those of `--contexts` that fit the target with an answer."""
        room = self.source.config().max_position - self.args.tokens
        return [each for each in self.args.contexts if each <= room]

    @torch.inference_mode()
    def along(
        self, prompts: Sequence[list[int]], specs: Mapping[Name, str]
    ) -> Iterator[tuple[TargetRecording, Name, list[Round]]]:
        """Let the target answer each prompt, and every drafter draft along the answer."""
        drafters = {name: self.drafter(spec) for name, spec in specs.items()}
        layers = {n for each in drafters.values() for n in each.needs.hidden_state_layers}
        for number, prompt in enumerate(prompts, 1):
            text = write_answer(
                self.target, self.source, prompt, self.args.tokens, self.args.temperature,
                number, layers,
            )  # fmt: skip
            self.console.log(f"text {number} of {len(prompts)}: {len(text.continuation)} tokens")
            for name, drafter in drafters.items():
                yield text, name, list(self._rounds(drafter, text))

    def _rounds(self, drafter: Drafter, text: TargetRecording) -> Iterator[Round]:
        kv = PolicyKv(self.target, text, drafter) if drafter.needs.kv_layers else None
        place, began = 1, time.perf_counter()
        for tree, after in rounds(drafter, text, kv):
            ms = (time.perf_counter() - began) * 1e3
            accepted = accepted_tokens(tree, after)
            yield Round(place, tree, accepted, ms)
            place += accepted + 1
            if kv is not None:
                kv.verify(tree, after[:accepted])
            began = time.perf_counter()

    def lengths(
        self, by: str, prompts: Sequence[list[int]], specs: Mapping[tuple[str, float], str]
    ) -> Samples:
        """Accepted length of drafters by arm and place on the x axis, which `by` names."""
        found = samples()
        for _, (arm, x), path in self.along(prompts, specs):
            pair = sum(each.accepted + 1 for each in path), len(path)
            found[arm][f"{LENGTH} by {by}"][x].append(pair)
        return found


def _words(line: Mapping[str, Sequence[float]]) -> str:
    return "  ".join(
        f"{x}: {value:.3g} ({low:.3g}-{high:.3g})" for x, (low, value, high) in line.items()
    )
