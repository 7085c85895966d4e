"""`paceline verify-lossless`: the same tokens with and without speculation, on your own prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.generate import run_async
from paceline.cli.processes import ProcessFailed, ServiceProcess
from paceline.cli.prompts import PROMPT_FILE, read_prompts
from paceline.client import Client, GenerationResult, PacelineError

NEAR = 1e-3
"""Two tokens whose log-probabilities differ by less are called a numeric tie. Unit: nats."""


@dataclass(frozen=True)
class Difference:
    """The first place where speculation changed a text."""

    prompt: int
    """Which prompt, counted from 0."""
    position: int
    """Which emitted token, counted from 0."""
    expected: int | None
    """Token id without speculation; None: the text had ended."""
    found: int | None
    """Token id with it; None: the text had ended."""
    gap: float | None
    """How far apart the two likeliest tokens were there, in nats; below `NEAR` it was a tie."""


@dataclass(frozen=True)
class Comparison:
    """All prompts with one drafter at one temperature."""

    drafter: str
    temperature: float
    prompts: int
    tokens: int
    accepted: int
    """Tokens that were drafted and stood: with none of them nothing was shown."""
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Report:
    """What `--json` writes."""

    target: str
    dtype: str
    batch_invariant: bool
    """What the verifier found at its start."""
    batch_invariance_reason: str
    """Why it is not so; empty where it is."""
    comparisons: tuple[Comparison, ...]
    positions: int
    """Tokens of the texts without speculation, at all temperatures."""
    near_ties: int
    """Positions where the model's two likeliest tokens were less than `NEAR` apart."""
    exact_ties: int
    """Positions where they were equal."""

    @property
    def identical(self) -> bool:
        """Whether no text differed."""
        return not any(comparison.differences for comparison in self.comparisons)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, the prompts and how much to generate."""
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="DIR", help="HF folder of the target")
    add(
        "--drafter",
        action="append",
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help="drafter to try, as for paceline serve; repeatable (default: ngram)",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help=PROMPT_FILE)
    add("--limit", type=int, default=20, metavar="N", help="most prompts (default: %(default)s)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=float,
        action="append",
        metavar="T",
        help="repeatable (default: 0 and 1)",
    )
    add("--seed", type=int, default=1, metavar="S", help="of the first prompt; then counted up")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add(
        "--concurrency",
        type=int,
        default=4,
        metavar="N",
        help="drafted generations at a time; plain ones run one by one (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the report here")


def run(args: argparse.Namespace) -> int:
    """Compare; 0 when all tokens are identical, 1 when not, 2 when it could not start."""
    try:
        prompts = read_prompts(args.prompts)[: max(1, args.limit)]
        if args.concurrency < 1:
            raise ValueError("--concurrency must be at least 1")
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    try:
        with ExitStack() as services:
            verifier, drafter = _start(services, args)
            report = run_async(_compare(verifier.address, drafter.address, prompts, args))
    except ProcessFailed as error:
        return _fail(error, 2)
    except PacelineError as error:
        return _fail(error, 1)
    if args.json is not None:
        args.json.write_text(
            json.dumps({**asdict(report), "identical": report.identical}, indent=1) + "\n",
            encoding="utf-8",
        )
    _print(report)
    return 0 if report.identical else 1


def _start(services: ExitStack, args: argparse.Namespace) -> tuple[ServiceProcess, ServiceProcess]:
    """Both services, started side by side; `services` stops them."""
    cpu = "--device=cpu"  # where tokens are the same to the last bit
    target = ["--target", str(args.target), "--dtype", args.dtype]
    verifier = ServiceProcess("verifier", [cpu, *target])
    loads = [f"--load={spec}" for spec in args.drafter or ["ngram"]]
    drafter = ServiceProcess("drafter", [cpu, *loads])
    for process in (verifier, drafter):
        services.callback(process.stop)
        process.spawn()
    for process in (verifier, drafter):
        process.wait_ready()
    return verifier, drafter


async def _compare(
    verifier: str, drafter: str, prompts: Sequence[str | list[int]], args: argparse.Namespace
) -> Report:
    comparisons: list[Comparison] = []
    gaps: list[float] = []
    async with Client(verifier, drafter=drafter) as client:
        facts = (await client.model()).facts
        for temperature in args.temperature or [0.0, 1.0]:
            options = {"max_new_tokens": args.max_new_tokens, "temperature": temperature}
            plain = [
                await client.generate(
                    prompt, drafter="none", seed=args.seed + place, logprobs=2, **options
                )
                for place, prompt in enumerate(prompts)
            ]
            gaps += [gap for result in plain for gap in _gaps(result)]
            for name in await client.drafters():
                drafted = await _drafted(client, prompts, name, args, options)
                comparisons.append(_comparison(name, temperature, plain, drafted))
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


async def _drafted(
    client: Client,
    prompts: Sequence[str | list[int]],
    name: str,
    args: argparse.Namespace,
    options: dict[str, Any],
) -> list[GenerationResult]:
    """Several at a time, so that batches differ from those of the plain runs too."""
    slots = asyncio.Semaphore(args.concurrency)

    async def one(place: int, prompt: str | list[int]) -> GenerationResult:
        async with slots:
            return await client.generate(prompt, drafter=name, seed=args.seed + place, **options)

    return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


def _comparison(
    name: str,
    temperature: float,
    plain: Sequence[GenerationResult],
    drafted: Sequence[GenerationResult],
) -> Comparison:
    pairs = enumerate(zip(plain, drafted, strict=True))
    found = (_difference(place, expected, result) for place, (expected, result) in pairs)
    return Comparison(
        drafter=name,
        temperature=temperature,
        prompts=len(plain),
        tokens=sum(len(result.token_ids) for result in drafted),
        accepted=sum(result.stats.accepted for result in drafted),
        differences=tuple(difference for difference in found if difference is not None),
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
    """How far apart the two likeliest tokens were at each position. Unit: nats."""
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
            console.print(f"{each.drafter}: no draft was accepted, so this shows nothing about it")
    console.print(
        f"numeric ties: at {report.near_ties} of {report.positions} positions the two likeliest "
        f"tokens were within {NEAR:g} nats, at {report.exact_ties} of them equal; "
        f"batch-invariant: {'yes' if report.batch_invariant else 'no'}"
        f"{report.batch_invariance_reason and ': ' + report.batch_invariance_reason}"
    )
    console.print(f"identical tokens: {'yes' if report.identical else 'NO'}")


def _fail(error: Exception, code: int) -> int:
    print(f"paceline verify-lossless: {error}", file=sys.stderr)
    return code
