"""What `paceline train` asks of a drafting method: its recipe.

Recipes import neither torch nor transformers, which takes seconds: these are for trainers, which a
recipe names.
"""

from __future__ import annotations

from abc import ABC
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from paceline.train.presets import LayerPreset

if TYPE_CHECKING:
    from paceline.train.corpus import Corpus
    from paceline.train.run import Run


S = TypeVar("S")  # a preset, which has the budgets `minutes` and `steps`
P = TypeVar("P", bound=LayerPreset)


class Recipe(ABC, Generic[S]):
    """How drafters of one method are trained.

    A method names it by `Drafter.recipe`, as ``module:Class``; `paceline train METHOD` runs it.
    """

    method: ClassVar[str]
    help: ClassVar[str]  # what `paceline train --help` says of it
    presets: Mapping[str, S]  # shapes and settings by name
    preset: ClassVar[str] = "cpu"  # name of the preset by default
    # The class that trains, as `module:Class`: a `paceline.train.trainer.LayerTrainer`.
    trainer: ClassVar[str]

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add what the method has besides the arguments of every method."""

    def vary(self, preset: S, args: Namespace) -> S:
        return preset

    def load_trainer(self, target: Path, preset: S) -> Any:
        """Import the trainer, for the target in a folder or file."""
        module, _, name = self.trainer.partition(":")
        return getattr(import_module(module), name)(target, preset)

    def train(self, args: Namespace, preset: S, corpus: Corpus, run: Run) -> None:
        """Train a drafter for `args.target`; write its folder and card to `args.out`.

        Raises ValueError for an argument that does not fit, and what `begin_run` raises.
        """
        self.load_trainer(args.target, preset).train(corpus, run, args.out)


class LayerRecipe(Recipe[P]):
    """How drafters that read a target are trained: on texts, or on an instruct model's own."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--own-text", type=Path, nargs="+", default=(), metavar="FILE",
            help="conversations of `own-text`, for presets smollm2 and shipped; default: write "
            "them first",
        )  # fmt: skip
        parser.add_argument(
            "--from", dest="start", type=Path, metavar="DIR",
            help="drafter to train further in its own shape, for presets smollm2 and shipped; "
            "default: a new one",
        )  # fmt: skip
        parser.add_argument(
            "--signals", type=Path, metavar="DIR",
            help="folder of what the target computes for --own-text, which runs may share; "
            "default: --work",
        )  # fmt: skip
        parser.add_argument(
            "--no-card", dest="card", action="store_false",
            help="write no README.md, and measure nothing for it, with presets smollm2 and shipped",
        )  # fmt: skip
        parser.add_argument(
            "--rate", type=float, default=1.0, metavar="F", help="factor on the learning rates"
        )
        parser.add_argument(
            "--vocabulary", type=int, metavar="N",
            help="tokens that can be drafted, for presets smollm2 and shipped",
        )  # fmt: skip

    def chosen(self, args: Namespace) -> dict[str, dict[str, Any]]:
        """Return the preset's fields that the command line chooses, by the name of the argument."""
        return {"--vocabulary": given(draft_vocab_size=args.vocabulary)}

    def vary(self, preset: P, args: Namespace) -> P:
        """Return the preset with the shape of the drafter that is trained further, if there is one,
        and with the method's arguments.

        Raises ValueError: an argument is for presets that train on conversations, and this one does
        not; or it asks for another shape than that drafter's.
        """
        unused = [] if preset.conversations else self._of_conversations(args)
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: no effect on the preset {args.preset}, which trains on "
                "files; give --preset smollm2, which trains on conversations"
            )
        chosen = self.chosen(args)
        if args.start is not None:
            preset = self.load_trainer(args.target, preset).of_start(args.start, chosen)
        muon, adamw = preset.muon_rate, preset.adamw_rate
        return replace(
            preset,
            muon_rate=muon and muon * args.rate,
            adamw_rate=adamw * args.rate,
            **{name: value for fields in chosen.values() for name, value in fields.items()},
        )

    def _of_conversations(self, args: Namespace) -> list[str]:
        """Return the given arguments that only training on conversations reads."""
        names = {"own_text": "own-text", "start": "from"}
        names |= {name: name for name in ("signals", "vocabulary", "contexts")}
        names |= {"max_length": "max-length"}
        flags = [f"--{flag}" for name, flag in names.items() if getattr(args, name, None)]
        return [*flags, *(["--no-card"] if not args.card else [])]

    def train(self, args: Namespace, preset: P, corpus: Corpus, run: Run) -> None:
        trainer = self.load_trainer(args.target, preset)
        trainer.train(corpus, run, args.out, args.own_text, args.start)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
