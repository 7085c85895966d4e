"""`paceline demo`: both services, a real prompt, drafted tokens in colour, and what they gained."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.generate import run_async
from paceline.cli.processes import ProcessFailed, ServiceProcess
from paceline.client import Client, GenerationResult, PacelineError

_DRAFTED = "bold green"
_CPU = ("--device", "cpu")  # where tokens are the same to the last bit
_PROMPTS = Path("prompts", "heldout.jsonl")


@dataclass(frozen=True)
class Run:
    """One measured generation."""

    drafter: str
    result: GenerationResult
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.result.token_ids) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, the prompt and how much to generate."""
    add = parser.add_argument
    add("--models", type=Path, metavar="DIR", help="default: models/demo of the repository")
    add("--target", type=Path, metavar="DIR", help="target model; default: MODELS/target")
    add(
        "--load",
        action="append",
        metavar="NAME=METHOD[:DIR]",
        help="drafter to run, repeatable; default: ngram, and those that MODELS has",
    )
    add("--prompts", type=Path, metavar="FILE", help="JSON lines with a text field")
    add("--prompt-id", metavar="ID", help="which of them; default: the first")
    add("--max-new-tokens", type=int, default=192, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    add("--seed", type=int, default=1, metavar="S", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Show it; 0 when all runs gave the same tokens, 1 when not, 2 when it could not start."""
    try:
        models = args.models or _demo_models()
        target = args.target or models / "target"
        load = args.load or _drafters(models, target)
        prompt = _prompt(args.prompts or models / _PROMPTS, args.prompt_id)
        if not (target / "config.json").is_file():
            raise FileNotFoundError(f"{target} holds no model: give --target a model folder")
    except (OSError, ValueError) as error:
        print(f"paceline demo: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    try:
        with ExitStack() as services:
            verifier, drafter = _start(services, console, target, load)
            names = [spec.partition("=")[0] for spec in load]
            runs = run_async(_show(console, verifier.address, drafter.address, prompt, names, args))
    except (ProcessFailed, PacelineError) as error:
        print(f"paceline demo: {error}", file=sys.stderr)
        return 1
    identical = all(each.result.token_ids == runs[0].result.token_ids for each in runs)
    _report(console, runs, identical)
    return 0 if identical else 1


def _start(
    services: ExitStack, console: Console, target: Path, load: Sequence[str]
) -> tuple[ServiceProcess, ServiceProcess]:
    """Both services, started side by side; `services` stops them."""
    console.print(f"Starting verifier ({target}) and drafter ({', '.join(load)}) ...", style="dim")
    verifier = ServiceProcess("verifier", [*_CPU, "--target", str(target)])
    loads = [word for spec in load for word in ("--load", spec)]
    drafter = ServiceProcess("drafter", [*_CPU, *loads])
    for process in (verifier, drafter):
        services.callback(process.stop)
        process.spawn()
    for process in (verifier, drafter):
        process.wait_ready()
    return verifier, drafter


async def _show(
    console: Console,
    verifier: str,
    drafter: str,
    prompt: str,
    names: Sequence[str],
    args: argparse.Namespace,
) -> list[Run]:
    """Streams one generation, then measures all drafters and none on the same prompt."""
    async with Client(verifier, drafter=drafter) as client:
        # Short runs first: they warm up the services, and tell which drafter to watch.
        trials = [await _measure(client, prompt, name, args, tokens=48) for name in names]
        best = max(trials, key=lambda trial: trial.tokens_per_second).drafter
        await _stream(console, client, prompt, best, args)
        console.print(f"\nMeasuring {args.max_new_tokens} tokens of that prompt ...", style="dim")
        return [await _measure(client, prompt, name, args) for name in ("none", *names)]


async def _stream(
    console: Console, client: Client, prompt: str, drafter: str, args: argparse.Namespace
) -> None:
    """Prints the continuation as it comes, accepted drafted tokens in colour."""
    legend = Text.assemble(
        "\nplain: the target model's own tokens   ",
        (f"green: drafted by {drafter}, accepted by the target", _DRAFTED),
        "\n",
    )
    console.print(legend)
    console.out(prompt, style="dim", highlight=False, end="")
    generation = client.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        drafter=drafter,
    )
    async for chunk in generation:
        for proposer, pieces in groupby(
            zip(chunk.pieces, chunk.proposed_by, strict=False), key=itemgetter(1)
        ):
            style = _DRAFTED if proposer == "drafter" else None
            text = "".join(piece for piece, _ in pieces)
            console.out(text, style=style, highlight=False, end="")
    console.print()


async def _measure(
    client: Client, prompt: str, drafter: str, args: argparse.Namespace, tokens: int | None = None
) -> Run:
    """One generation, timed from its first token on: prefill is the same for all."""
    began = perf_counter()
    result = await client.generate(
        prompt,
        max_new_tokens=tokens or args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        drafter=drafter,
    )
    seconds = perf_counter() - began - result.stats.first_token_ms / 1000
    return Run(drafter, result, seconds)


def _report(console: Console, runs: Sequence[Run], identical: bool) -> None:
    table = Table(title="This run, on this machine", title_justify="left")
    table.add_column("drafter")
    for heading in ("tokens/s", "speed-up", "mean accepted length", "drafted rounds", "rounds"):
        table.add_column(heading, justify="right")
    plain = runs[0].tokens_per_second
    for each in runs:
        stats = each.result.stats
        table.add_row(
            each.drafter,
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens_per_second / plain:.2f}x",
            f"{stats.mean_accepted_length:.2f}" if stats.drafted_rounds else "-",
            str(stats.drafted_rounds),
            str(len(stats.rounds)),
        )
    console.print(table)
    fallbacks = {each.drafter: dict(each.result.stats.fallbacks) for each in runs}
    if any(fallbacks.values()):
        console.print(f"fallbacks: {fallbacks}")
    console.print(f"identical tokens: {'yes' if identical else 'NO'}")


def _demo_models() -> Path:
    """`models/demo` below the working folder, or of the repository this file lies in."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / "models" / "demo" / "prompts").is_dir():
            return folder / "models" / "demo"
    raise FileNotFoundError("no models/demo here: run in the repository, or give --models")


def _drafters(models: Path, target: Path) -> list[str]:
    load = ["ngram=ngram"]
    trained = f",target={target}"
    for name, options in (("lm", ""), ("longspec", trained), ("dspark", trained)):
        if (models / name / "config.json").is_file():
            load.append(f"{name}={name}:{models / name}{options}")
    return load


def _prompt(file: Path, wanted: str | None) -> str:
    """The text of the prompt with that id; without one, of the first."""
    entries = _entries(file)
    for entry in entries:
        if wanted is None or entry.get("id") == wanted:
            return str(entry["text"])
    known = ", ".join(str(entry.get("id")) for entry in entries)
    raise ValueError(f"{file} has no prompt {wanted!r}; it has: {known or 'none'}")


def _entries(file: Path) -> list[dict[str, Any]]:
    """The prompts of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
