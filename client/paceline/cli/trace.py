"""`paceline trace`: the rounds of a text as a timeline in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from paceline.cli.generate import (
    add_client_arguments,
    add_generation_arguments,
    add_prompt_arguments,
    generated,
    summary,
)
from paceline.client import RoundStats

WIDTH = 80  # columns of a line
HEAD = "  round      ms  accepted  tokens  drafter    "  # above the rounds, up to the timeline
DRAFT, VERIFY, REST = "d", "V", "."  # marks of the timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    add_generation_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline; fails with code 1 when a service failed, 2 for bad arguments."""
    result = generated(args, show=False)
    if not result.stats.rounds:
        print("The prefill emitted the whole text, so that there are no rounds.")
        return 0
    print("\n".join(timeline(result.stats.rounds)))
    print(summary(result))
    return 0


def timeline(rounds: Sequence[RoundStats]) -> Iterator[str]:
    """Yield a head, and a line of at most `WIDTH` columns for each round, whose timeline is as long
    as its time per step, relative to the longest."""
    max_ms = max(max(stats.round_ms / stats.steps for stats in rounds), 1e-9)
    yield f"{HEAD}{DRAFT} draft, {VERIFY} verify, {REST} rest"
    first = 1
    for stats in rounds:
        last = first + stats.steps - 1
        number = str(first) if stats.steps == 1 else f"{first}-{last}"
        accepted = f"{stats.accepted} of {stats.drafted}" if stats.drafted else ""
        who = stats.drafter if stats.drafted else f"- {stats.undrafted or 'unknown'}"
        marks, drafted, verified = (
            round(part / stats.steps / max_ms * (WIDTH - len(HEAD)))
            for part in (stats.round_ms, stats.draft_ms, stats.verify_ms)
        )
        bar = (DRAFT * drafted + VERIFY * verified)[:marks].ljust(marks, REST)
        line = f"{number:>7} {stats.round_ms:7.1f}  {accepted:>8}  {stats.emitted:6}  {who[:10]:10}"
        yield f"{line} {bar}".rstrip()
        first = last + 1
