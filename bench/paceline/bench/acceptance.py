"""`paceline bench acceptance`: accepted length of drafters on prompts, without services.

The target writes each answer once. Every drafter then drafts along the same answers, and its trees
are compared with them, so figures of different drafters, options and formats are about the same
texts. Nothing is looked up in earlier texts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import FREE, PROMPTS, read
from paceline.bench.record import Results, make_console
from paceline.convert import ModelSource, load_decoder, open_model
from paceline.decoder import Decoder
from paceline.drafter import Drafter, DrafterSpec, Resources
from paceline.drafter.methods import method_class
from paceline.sampling import Sampling
from paceline.train.acceptance import TargetRecording, record, rounds
from paceline.tree import accepted_tokens


@dataclass
class Acceptance:
    """Rounds of one drafter on the answers of one cell."""

    rounds: Counter[int] = field(default_factory=Counter)  # rounds by accepted draft tokens
    outside: int = 0  # rounds whose tree ended at a token that the drafter cannot draft

    def entry(self) -> dict[str, Any]:
        """Return figures for a result file.

        ``accepted_length`` counts the bonus token; ``positions`` are shares of rounds in which a
        drafted token was accepted at that depth; ``outside_vocabulary`` is the share of rounds that
        ended at a token outside the drafter's reduced vocabulary.
        """
        count = self.rounds.total()
        deepest = max(self.rounds)
        return {
            "rounds": count,
            "accepted_length": round(1 + sum(n * k for n, k in self.rounds.items()) / count, 3),
            "positions": [
                round(sum(k for n, k in self.rounds.items() if n >= depth) / count, 3)
                for depth in range(1, deepest + 1)
            ],
            "outside_vocabulary": round(self.outside / count, 3),
        }


def run(args: argparse.Namespace) -> int:
    """Write the answers, draft along them, print and record."""
    console = make_console()
    models = Models.of(args)
    source = open_model(models.target)
    files = args.prompts or [PROMPTS / f"{name}.jsonl" for name in FREE]
    prompts = read(files, source, args.tokens)
    [weights] = args.weights
    target = load_decoder(source, weights)
    drafters = dict(load_drafters(args.drafter, models.target))
    layers = {n for drafter in drafters.values() for n in drafter.needs.hidden_state_layers}
    results = Results("acceptance", args.output, models.target, tokens=args.tokens)
    specs = map(DrafterSpec.parse, args.drafter)
    results.uses({spec.name: f"{spec.method}:{spec.folder or ''}" for spec in specs})
    for category, heat in ((c, t) for c in prompts for t in args.temperature):
        counts = {name: Acceptance() for name in drafters}
        texts = prompts[category][: args.count]
        title = f"{category}, T = {heat:g}, {weights}"
        for number, prompt in enumerate(track(texts, title, console=console)):
            answer = write_answer(target, source, prompt.ids, args.tokens, heat, number + 1, layers)
            for name, drafter in drafters.items():
                _measure(drafter, answer, counts[name])
        entries = {name: count.entry() for name, count in counts.items() if count.rounds}
        results.add(title, {"prompts": len(texts), "drafters": entries})
        console.print(_table(title, entries))
    console.print(f"written to {results.file}")
    return 0


def load_drafters(specs: Sequence[str], target: Path) -> Iterator[tuple[str, Drafter]]:
    """Yield the drafters of specifications by name; ``target`` is added where a method takes it."""
    for text in specs:
        spec = DrafterSpec.parse(text)
        method = method_class(spec.method)
        options = dict(spec.options)
        if "target" in method.path_options:
            options.setdefault("target", str(target))
        yield spec.name, method.load(spec.folder, options, Resources())


def write_answer(
    target: Decoder,
    source: ModelSource,
    prompt: list[int],
    tokens: int,
    heat: float,
    seed: int,
    layers: set[int],
) -> TargetRecording:
    """Return the target's answer up to the token that ends it."""
    sampling = Sampling(temperature=heat, seed=seed)
    recording = record(target, prompt, tokens, sampling, layers)
    ends = set(source.config().eos_token_ids)
    answer = recording.continuation
    stop = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
    return replace(recording, tokens=recording.tokens[: len(prompt) + stop])


@torch.inference_mode()
def _measure(drafter: Drafter, answer: TargetRecording, acceptance: Acceptance) -> None:
    drafted = drafter.drafted_tokens
    known = None if drafted is None else frozenset(drafted.tolist())
    for tree, after in rounds(drafter, answer):
        accepted = accepted_tokens(tree, after)
        acceptance.rounds[accepted] += 1
        if known is not None and accepted < len(after):
            acceptance.outside += after[accepted] not in known


def _table(title: str, entries: Mapping[str, dict[str, Any]]) -> Table:
    table = Table(
        "drafter", "rounds", "accepted length", "acceptance by position", "outside vocabulary",
        title=title,
    )  # fmt: skip
    for name, entry in entries.items():
        table.add_row(
            name,
            str(entry["rounds"]),
            f"{entry['accepted_length']:.2f}",
            " ".join(f"{share:.2f}" for share in entry["positions"]),
            f"{entry['outside_vocabulary']:.2f}",
        )
    return table
