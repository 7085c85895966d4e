"""`paceline train target`, `lm`, `longspec`, `dspark`, `eagle3`, `online` and `own-text`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.train.presets import (
    DSPARK_PRESETS,
    EAGLE3_PRESETS,
    LM_PRESETS,
    LONGSPEC_PRESETS,
    ONLINE_PRESETS,
    DSparkPreset,
    Eagle3Preset,
    LongSpecPreset,
)

if TYPE_CHECKING:
    from paceline.train.corpus import Corpus
    from paceline.train.presets import Preset
    from paceline.train.run import Run

P = TypeVar("P", LongSpecPreset, DSparkPreset, Eagle3Preset)
_DEMO = Path("models/demo")
_HELDOUT_FILES = 12  # as in every preset: drafters are measured on files that no target trained on
_ALL_FILES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `paceline train` to `parser`."""
    commands = parser.add_subparsers(dest="train_command", required=True, metavar="MODEL")
    target = commands.add_parser("target", help="train a target")
    _add_common(target, sorted(LM_PRESETS), preset="cpu", out=_DEMO / "target")
    lm = commands.add_parser("lm", help="distil a target into a small drafter LM")
    _add_common(lm, sorted(LM_PRESETS), preset="lm", out=_DEMO / "lm")
    _add_target(lm)
    longspec = commands.add_parser("longspec", help="train a LongSpec layer for a target")
    _add_common(longspec, sorted(LONGSPEC_PRESETS), preset="cpu", out=_DEMO / "longspec")
    _add_target(longspec)
    _add_written(longspec)
    longspec.add_argument("--levels", type=int, metavar="N", help="depth of a draft: lags 1 to N")
    longspec.add_argument(
        "--no-offset", action="store_true", help="ablation: without anchor-offset indices"
    )
    longspec.add_argument(
        "--no-noise", action="store_true", help="ablation: without flash noisy training"
    )
    longspec.add_argument(
        "--budgets", type=_numbers, metavar="N[,N...]",
        help="KV budgets that are trained, 0: all positions; for the preset smollm2",
    )  # fmt: skip
    longspec.add_argument(
        "--max-length", type=int, metavar="N",
        help="leave out conversations of more tokens, for the preset smollm2",
    )  # fmt: skip
    dspark = commands.add_parser("dspark", help="train a DSpark drafter for a target")
    _add_common(dspark, sorted(DSPARK_PRESETS), preset="cpu", out=_DEMO / "dspark")
    _add_target(dspark)
    _add_written(dspark)
    dspark.add_argument("--layers", type=int, metavar="N", help="of the backbone")
    dspark.add_argument("--block", type=int, metavar="N", help="tokens of a block")
    dspark.add_argument(
        "--no-heads", action="store_true",
        help="neither a sequential nor a confidence head, which is DFlash",
    )  # fmt: skip
    dspark.add_argument(
        "--losses", type=_losses, metavar="CE,DISTANCE,CONFIDENCE", help="weights of the losses"
    )
    eagle3 = commands.add_parser("eagle3", help="train an EAGLE-3 layer for a target")
    _add_common(eagle3, sorted(EAGLE3_PRESETS), preset="cpu", out=_DEMO / "eagle3")
    _add_target(eagle3)
    _add_written(eagle3)
    eagle3.add_argument("--levels", type=int, metavar="N", help="depths of the training-time test")
    eagle3.add_argument(
        "--norms", action="store_true", help="EAGLE-3.1: norms of the target's states and outputs"
    )
    online = commands.add_parser("online", help="train a drafter further on recorded texts")
    _add_common(online, sorted(ONLINE_PRESETS), preset="cpu")
    _add_target(online)
    online.add_argument(
        "--from", dest="start", type=Path, required=True, metavar="DIR",
        help="trained drafter to begin with: longspec, dspark, eagle3 or lm",
    )  # fmt: skip
    online.add_argument(
        "--from-recordings", dest="recordings", type=Path, required=True, metavar="DIR",
        help="folder of `paceline drafter --record`, or one of its files",
    )  # fmt: skip
    online.add_argument(
        "--old-share", type=float, metavar="S",
        help="share of tokens from other texts than the recorded ones, against forgetting",
    )  # fmt: skip
    own = commands.add_parser("own-text", help="let an instruct model write conversations")
    _add_target(own)
    own.add_argument("--data", default="stdlib", help="'stdlib' or a folder of text files")
    own.add_argument("--count", type=int, default=1024, help="number of conversations")
    own.add_argument("--seed", type=int, default=0, help="other seeds give other conversations")
    own.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="write these alone, e.g. document; default: all"
    )
    own.add_argument("--weights", default="int8", help="format of the target's weights")
    own.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines; an old file is extended",
    )


def run(args: argparse.Namespace) -> int:
    """Run the sub-command in `args`; 0 when done, 1 on a bad argument, 130 when interrupted."""
    try:
        _COMMANDS[args.train_command](args)
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


def _target(args: argparse.Namespace) -> None:
    from paceline.train.target import train_target

    preset = LM_PRESETS[args.preset]
    train_target(_corpus(args, preset), preset, _run(args, preset), args.out)


def _lm(args: argparse.Namespace) -> None:
    from paceline.train.lm import train_lm

    preset = LM_PRESETS[args.preset]
    train_lm(args.target, _corpus(args, preset), preset, _run(args, preset), args.out)


