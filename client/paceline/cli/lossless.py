"""`paceline verify-lossless`: the same tokens with and without speculation, on your own prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.command import CommandError, exit_with
from paceline.cli.service_process import run_async
from paceline.cli.services import ON_CPU, own_services
from paceline.client import Client, DraftOptions, GenerationResult, PacelineError
from paceline.harness import PROMPT_FILE, ProcessFailed, read_prompts
from paceline.harness.models import MODEL, WEIGHTS, drafter_spec, model_path

NEAR = 1e-3
"""Two tokens whose log-probabilities differ by less are a numeric tie. Unit: nats."""


@dataclass(frozen=True)
class Difference:
    """The first position at which a text differs with speculation."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the emitted token."""
    expected: int | None
    """Token id without speculation; None if that text is shorter."""
    found: int | None
    """Token id with speculation; None if that text is shorter."""
    gap: float | None
    """Difference in log-probability of the two likeliest tokens; below `NEAR` they tie. Unit:
    nats."""


@dataclass(frozen=True)
class Comparison:
    """All prompts with one drafter at one temperature."""

    drafter: str
    temperature: float
    prompts: int
    tokens: int
    accepted: int
    """Accepted drafted tokens. With 0 the comparison proves nothing."""
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Report:
    """Content of the `--json` file."""

    target: str
    dtype: str
    batch_invariant: bool
    """As reported by the verifier."""
    batch_invariance_reason: str
    """Reason if it is not; else empty."""
    comparisons: tuple[Comparison, ...]
    positions: int
    """Tokens of the texts without speculation, at all temperatures."""
    near_ties: int
    """Positions at which the two likeliest tokens are a numeric tie."""
    exact_ties: int
    """Positions at which they are equal."""

    @property
    def identical(self) -> bool:
        """Whether no text differs."""
        return not any(comparison.differences for comparison in self.comparisons)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, the prompts and the sampling."""
    add = parser.add_argument
    add("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add(
        "--drafter",
        type=drafter_spec,
        action="append",
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to test, as for paceline serve; repeatable (default: ngram)",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help=PROMPT_FILE)
    add(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="maximum number of prompts (default: %(default)s)",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=float,
        action="append",
        metavar="T",
        help="repeatable (default: 0 and 1)",
    )
    add("--seed", type=int, default=1, metavar="S", help="of the first prompt; the next has S + 1")
    add("--weights", choices=WEIGHTS, default="auto", help="of the target (default: auto)")
    add(
        "--concurrency",
        type=int,
        default=4,
        metavar="N",
        help="concurrent drafted generations; the others run one by one (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the report here")


def run(args: argparse.Namespace) -> int:
    """Compare; 0 if all tokens are identical, 1 if not, 2 if it cannot start."""
    with exit_with(2, OSError, ValueError):
        prompts = read_prompts(args.prompts)[: max(1, args.limit)]
    if args.concurrency < 1:
        raise CommandError("--concurrency must be at least 1")
    with (
        exit_with(2, ProcessFailed),
        exit_with(1, PacelineError),
        own_services(args.target, args.weights, args.drafter or ["ngram"], ON_CPU) as addresses,
    ):
        report = run_async(_compare(*addresses, prompts, args))
    if args.json is not None:
        content = {**asdict(report), "identical": report.identical}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _print(report)
    return 0 if report.identical else 1


async def _compare(
    verifier: str, drafter: str, prompts: Sequence[str | list[int]], args: argparse.Namespace
) -> Report:
    comparisons: list[Comparison] = []
    gaps: list[float] = []
    # In every step, with time for it: a text without drafts would prove nothing.
    drafting = DraftOptions(timeout=60, adaptive=False)
    async with Client(verifier, drafter_address=drafter, drafting=drafting) as client:
        facts = (await client.model()).facts

        async def generate(concurrency: int, **options: Any) -> list[GenerationResult]:
            slots = asyncio.Semaphore(concurrency)

            async def one(index: int, prompt: str | list[int]) -> GenerationResult:
                async with slots:
                    return await client.generate(
                        prompt,
                        max_new_tokens=args.max_new_tokens,
                        seed=args.seed + index,
                        **options,
                    )

            return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

        for temperature in args.temperature or [0.0, 1.0]:
            plain = await generate(1, temperature=temperature, drafter="none", logprobs=2)
            gaps += [gap for result in plain for gap in _gaps(result)]
            for name in await client.drafters():
                # Concurrent, so that batches differ from those without speculation too.
                drafted = await generate(args.concurrency, temperature=temperature, drafter=name)
                found = (
                    _difference(i, *pair) for i, pair in enumerate(zip(plain, drafted, strict=True))
                )
                comparisons.append(
                    Comparison(
                        drafter=name,
                        temperature=temperature,
                        prompts=len(plain),
                        tokens=sum(len(result.token_ids) for result in drafted),
                        accepted=sum(result.stats.accepted for result in drafted),
                        differences=tuple(each for each in found if each is not None),
                    )
                )
    return Report(
        target=str(args.target),
        dtype=facts.dtype,
        batch_invariant=facts.batch_invariant,
        batch_invariance_reason=facts.batch_invariance_reason,
        comparisons=tuple(comparisons),
        positions=len(gaps),
        near_ties=sum(gap < NEAR for gap in gaps),
        exact_ties=sum(gap == 0 for gap in gaps),
    )


def _difference(
    prompt: int, plain: GenerationResult, drafted: GenerationResult
) -> Difference | None:
    expected, found = plain.token_ids, drafted.token_ids
    if expected == found:
        return None
    pairs = zip(expected, found, strict=False)
    shorter = min(len(expected), len(found))
    position = next((at for at, (own, other) in enumerate(pairs) if own != other), shorter)
    gaps = _gaps(plain)
    return Difference(
        prompt=prompt,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
        gap=gaps[position] if position < len(gaps) else None,
    )


def _gaps(result: GenerationResult) -> list[float]:
    """Log-probability difference of the two likeliest tokens at each position. Unit: nats."""
    return [each.top[0][1] - each.top[1][1] for each in result.logprobs or () if len(each.top) > 1]


def _print(report: Report) -> None:
    table = Table(title=f"With and without speculation: {report.target}, {report.dtype}")
    table.add_column("drafter")
    for heading in ("temperature", "prompts", "tokens", "accepted drafts", "texts that differ"):
        table.add_column(heading, justify="right")
    for each in report.comparisons:
        table.add_row(
            each.drafter,
            f"{each.temperature:g}",
            *(str(n) for n in (each.prompts, each.tokens, each.accepted, len(each.differences))),
        )
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    for each in report.comparisons:
        for difference in each.differences:
            console.print(f"{each.drafter}, temperature {each.temperature:g}: {difference}")
        if not each.accepted:
            console.print(f"{each.drafter}: no draft was accepted, so this proves nothing about it")
    console.print(
        f"numeric ties: at {report.near_ties} of {report.positions} positions the two likeliest "
        f"tokens were within {NEAR:g} nats, at {report.exact_ties} of them equal; "
        f"batch-invariant: {'yes' if report.batch_invariant else 'no'}"
        f"{report.batch_invariance_reason and ': ' + report.batch_invariance_reason}"
    )
    console.print(f"identical tokens: {'yes' if report.identical else 'NO'}")
