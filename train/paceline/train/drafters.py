"""What all runs that train a drafter share: folders, texts, held-out measurements, the card."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from torch import nn

from paceline.convert import load_decoder
from paceline.decoder import Decoder, UnsupportedModelError
from paceline.drafter import Drafter, Resources
from paceline.drafter.inspection import method_of_folder
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import SECTION, LoadError
from paceline.drafter.methods.checkpoint import (
    CONFIG_FILE,
    TargetRef,
    check_target,
    read_fit,
    save_drafter,
)
from paceline.drafter.methods.layers import LayerShape
from paceline.kernels import processor_name
from paceline.kernels.sampling import SamplingRules
from paceline.service.cpus import usable_cpus
from paceline.train.acceptance import Recording, accepted_per_round, replay, rounds
from paceline.train.batches import Batches, RowStream
from paceline.train.blocks import store_blocks
from paceline.train.calibration import Chain
from paceline.train.corpus import Corpus, encode_all, load_tokenizer
from paceline.train.loop import Loss, Optimizer, train
from paceline.train.modules.layers import DraftModel
from paceline.train.own_text import Task, own_texts, write_texts
from paceline.train.phases import Phase
from paceline.train.presets import Plan
from paceline.train.run import WRITING, Progress, Run, cleared
from paceline.tree import accepted_tokens

TEXTS = 24  # maximum number of texts that are measured of a group
TOKENS = 128  # tokens that the target writes after a prompt
# Drafted tokens accepted in each round, by group of texts and set of drafter options.
Rounds = dict[tuple[str, str], list[int]]
# Note in a drafter's config.json: its mean on the held-out texts that are measured in training.
ACCEPTED = "accepted_length"
_BEST = "best.pt"


@dataclass
class DrafterModel:
    """The weights of a drafter that reads a target; `levels` is the depth that it drafts to."""

    method: ClassVar[str]  # drafting method of the folder
    target: Path  # model folder of its target
    model: DraftModel  # its weights, fp32
    levels: int

    @property
    def config(self) -> LayerShape:
        return self.model.config

    @cached_property
    def reference(self) -> TargetRef:
        """The target as a drafter's folder names it."""
        return TargetRef.of(self.target)

    @property
    def hidden_state_layers(self) -> Sequence[int]:
        return getattr(self.config, "taps", ())

    def calibrate(self, heldout: Heldout) -> None:
        """Fit confidences to how often drafted tokens are accepted, at the end of a run."""

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        """Write a drafter folder with weights in 8-bit blocks. `notes` go into its config.json."""
        weights, levels = self.model.state_dict(), self.levels
        save_drafter(folder, self.config, weights, self.reference, levels=levels, notes=notes)
        store_blocks(folder)

    def load_drafter(self, folder: Path, options: Mapping[str, str]) -> Drafter:
        """Load a folder written by `save` as a drafter, with options of its method."""
        given = {"target": str(self.target), **options}
        return method_class(self.method).load(folder, given, Resources())


def trained_levels(folder: Path) -> int:
    """Return the depth that the drafter in a folder was trained to draft to."""
    return int(json.loads((folder / CONFIG_FILE).read_text())[SECTION]["levels"])


def drafter_method(folder: Path, target: Path) -> str:
    """Return the method of the drafter in `folder`.

    Raises ValueError if it is no drafter, or was made for another target than the one in `target`.
    """
    try:
        method = method_of_folder(folder)
        check_target(folder, TargetRef.of(target), read_fit(folder))
    except (LoadError, UnsupportedModelError) as error:
        raise ValueError(str(error)) from error
    return method.method


