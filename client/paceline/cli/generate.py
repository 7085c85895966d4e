"""`paceline generate`: a text through running services, streamed to the terminal."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.cli.command import exit_with, refuse_options
from paceline.cli.connection import add_service_arguments, client_of
from paceline.cli.service_process import run_async
from paceline.client import (
    Client,
    DraftOptions,
    Generation,
    GenerationOptions,
    GenerationResult,
    PacelineError,
    Stats,
    field_docs,
)
from paceline.service.files import decoded, read_text
from paceline.service.options import OptionsError
from paceline.telemetry.exporters import traced

MEASURED = ("max_new_tokens", "temperature", "seed")  # parameters of commands that compare drafters

_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"metavar": "TEXT"},
    "bool": {"action": "store_true"},
    "str | Sequence[str]": {"action": "append", "metavar": "TEXT"},
    "Sequence[int]": {"action": "append", "type": int, "metavar": "ID"},
}  # arguments by the type of the parameter; parameters of other types have none
_ALIASES = {"max-new-tokens": ("--max-tokens",)}  # other names of arguments, as in OpenAI's API


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, the parameters of the generation, and the services."""
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object at the end")
    add(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="write what the text depends on, and its tokens, for `paceline check`",
    )
    add("--stats", action="store_true", help="print speed and drafting to stderr")
    add_generation_arguments(parser)
    add_client_arguments(parser)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        help="a message, which a model with a chat template answers, or a text, which other models "
        "continue; - reads it from stdin, as does a pipe without a prompt",
    )
    add("--file", type=Path, metavar="F", help="read the prompt from a file")
    add("--raw", action="store_true", help="continue the prompt as it is, without chat template")


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_service_arguments(parser).add_argument
    add(
        "--draft-always",
        action="store_true",
        help="draft in every round, to measure drafting (default: where it increases the speed)",
    )
    add(
        "--draft-timeout",
        type=float,
        metavar="S",
        help="longest wait for a draft, in seconds (default: a multiple of the mean draft time)",
    )


def add_generation_arguments(
    parser: argparse.ArgumentParser, names: Collection[str] = (), **defaults: Any
) -> None:
    """Add these parameters of `Client.generate`, as `GenerationOptions` describes them; without
    names all that fit into a command line. `defaults` replace its defaults."""
    group, described = parser.add_argument_group("generation"), field_docs(GenerationOptions)
    for entry in dataclasses.fields(GenerationOptions):
        settings = _TYPES.get(str(entry.type).removesuffix(" | None"))
        # Two are for programs that speak for several users, or generate more than once.
        left_out = entry.name in ("keep_cache", "user") or (names and entry.name not in names)
        if settings is None or left_out:
            continue
        text = re.sub(r"\s+", " ", described[entry.name]).replace("None:", "Not given:")
        default = defaults.get(entry.name, entry.default)
        if settings.get("action") == "append":
            default, text = [], f"{text} Repeatable."
        elif default not in (None, False, ""):
            text += " Default: %(default)s."
        flag = entry.name.replace("_", "-").replace("-ids", "-id")
        flags = [f"--{flag}", *_ALIASES.get(flag, ())]
        group.add_argument(*flags, dest=entry.name, default=default, help=text, **settings)
    if not names:
        help = "File of a JSON schema, of which the text is an instance."
        group.add_argument("--json-schema", type=Path, metavar="FILE", help=help)


def generation_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments of `Client.generate` from what `add_generation_arguments` added.
    Raises OSError if the schema's file cannot be read."""
    names = {field.name for field in dataclasses.fields(GenerationOptions)}
    options = {name: value for name, value in vars(args).items() if name in names}
    schema = args.json_schema and read_text(args.json_schema)
    return {**options, "json_schema": schema}


def refuse_without_sampling(args: argparse.Namespace) -> None:
    """Raises CommandError if the arguments restrict samples, and nothing is sampled."""
    if not args.temperature:
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = [name for name, value in off.items() if getattr(args, name) != value]
        refuse_options(args, "at temperature 0: give --temperature", given)


