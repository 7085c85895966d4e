"""`paceline bench replay`: record rounds, and judge the scheduler's rules on the record.

A rule is judged by its regret: the speed of a text, or of all texts of a category, over the better
of plain decoding and a tree in every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import zip_longest

import uvloop
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import PROMPTS, read
from paceline.bench.record import Results, describe, make_console
from paceline.bench.replay.record import record
from paceline.bench.replay.simulation import MODES, Simulation
from paceline.bench.replay.traces import Replay, Traces
from paceline.bench.table.run import CATEGORIES
from paceline.cli.shipped import drafters_for
from paceline.convert import open_model
from paceline.verifier.engine.report import LOCAL

_ROUNDS = 3  # times that all texts are replayed one after the other, as a service would meet them


def run(args: argparse.Namespace) -> int:
    """Record, if asked for, then judge what is recorded."""
    console, files = make_console(), list(args.traces)
    if not files:
        models = Models.of(args)
        [weights] = args.weights
        source = open_model(models.target)
        paths = args.prompts or [PROMPTS / f"{name}.jsonl" for name in CATEGORIES]
        texts = read(paths, source, args.tokens)
        chosen = [
            (category, prompt)
            for row in zip_longest(*([(c, p) for p in t[: args.count]] for c, t in texts.items()))
            for category, prompt in filter(None, row)
        ]
        wanted = {LOCAL.name: args.sources}
        given = args.drafter or drafters_for(models.target, "cpu", weights)
        wanted |= dict(spec.split("=", 1) for spec in given)
        for heat in args.temperature:
            recorded = uvloop.run(
                record(models.target, weights, wanted, chosen, args.tokens, heat, args.nodes)
            )
            for traces in recorded:
                label = args.label or "135m"
                name = f"{describe()['kind']}-{label}-{weights}-t{heat:g}-{traces.drafter}.json.gz"
                files.append(args.folder / name)
                traces.save(files[-1])
                console.log(f"recorded {files[-1]}")
    results = Results("replay", args.output)
    results.uses({file.name: f"traces:{file}" for file in files})
    table = Table(
        title="Speed relative to plain decoding, and to the better of it and a draft every round"
    )
    figures = ("always", "scheduled", "over better", "worst: over plain", "over better")
    for column in ("traces", "texts", "users", *figures):
        table.add_column(column, justify="left" if column in ("traces", "texts") else "right")
    for file in files:
        for users in args.users:
            for category, ratios in judge(Traces.load(file), users).items():
                name = file.name.removesuffix(".json.gz")
                results.add(f"{name}, {category}, users {users}", ratios)
                cells = [f"{value:.2f}" for value in ratios.values()]
                table.add_row(name, category, str(users), *cells)
    console.print(table)
    console.print(f"written to {results.file}")
    return 0


def judge(traces: Traces, users: int) -> dict[str, dict[str, float]]:
    """Return figures of the rules for the texts of each category, which are met in turn.

    Args:
        users: Texts at a time. The steps of several are shared, so that they have one category.

    Returns:
        By category the speeds of a tree in every round and of the rules over plain decoding; the
        speed of the rules over the better of both; and, for the worst text, the speed of the rules
        over its plain decoding and over its better one.
    """
    order = [index for _ in range(_ROUNDS) for index in range(len(traces.plain))]
    took: dict[str, list[float]] = {}
    for mode in MODES:
        seconds = [0.0] * len(traces.plain)
        for number, (_, spent) in Simulation(Replay(traces, order), users, mode).run().items():
            seconds[order[number - 1]] += spent
        took[mode] = seconds
    by_category = {}
    for category, members in _by_category(traces, users):
        plain, always, scheduled = (sum(took[mode][text] for text in members) for mode in MODES)
        by_category[category] = {
            "always": round(plain / always, 3),
            "scheduled": round(plain / scheduled, 3),
            "over better": round(min(plain, always) / scheduled, 3),
            "worst text over plain": _worst(took, members, ("plain",)),
            "worst text over better": _worst(took, members, ("plain", "always")),
        }
    return by_category


def _worst(took: dict[str, list[float]], members: list[int], modes: tuple[str, ...]) -> float:
    """Return the slowest of some texts, over the better of some modes."""
    ratios = (min(took[mode][text] for mode in modes) / took["scheduled"][text] for text in members)
    return round(min(ratios), 3)


def _by_category(traces: Traces, users: int) -> Iterator[tuple[str, list[int]]]:
    if users > 1:
        yield "all", list(range(len(traces.plain)))
        return
    for name in dict.fromkeys(text.category for text in traces.plain):
        yield name, [at for at, text in enumerate(traces.plain) if text.category == name]