class Heldout:
    """Texts of a target, replayed to measure how many drafted tokens it accepts."""

    def __init__(
        self,
        drafter: DrafterModel,
        decoder: Decoder,
        texts: Mapping[str, Sequence[Recording]],
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Run the texts through the target, for the KV and hidden states that drafters read.

        Args:
            options: Sets of drafter options to measure with, by name; None: one, empty.
        """
        self._drafter, self._options = drafter, options or {"": {}}
        layers = drafter.hidden_state_layers
        phase = Phase("reading held-out texts", sum(len(part[:TEXTS]) for part in texts.values()))
        self._texts = {
            group: [
                replay(decoder, t.prompt, t.tokens, t.sampling, layers)
                for t in phase.take(part[:TEXTS])
            ]
            for group, part in texts.items()
        }

    def measure(self, folder: Path | None = None) -> Rounds:
        """Measure the drafter in `folder`, or by default the drafter as it is now.

        Groups whose texts are too short for a round are left out.
        """
        if folder is None:
            with tempfile.TemporaryDirectory() as current:
                self._drafter.save(Path(current))
                return self.measure(Path(current))
        measured: Rounds = {}
        for name, options in self._options.items():
            drafter = self._drafter.load_drafter(folder, options)
            for group, texts in self._texts.items():
                if rounds := [n for text in texts for n in accepted_per_round(drafter, text)]:
                    measured[group, name] = rounds
            drafter.close()
        return measured

    def chains(self) -> list[Chain]:
        """Return chains that the drafter as it is now drafts along all texts."""
        with tempfile.TemporaryDirectory() as current:
            self._drafter.save(Path(current))
            drafter = self._drafter.load_drafter(
                Path(current), {"widths": "1", "min_survival": "0"}
            )
            try:
                return [
                    Chain(tree.confidences, accepted_tokens(tree, after))
                    for text in chain(*self._texts.values())
                    for tree, after in rounds(drafter, text)
                ]
            finally:
                drafter.close()

    def log(self) -> dict[str, float]:
        """Mean accepted length of the drafter as it is now, in total as `heldout` and by group."""
        measured = self.measure()
        by_group = {
            " ".join(["accepted", *filter(None, key)]): accepted_length(rounds)
            for key, rounds in measured.items()
        }
        return {"heldout": accepted_length([*chain(*measured.values())]), **by_group}


def accepted_length(rounds: Sequence[int]) -> float:
    """Mean number of tokens emitted per round, the bonus token included."""
    return 1 + sum(rounds) / max(1, len(rounds))


def write_groups(
    decoder: Decoder,
    splits: Mapping[str, Sequence[Sequence[int]]],
    lengths: Sequence[int] = (300,),
    count: int | None = None,
) -> dict[str, list[Recording]]:
    """Texts that a target writes after documents of each split, greedily and at temperature 1.

    `lengths` are of the prompts, in tokens; for `count` see :func:`write_after`.
    """
    return {
        f"{split}, prompts of {length:,}, temperature {heat:g}": write_after(
            decoder, documents, length, heat, count
        )
        for split, documents in splits.items()
        for length in lengths
        for heat in (0.0, 1.0)
    }


def write_after(
    decoder: Decoder,
    documents: Iterable[Sequence[int]],
    length: int,
    temperature: float,
    count: int | None = None,
) -> list[Recording]:
    """Let a target write after the first `length` tokens of documents that are longer.

    At most `count` texts are written, by default `TEXTS`; none if they would not fit the context of
    the target.
    """
    if not 0 < length <= decoder.config.max_position - TOKENS:
        return []
    prompts = [tuple(ids[:length]) for ids in documents if len(ids) > length][: count or TEXTS]
    tasks = [
        Task(prompt, SamplingRules(temperature=temperature, seed=seed), TOKENS)
        for seed, prompt in enumerate(prompts)
    ]
    phase = Phase("writing held-out texts", len(tasks))
    return [
        Recording(prompts[number], tuple(tokens), temperature, number)
        for number, tokens in sorted(phase.take(write_texts(decoder, tasks, None)))
    ]


@dataclass(frozen=True)
class Texts:
    """Token ids that a drafter is trained and measured on."""

    corpus: Corpus  # where `trained` and `heldout` come from
    trained: Sequence[list[int]]  # each training file
    heldout: Sequence[list[int]]  # each held-out file
    written: Sequence[list[int]]  # texts that the target wrote after pieces of training files
    eos: int  # the end-of-text token
    decoder: Decoder  # the target

    @classmethod
    def load(cls, target: Path, corpus: Corpus, count: int, run: Run) -> Texts:
        """Encode a corpus, and let the target in the folder `target` write `count` texts.

        These are kept in `run.work`. In a run of several processes, the first one writes them.
        """
        tokenizer = load_tokenizer(target)
        trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
        eos, decoder = tokenizer.eos_token_id, load_decoder(target)
        with PartialState(cpu=torch.device(run.device).type == "cpu").main_process_first():
            file = run.work / "own.safetensors"
            written = own_texts(decoder, trained, count, eos, file, run.until(WRITING))
        return cls(corpus, trained, heldout, written, eos, decoder)

    def batches(self, files: int) -> Batches:
        """Return the batches of the target's own texts and of the first `files` training files."""
        return Batches([*self.written, *self.trained[:files]], self.eos)

    def card_section(self, files: int | None) -> str:
        """Return the section of a model card about these texts."""
        return f"""## Data

{len(self.trained[:files])} files of the {self.corpus.source} and {len(self.written):,} texts that
the target wrote after 128 tokens from random positions of {len(self.trained)} such files, half of
them greedy, half at temperature 1. {len(self.heldout)} files are held out from target and
drafter."""


@dataclass(frozen=True)
class Objective:
    """What a drafter's run trains: a module, its loss on a batch, and its learning rates.

    A `muon_rate` of None leaves all parameters to AdamW.
    """

    module: nn.Module
    loss: Loss
    muon_rate: float | None
    adamw_rate: float

    @property
    def rates(self) -> str:
        if self.muon_rate is None:
            return f"AdamW {self.adamw_rate:g}"
        return f"Muon {self.muon_rate:g} for matrices, AdamW {self.adamw_rate:g} for the rest"


def train_drafter(
    drafter: DrafterModel,
    objective: Objective,
    batches: RowStream,
    plan: Plan,
    run: Run,
    heldout: Heldout,
    notes: Mapping[str, Any],
    out: Path,
) -> Progress | None:
    """Train `drafter` and write its folder to `out`, with `notes` in its config.json.

    Written are the weights of the checkpoint with the largest accepted length on held-out texts.
    Returns the counts of the run; None in all processes but the first, which write nothing.
    """
    optimizer = Optimizer(objective.module, objective.muon_rate, objective.adamw_rate)
    best = run.work / _BEST

    def measure(_: nn.Module) -> Mapping[str, float]:
        lengths = heldout.log()
        if not best.is_file() or lengths["heldout"] >= _read_best(best)[ACCEPTED]:
            partial = best.with_suffix(".partial")
            torch.save({ACCEPTED: lengths["heldout"], "model": drafter.model.state_dict()}, partial)
            partial.replace(best)
        return lengths

    progress = train(objective.module, objective.loss, batches, optimizer, plan, run, measure)
    if not PartialState().is_main_process:
        return None
    kept = _read_best(best)
    drafter.model.load_state_dict(kept["model"])
    drafter.calibrate(heldout)
    accepted = {ACCEPTED: round(kept[ACCEPTED], 3)}
    drafter.save(cleared(out), {**progress.summary(), **accepted, **notes})
    return progress


def _read_best(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint


def parameters(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"


def origin(progress: Progress) -> str:
    """Return how the weights were made, for a model card: counts, machine, command, and the losses
    of the first twentieth of the steps, with which another run of the command is compared."""
    command = shlex.join(["paceline", *sys.argv[1:]])
    text = f"""{progress.description}, on {usable_cpus()} threads of a processor {processor_name()},
by `{command}`"""
    logged = [(row["step"], row["loss"]) for row in progress.log if "loss" in row]
    first = [f"{loss:.3f}" for step, loss in logged if step <= progress.step / 20]
    if first:
        text += f".\nMean losses of {logged[0][0]:g} steps each: {', '.join(first)} at first"
    return text


def rounds_section(rounds: Rounds) -> str:
    """Return the section of a model card about accepted tokens."""
    positions = range(1, 1 + max([1, *map(max, rounds.values())]))
    header = ["texts", "rounds", "accepted length", *(f"position {p}" for p in positions)]
    rows = [header, ["---"] * len(header)]
    for key, counts in rounds.items():
        shares = [f"{mean(n >= position for n in counts):.2f}" for position in positions]
        rows.append(
            [
                ", ".join(filter(None, key)),
                f"{len(counts):,}",
                f"**{accepted_length(counts):.2f}**",
                *shares,
            ]
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""## Measured

Held-out texts that the target wrote. Accepted length is the mean number of
tokens emitted per round, the bonus token included. Position columns: share of rounds in which a
drafted token was accepted at that position.

{table}
"""