def run(args: argparse.Namespace) -> int:
    """Generate; fails with code 1 when a service failed, 2 for bad arguments."""
    if args.temperature and args.acceptance == "rejection":
        refuse_options(args, "with rejection, whose tokens depend on the drafter", ("receipt",))
    result = generated(args, show=not args.json)
    if args.receipt is not None and result.receipt is not None:
        args.receipt.write_text(result.receipt.to_text(), encoding="utf-8")
    if args.json:
        # Any encoding has the characters of ASCII.
        unicode = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
        print(json.dumps(as_json(result), ensure_ascii=not unicode))
    elif not result.text:
        print("The model ended the text with its first token.", file=sys.stderr)
    if args.stats:
        print(summary(result), file=sys.stderr)
    elif unused := result.stats.unused(args.drafter):
        print(f"{unused[0].upper()}{unused[1:]}.", file=sys.stderr)
    return 0


def generated(args: argparse.Namespace, *, show: bool) -> GenerationResult:
    """Return the text of the arguments, with `show` printed as it comes. Raises CommandError if a
    service failed (1), or an argument is wrong (2)."""
    if args.drafter == "none":
        of_drafts = ("draft_always", "draft_timeout", "max_nodes", "isolated")
        refuse_options(args, "with --drafter none", of_drafts)
    with traced("paceline-client"):
        with exit_with(2, OptionsError, OSError, ValueError):
            prompt = _prompt(args)
            client = new_client(args)
            options = generation_arguments(args)
            generation = client.generate(prompt, **options)  # checks the values
            refuse_without_sampling(args)
            message = {"role": "user", "content": prompt}
            answer = None if args.raw else client.chat([message], **options)
        with exit_with(1, PacelineError, OSError):
            return run_async(_generate(client, generation, answer, show=show))


def new_client(args: argparse.Namespace) -> Client:
    """Return a client from the arguments of `add_client_arguments`; raises as `client_of`."""
    drafting = DraftOptions(timeout=args.draft_timeout, adaptive=not args.draft_always)
    return client_of(args, drafting=drafting)


def as_json(result: GenerationResult) -> dict[str, object]:
    fields = dataclasses.asdict(dataclasses.replace(result, receipt=None))
    del fields["receipt"]  # it is written apart
    return {**fields, "stats": result.stats.summary()}


async def _generate(
    client: Client, generation: Generation, answer: Generation | None, *, show: bool
) -> GenerationResult:
    """Run the `answer`, if there is one and the model has a chat template; else the generation."""
    async with client:
        if answer is not None and (await client.model()).facts.chat_template:
            generation = answer
        if show:
            async for chunk in generation:
                print(chunk.text, end="", flush=True)
            print(flush=True)  # before --stats writes to the other stream
        return await generation


def _prompt(args: argparse.Namespace) -> str:
    """Return the prompt. Raises ValueError if there is none or two, or it is no text; OSError if
    its file cannot be read."""
    if args.prompt is not None and args.file is not None:
        raise ValueError("give either a prompt or --file")
    if args.file is not None:
        text, source = read_text(args.file), str(args.file)
    elif args.prompt == "-" or (args.prompt is None and not sys.stdin.isatty()):
        content = sys.stdin.buffer.read()
        text, source = decoded(content, "standard input", sys.stdin.encoding), "standard input"
    elif args.prompt is None:
        raise ValueError("give a prompt, --file, or a text through a pipe")
    else:
        text, source = str(args.prompt), "the prompt"
    if not text:
        raise ValueError(f"{source} is empty: give a prompt, --file, or a text through a pipe")
    return text


def summary(result: GenerationResult) -> str:
    """Return the speed, seed and drafting of a generation, in words."""
    stats = result.stats
    return f"{speed(len(result.token_ids), stats)}, seed {result.seed}. {stats.explain()}"


def speed(tokens: int, stats: Stats) -> str:
    """Return tokens, the time of the whole generation, and their ratio."""
    seconds = stats.total_ms / 1000
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds if seconds else 0:.1f} tokens/s)"
