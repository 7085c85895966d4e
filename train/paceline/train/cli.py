"""`paceline train own-text`, and each method that names its recipe."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.service.cpus import usable_cpus
from paceline.train.recipes import recipes

if TYPE_CHECKING:
    from paceline.train.corpus import Corpus
    from paceline.train.run import Run

_DEMO = Path("models/demo")
_HELDOUT_FILES = 12  # drafters are measured on files that no target trained on
_ALL_FILES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `paceline train` to `parser`."""
    import torch  # noqa: F401 -- without it no method has a recipe, and its error names the extra

    commands = parser.add_subparsers(dest="train_command", required=True, metavar="MODEL")
    for method, recipe in recipes().items():
        parser = commands.add_parser(method, help=recipe.help)
        _add_common(parser, sorted(recipe.presets), preset=recipe.preset, out=_DEMO / method)
        _add_target(parser)
        recipe.add_arguments(parser)
        parser.set_defaults(recipe=recipe)
    texts = commands.add_parser("own-text", help="let an instruct model write conversations")
    _add_target(texts)
    texts.add_argument("--data", default="stdlib", help="'stdlib' or a folder of text files")
    texts.add_argument("--count", type=int, default=1024, help="number of conversations")
    texts.add_argument("--seed", type=int, default=0, help="other seeds give other conversations")
    texts.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="write these alone, e.g. document; default: all"
    )
    texts.add_argument("--weights", default="int8", help="format of the target's weights")
    texts.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines; an old file is extended",
    )
    texts.add_argument("--minutes", type=float, default=math.inf, help="time budget; default: none")
    for command in commands.choices.values():
        _name_defaults(command)


def _name_defaults(parser: argparse.ArgumentParser) -> None:
    """Say in the help of each option what holds without it."""
    for action in parser._actions:
        if action.required or action.nargs == 0 or "default" in str(action.help):
            continue
        given = "the preset's" if action.default in (None, ()) else "%(default)s"
        action.help = f"{action.help}; default: {given}"


def run(args: argparse.Namespace) -> int:
    """Run the sub-command in `args`; 0 when done, 1 on a bad argument, 130 when interrupted."""
    try:
        (_own_text if args.train_command == "own-text" else _drafter)(args)
    except KeyboardInterrupt as stop:
        print(f"{stop}; give the same command again to go on", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"paceline train: {error}", file=sys.stderr)
        return 1
    card = args.out / "README.md"
    print(f"{args.out} is ready" + (f"; its numbers are in {card}" if card.is_file() else ""))
    return 0


# Trainers import torch and transformers, which takes seconds: not for `--help`.


def _drafter(args: argparse.Namespace) -> None:
    recipe = args.recipe
    preset = recipe.vary(recipe.presets[args.preset], args)
    writes = getattr(preset, "conversations", 0) and not args.own_text
    _check_target(args.target, conversations=bool(writes))
    recipe.train(args, preset, _corpus(args), _run(args, preset))


def _own_text(args: argparse.Namespace) -> None:
    from paceline.train.conversations import KINDS, write_conversations
    from paceline.train.corpus import EncodedDocuments, load_tokenizer
    from paceline.train.own_text import load_target

    began = time.monotonic()
    _check_target(args.target, conversations=True)
    tokenizer = load_tokenizer(args.target)
    documents = EncodedDocuments(tokenizer, _corpus(args).train)
    decoder = load_target(args.target, args.weights)
    kinds, until = args.kinds or KINDS, began + 60 * args.minutes
    write_conversations(
        decoder, tokenizer, documents, args.count, args.out, args.seed, kinds, until
    )


def _check_target(target: Path, conversations: bool = False) -> None:
    """Check that training can read a target, before anything is loaded. Raises
    ``FileNotFoundError`` if there is no such model, and ``ValueError`` if its architecture or
    tokenizer is not supported, or a run on `conversations` finds no chat template."""
    from paceline.convert import open_model
    from paceline.train.conversations import Template
    from paceline.train.corpus import load_tokenizer

    open_model(target).config()
    tokenizer = load_tokenizer(target)
    if conversations:
        Template(tokenizer)


def _corpus(args: argparse.Namespace) -> Corpus:
    from paceline.train.corpus import load_corpus

    return load_corpus(args.data, _ALL_FILES, _HELDOUT_FILES, wide=True)


def _run(args: argparse.Namespace, preset: Any) -> Run:
    """Return the run of the arguments; `preset` has the default `minutes` and `steps`."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))

    from paceline.train.run import Run

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # started by `accelerate launch`
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return Run(
        work=args.work or _default_work() / f"{args.train_command}-{args.preset}",
        minutes=args.minutes or preset.minutes,
        steps=args.steps or preset.steps,
        device=args.device or device,
        compile=args.compile,
        accumulate=args.accumulate,
        force=args.force,
        card=getattr(args, "card", True),
        signals=getattr(args, "signals", None),
    )


def _add_common(
    parser: argparse.ArgumentParser, presets: list[str], preset: str, out: Path
) -> None:
    parser.add_argument(
        "--preset",
        choices=presets,
        default=preset,
        help="shape, data and budgets; default: %(default)s",
    )
    parser.add_argument("--data", default="stdlib", help="'stdlib' or a folder of text files")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time budget; preparing texts takes half at most, measuring for the card is on top",
    )
    parser.add_argument("--steps", type=int, help="largest number of steps")
    parser.add_argument("--out", type=Path, default=out, help="model folder to write")
    parser.add_argument("--force", action="store_true", help="replace a model that is in --out")
    parser.add_argument(
        "--work",
        type=Path,
        help="folder of checkpoints; a run that it holds is resumed; default: one "
        "in the user's cache",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if available")
    parser.add_argument("--compile", action="store_true", help="run the model by torch.compile")
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N",
        help="number of parts of a batch: gradients are accumulated, to save memory",
    )  # fmt: skip


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", type=_model, default=_DEMO / "target", help="the target: a path or a name"
    )


def _model(text: str) -> Path:
    """A model's path or name. Imported here because `gpu-train` runs without grpc."""
    from paceline.harness.models import model_path

    return model_path(text)


def _default_work() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "train"