def _longspec(args: argparse.Namespace) -> None:
    from paceline.train.longspec import LongSpecRecipe

    preset = LONGSPEC_PRESETS[args.preset]
    preset = replace(
        preset,
        **_given(levels=args.levels, draft_vocab_size=args.vocabulary),
        **_given(budgets=args.budgets, max_length=args.max_length),
        offset=preset.offset and not args.no_offset,
        noise=preset.noise and not args.no_noise,
    )
    recipe = LongSpecRecipe(args.target, _scaled(preset, args.rate))
    recipe.train(_corpus(args), _run(args, preset), args.out, args.own_text, args.start)


def _dspark(args: argparse.Namespace) -> None:
    from paceline.train.dspark import DSparkRecipe

    ce, tv, certainty = args.losses or (None, None, None)
    preset = replace(
        DSPARK_PRESETS[args.preset],
        **_given(layers=args.layers, block=args.block, draft_vocab_size=args.vocabulary),
        **_given(ce=ce, tv=tv, certainty=certainty),
    )
    if args.no_heads:
        preset = preset.without_heads()
    recipe = DSparkRecipe(args.target, _scaled(preset, args.rate))
    recipe.train(_corpus(args), _run(args, preset), args.out, args.own_text, args.start)


def _eagle3(args: argparse.Namespace) -> None:
    from paceline.train.eagle3 import Eagle3Recipe

    preset = EAGLE3_PRESETS[args.preset]
    preset = replace(
        preset,
        **_given(levels=args.levels, draft_vocab_size=args.vocabulary),
        fc_norm=preset.fc_norm or args.norms,
        norm_output=preset.norm_output or args.norms,
    )
    recipe = Eagle3Recipe(args.target, _scaled(preset, args.rate))
    recipe.train(_corpus(args), _run(args, preset), args.out, args.own_text, args.start)


def _scaled(preset: P, factor: float) -> P:
    """A preset with other learning rates."""
    muon, adamw = preset.muon_rate, preset.adamw_rate
    return replace(preset, muon_rate=muon and muon * factor, adamw_rate=adamw * factor)


def _given(**options: Any) -> dict[str, Any]:
    """The options that the command line has."""
    return {name: value for name, value in options.items() if value is not None}


def _online(args: argparse.Namespace) -> None:
    from paceline.train.online import train_online

    preset = ONLINE_PRESETS[args.preset]
    if args.old_share is not None:
        preset = replace(preset, old_share=args.old_share)
    # Each version is a run of its own.
    args.work = args.work or _default_work() / f"online-{args.out.resolve().name}"
    corpus, run = _corpus(args), _run(args, preset)
    train_online(args.target, args.start, args.recordings, corpus, preset, run, args.out)


def _own_text(args: argparse.Namespace) -> None:
    from paceline.decoder import Decoder
    from paceline.train.conversations import KINDS, write_conversations
    from paceline.train.corpus import encode_all, load_tokenizer

    tokenizer = load_tokenizer(args.target)
    documents = encode_all(tokenizer, _corpus(args).train)
    decoder = Decoder.load(args.target, args.weights)
    kinds = args.kinds or KINDS
    write_conversations(decoder, tokenizer, documents, args.count, args.out, args.seed, kinds)


_COMMANDS = {
    "target": _target, "lm": _lm, "longspec": _longspec, "dspark": _dspark, "eagle3": _eagle3,
    "online": _online, "own-text": _own_text,
}  # fmt: skip


def _corpus(args: argparse.Namespace, preset: Preset | None = None) -> Corpus:
    """The files of a preset; by default all, as the presets of drafters choose from them."""
    from paceline.train.corpus import load_corpus

    if preset is None:
        return load_corpus(args.data, _ALL_FILES, _HELDOUT_FILES, wide=True)
    return load_corpus(args.data, preset.files, preset.heldout_files, preset.wide)


def _run(args: argparse.Namespace, preset: Any) -> Run:
    """The run of the arguments; `preset` has the default `minutes` and `steps`."""
    import torch

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
        card=args.card,
        signals=getattr(args, "signals", None),
    )


def _add_common(
    parser: argparse.ArgumentParser, presets: list[str], preset: str, out: Path | None = None
) -> None:
    parser.add_argument("--preset", choices=presets, default=preset)
    parser.add_argument("--data", default="stdlib", help="'stdlib' or a folder of text files")
    parser.add_argument("--minutes", type=float, help="time budget of stepping, in minutes")
    parser.add_argument("--steps", type=int, help="step budget")
    parser.add_argument(
        "--out", type=Path, default=out, required=out is None, help="model folder to write"
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is in --out")
    parser.add_argument(
        "--no-card", dest="card", action="store_false",
        help="for the preset smollm2: no README.md, and none of its measurements",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints; a run that it holds is resumed"
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


def _add_written(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--own-text", type=Path, nargs="+", default=(), metavar="FILE",
        help="conversations of `own-text`, for the preset smollm2; default: write them first",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="start", type=Path, metavar="DIR",
        help="drafter to train further, for the preset smollm2; default: a new one",
    )  # fmt: skip
    parser.add_argument(
        "--signals", type=Path, metavar="DIR",
        help="folder of what the target computes for --own-text, which runs may share; "
        "default: --work",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="F", help="factor on the learning rates"
    )
    parser.add_argument(
        "--vocabulary", type=int, metavar="N",
        help="tokens that can be drafted, for the preset smollm2",
    )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _losses(text: str) -> tuple[float, float, float]:
    """Three weights of the losses of DSpark."""
    ce, tv, certainty = map(float, text.split(","))
    return ce, tv, certainty


def _model(text: str) -> Path:
    """A model's path or name. Imported here because `gpu-train` runs without grpc."""
    from paceline.harness.models import model_path

    return model_path(text)


def _default_work() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "train"
