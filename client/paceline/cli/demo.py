"""`paceline demo`: both services, a text with its drafted tokens in colour, and the speed-up."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.errors import exit_with
from paceline.cli.service_process import run_async
from paceline.client import Client, Generation, GenerationResult, PacelineError
from paceline.harness import ProcessFailed, local_services, read_prompts

_DRAFTED = "bold green"
_CPU = "--device=cpu"  # on the CPU, tokens are bit-identical
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
    """Add the models, the prompt and the sampling."""
    add = parser.add_argument
    add("--models", type=Path, metavar="DIR", help="default: models/demo of the repository")
    add("--target", type=Path, metavar="DIR", help="target model; default: MODELS/target")
    add(
        "--load",
        action="append",
        metavar="NAME=METHOD[:DIR]",
        help="drafter to run, repeatable; default: ngram, and those in MODELS",
    )
    add("--prompts", type=Path, metavar="FILE", help="its first prompt is used")
    add("--max-new-tokens", type=int, default=192, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    add("--seed", type=int, default=1, metavar="S", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all tokens are identical, 1 if not, 2 if it cannot start."""
    with exit_with(2, OSError, ValueError):
        models = args.models or _demo_models()
        target = args.target or models / "target"
        load = args.load or _drafters(models, target)
        prompt = str(read_prompts(args.prompts or models / _PROMPTS)[0])
        if not (target.is_file() or (target / "config.json").is_file()):
            raise FileNotFoundError(f"{target} is no model: give --target a folder or GGUF file")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"Starting verifier ({target}) and drafter ({', '.join(load)}) ...", style="dim")
    loads = [f"--load={spec}" for spec in load]
    names = [spec.partition("=")[0] for spec in load]
    with (
        exit_with(1, ProcessFailed, PacelineError),
        local_services([_CPU, f"--target={target}"], [_CPU, *loads]) as (verifier, drafter),
    ):
        runs = run_async(_show(console, verifier.address, drafter.address, prompt, names, args))
    identical = all(each.result.token_ids == runs[0].result.token_ids for each in runs)
    _report(console, runs, identical)
    return 0 if identical else 1


async def _show(
    console: Console,
    verifier: str,
    drafter: str,
    prompt: str,
    names: Sequence[str],
    args: argparse.Namespace,
) -> list[Run]:
    """Streams one generation, then measures the same prompt with each drafter and without."""
    async with Client(verifier, drafter=drafter) as client:
        # Short runs warm up the services and select the drafter of the streamed generation.
        warm_up = [await _measure(client, prompt, name, args, tokens=48) for name in names]
        best = max(warm_up, key=lambda run: run.tokens_per_second).drafter
        await _stream(console, client, prompt, best, args)
        console.print(f"\nMeasuring {args.max_new_tokens} tokens of that prompt ...", style="dim")
        return [await _measure(client, prompt, name, args) for name in ("none", *names)]


async def _stream(
    console: Console, client: Client, prompt: str, drafter: str, args: argparse.Namespace
) -> None:
    """Prints the text as it is generated, accepted drafted tokens in colour."""
    legend = Text.assemble(
        "\nplain: the target model's own tokens   ",
        (f"green: drafted by {drafter}, accepted by the target", _DRAFTED),
        "\n",
    )
    console.print(legend)
    console.out(prompt, style="dim", highlight=False, end="")
    async for chunk in _generation(client, prompt, drafter, args, args.max_new_tokens):
        pairs = zip(chunk.pieces, chunk.proposed_by, strict=False)
        for proposer, pieces in groupby(pairs, key=itemgetter(1)):
            style = _DRAFTED if proposer == "drafter" else None
            text = "".join(piece for piece, _ in pieces)
            console.out(text, style=style, highlight=False, end="")
    console.print()


async def _measure(
    client: Client, prompt: str, drafter: str, args: argparse.Namespace, tokens: int | None = None
) -> Run:
    """One generation, timed from its first token on: the prefill is the same for all."""
    began = perf_counter()
    result = await _generation(client, prompt, drafter, args, tokens or args.max_new_tokens)
    seconds = perf_counter() - began - result.stats.first_token_ms / 1000
    return Run(drafter, result, seconds)


def _generation(
    client: Client, prompt: str, drafter: str, args: argparse.Namespace, tokens: int
) -> Generation:
    return client.generate(
        prompt,
        max_new_tokens=tokens,
        temperature=args.temperature,
        seed=args.seed,
        drafter=drafter,
    )


def _report(console: Console, runs: Sequence[Run], identical: bool) -> None:
    table = Table(title="This run, on this machine", title_justify="left")
    table.add_column("drafter")
    for heading in ("tokens/s", "speed-up", "mean accepted length", "drafted rounds", "rounds"):
        table.add_column(heading, justify="right")
    for each in runs:
        stats = each.result.stats
        table.add_row(
            each.drafter,
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens_per_second / runs[0].tokens_per_second:.2f}x",
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
    """`models/demo` below the working folder, or of the repository that contains this file."""
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
