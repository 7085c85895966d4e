"""Trainers: of any method, and of drafters that read a target, on texts and on conversations.

A run on texts reads files and texts that the target writes after pieces of them; the target runs in
every step. A run for an instruct model reads nothing but conversations that it wrote; the target
runs once over them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn

from paceline.convert import ModelSource, open_model
from paceline.decoder import Decoder
from paceline.drafter.methods.layers import LayerShape
from paceline.train.batches import Batches, RowStream
from paceline.train.conversations import OwnTexts
from paceline.train.corpus import Corpus, load_tokenizer
from paceline.train.drafters import (
    DrafterModel,
    Heldout,
    Objective,
    Rounds,
    Texts,
    drafter_method,
    origin,
    rounds_section,
    train_drafter,
    write_groups,
)
from paceline.train.loop import Loss
from paceline.train.own_text import load_target
from paceline.train.presets import CosinePlan, LayerPreset, Plan, Stage
from paceline.train.run import PREPARING, Run, begin_run
from paceline.train.signals import Signals, signals_of

_TEXTS_FILE = "texts"  # in the work folder: number of conversations that the run reads
_PROMPT = 300  # tokens of the prompts that are measured while training
_MEASURED_FILES = 12
# Fields that a run may change in the drafter that it begins with: its weights have the same shapes
# for all values of them.
_FREE = ("block", "levels", "confidence_temperatures")
_LOGGED_TEXTS, _MEASURED_TEXTS = 2, 12  # conversations of each kind and temperature
P = TypeVar("P", bound=LayerPreset)
D = TypeVar("D", bound=DrafterModel)


@dataclass
class LayerTrainer(ABC, Generic[P, D]):
    """Trains drafters of one method that read a target."""

    method: ClassVar[str]
    # Lengths of the prompts that a card on texts is measured with, in tokens.
    prompts: ClassVar[tuple[int, ...]] = (_PROMPT,)
    trees: ClassVar[Mapping[str, str]]  # options of the drafter that is measured on conversations

    target: Path  # folder or file of the target
    preset: P  # shape and settings

    @abstractmethod
    def read(self, folder: Path, device: str) -> D:
        """Load the drafter in `folder`, made for this target, onto `device`."""

    @abstractmethod
    def text_loss(
        self, drafter: D, batches: Batches, plan: Plan, separator: int, device: str
    ) -> tuple[nn.Module, Loss]:
        """What a run on texts trains, and its loss; `separator` is the token between texts."""

    @abstractmethod
    def new_drafter(self, end: int) -> D:
        """A drafter of random weights; `end` is the token that ends texts, which none contains."""

    def plan(self, run: Run, focus: int = 0) -> Plan:
        """The plan of a run; stages with `focus` read the first `focus` texts."""
        stages: Sequence[Stage] = self.preset.stages  # type: ignore[attr-defined]  # each has them
        return CosinePlan(tuple(stages), run.minutes, run.steps, focus)

    @property
    def options(self) -> Mapping[str, str]:
        """Options of the drafter that is measured on texts."""
        return {}

    @abstractmethod
    def initial_weights(self, source: ModelSource, drafter: D) -> dict[str, Tensor]:
        """Weights to begin with for an instruct model, copied from the target by their names."""

    @abstractmethod
    def needed_signals(self, drafter: D) -> dict[str, Any]:
        """Which signals of the target are kept: arguments of `signals_of`."""

    @abstractmethod
    def signal_loss(
        self, drafter: D, embedding: Tensor, head: Tensor, signals: Signals, texts: OwnTexts,
        plan: Plan,
    ) -> tuple[nn.Module, Loss, RowStream]:  # fmt: skip
        """What a run on conversations trains, its loss, and its batches."""

    def long_rounds(self, drafter: D, decoder: Decoder, corpus: Corpus, out: Path) -> Rounds:
        """More rounds for the card of a run on conversations."""
        return {}

    @abstractmethod
    def shape_section(self, drafter: D) -> str:
        """The list of a model card about the drafter's shape."""

    @abstractmethod
    def training_section(self, objective: Objective) -> str:
        """The paragraph of a model card about losses, rates and stages."""

    def card(self, drafter: D, data: str, counts: str, objective: Objective, rounds: Rounds) -> str:
        return f"""# Paceline drafter: `{self.method}`

Drafter method `{self.method}`. It works with one target only: `config.json` holds the target's
fingerprint.

{self.shape_section(drafter)}

{data}

## Training

{counts}.
{self.training_section(objective)}

{rounds_section(rounds)}"""

    def train(
        self,
        corpus: Corpus,
        run: Run,
        out: Path,
        written: Sequence[Path] = (),
        start: Path | None = None,
    ) -> None:
        """Train a drafter for the target; write its folder and card to `out`.

        For a preset with conversations, the target writes these first, unless they are in the files
        `written`. Training begins with the weights of
        the drafter in `start`, if it is given.

        Raises ValueError if the preset does not read `written` or `start`, or `start` is a drafter
        of another method, target or shape, and what `begin_run` and `OwnTexts.load` raise.
        """
        if self.preset.conversations:
            self._train_on_conversations(corpus, run, out, written, start)
        elif written or start:
            raise ValueError("this preset reads no --own-text and no --from: give --preset smollm2")
        else:
            self._train_on_texts(corpus, run, out)

    def _train_on_texts(self, corpus: Corpus, run: Run, out: Path) -> None:
        preset = self.preset
        begin_run(run, out, self.method, preset, corpus, target=self.target)
        texts = Texts.load(self.target, corpus, preset.own_texts, run)
        torch.manual_seed(0)
        drafter = self.new_drafter(texts.eos)
        drafter.model.to(run.device)
        batches = texts.batches(preset.files)
        plan = self.plan(run, focus=len(texts.written))
        module, loss = self.text_loss(drafter, batches, plan, texts.eos, run.device)
        objective = Objective(module, loss, preset.muon_rate, preset.adamw_rate)

        def heldout(splits: Mapping[str, Sequence[list[int]]], lengths: Sequence[int]) -> Heldout:
            groups = write_groups(texts.decoder, splits, lengths, _MEASURED_FILES)
            return Heldout(drafter, texts.decoder, groups, {"": self.options})

        logged = heldout({"held out": texts.heldout}, (_PROMPT,))
        notes = {"files": len(texts.trained[: preset.files]), "own_texts": len(texts.written)}
        progress = train_drafter(drafter, objective, batches, plan, run, logged, notes, out)
        if progress is None:
            return
        splits = {"held out": texts.heldout, "trained on by the target": self._known(texts)}
        rounds = heldout(splits, self.prompts).measure(out)
        data = texts.card_section(preset.files)
        card = self.card(drafter, data, origin(progress), objective, rounds)
        (out / "README.md").write_text(card)

    def _known(self, texts: Texts) -> list[list[int]]:
        """Training files that the target's manifest names; none if it has no manifest."""
        manifest = self.target / "corpus.json"
        if not manifest.is_file():
            return []
        known = {row["sha256"] for row in json.loads(manifest.read_text())["train"]}
        pairs = zip(texts.corpus.train, texts.trained, strict=True)
        return [ids for document, ids in pairs if document.sha256 in known]

    def _train_on_conversations(
        self, corpus: Corpus, run: Run, out: Path, written: Sequence[Path], start: Path | None
    ) -> None:
        preset = self.preset
        run = run.in_fast_types()
        begin_run(
            run, out, self.method, preset, corpus,
            target=self.target, start=start, written=written,
        )  # fmt: skip
        source = open_model(self.target)
        # What does not fit is refused here, before hours of writing.
        torch.manual_seed(0)
        drafter = self.new_drafter(load_tokenizer(self.target).eos_token_id)
        model, config = drafter.model, drafter.config
        if start is not None:
            model.load_state_dict(self._weights(start, config))
        else:
            model.load_state_dict({**model.state_dict(), **self.initial_weights(source, drafter)})
        decoder = load_target(self.target, "int8")
        texts = OwnTexts.load(decoder, self.target, corpus, preset.conversations, run, written)
        if start is None and config.draft_vocab_size:
            model.load_state_dict({**model.state_dict(), "d2t": texts.frequent(config.drafted)})
        drafter.model.to(run.device)
        tokens = [text.tokens for text in texts.trained]
        needed = self.needed_signals(drafter)
        begun, work = run.work / _TEXTS_FILE, run.signals or run.work
        if begun.is_file():  # a run that goes on reads the texts that it began with
            needed["count"] = int(begun.read_text())
        else:
            needed["until"] = run.until(PREPARING)
        signals = signals_of(decoder, self.target, tokens, work, **needed)
        texts = replace(texts, trained=texts.trained[: len(signals.starts) - 1])
        if PartialState().is_main_process:
            begun.write_text(str(len(texts.trained)))
        embedding, head = source.vocabulary(torch.bfloat16)
        head = head.to(torch.bfloat16 if run.bf16 else torch.float32)
        plan = self.plan(run)
        module, loss, batches = self.signal_loss(drafter, embedding, head, signals, texts, plan)
        objective = Objective(module, loss, preset.muon_rate, preset.adamw_rate)
        levels = drafter.levels

        def heldout(count: int) -> Heldout:
            return Heldout(drafter, decoder, texts.recordings(count, levels), {"": self.trees})

        logged, notes = heldout(_LOGGED_TEXTS), {"conversations": len(texts.trained)}
        progress = train_drafter(drafter, objective, batches, plan, run, logged, notes, out)
        if progress is None or not run.card:
            return
        rounds = heldout(_MEASURED_TEXTS).measure(out)
        rounds |= self.long_rounds(drafter, decoder, corpus, out)
        card = self.card(drafter, texts.card_section(), origin(progress), objective, rounds)
        if start is not None:
            card += _before(start)
        (out / "README.md").write_text(card)

    def of_start(self, start: Path, chosen: Mapping[str, Mapping[str, Any]]) -> P:
        """The preset with the shape and the levels of a drafter that is trained further.

        Args:
            chosen: Fields of the preset that the user chose, by the option that does so.

        Raises ValueError if it is a drafter of another method or target, or an option asks for
        another shape than it has.
        """
        drafter = self._begun(start)
        has = {**asdict(drafter.config), "levels": drafter.levels}
        for option, values in chosen.items():
            for name, value in values.items():
                if name in has and name not in _FREE and value != has[name]:
                    raise ValueError(
                        f"{option} asks for {name} {value}, but {start} has {name} {has[name]}, "
                        f"and a drafter that is trained further keeps its shape: leave {option} out"
                    )
        names = {field.name for field in fields(self.preset)} & has.keys()
        return replace(self.preset, **{name: has[name] for name in names})

    def _begun(self, start: Path) -> D:
        """The drafter in a folder, to be trained further. Raises ValueError: it is of another
        method or target."""
        if (method := drafter_method(start, self.target)) != self.method:
            raise ValueError(f"{start} is a {method} drafter, expected {self.method}")
        return self.read(start, "cpu")

    def _weights(self, start: Path, config: LayerShape) -> Mapping[str, Tensor]:
        """The weights of the drafter in a folder, to be trained further. Raises ValueError if its
        shape is not this run's."""
        drafter = self._begun(start)
        wanted, actual = asdict(config), asdict(drafter.config)
        differing = [
            f"{name} {value}, this run {wanted[name]}"
            for name, value in actual.items()
            if name not in _FREE and value != wanted[name]
        ]
        if differing:
            raise ValueError(
                f"{start} has {'; '.join(differing)}: only a drafter of the same shape can be "
                "trained further"
            )
        return drafter.model.state_dict()


def _before(start: Path) -> str:
    """The section of a model card about the drafter that a run began with."""
    card = start / "README.md"
    text = card.read_text() if card.is_file() else ""
    part = r"^## (?:Data|Training|Trained before)\n(.*?)(?=^## |\Z)"
    earlier = [section.strip() for section in re.findall(part, text, re.M | re.S)]
    head = "\n## Trained before\n\nThe weights began as those of an earlier drafter:"
    return "\n\n".join([head, *earlier]) + "\n"
