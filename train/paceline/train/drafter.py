"""What all runs that train a drafter share: texts, the loop, the folder and its card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from paceline.decoder import Decoder
from paceline.kernels import processor_name
from paceline.train.batches import Batches, Rows
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.drafter_models import DrafterModel
from paceline.train.heldout import Heldout, Rounds, accepted_length
from paceline.train.identity import cleared
from paceline.train.loop import Loss, Run, train
from paceline.train.optim import Optimizer
from paceline.train.own_text import own_texts
from paceline.train.schedule import Plan
from paceline.train.tokenizer import encode_all, load_tokenizer

ACCEPTED = "accepted_length"
"""Note in a drafter's config.json: its mean on the held-out texts of the last checkpoint."""


@dataclass(frozen=True)
class Texts:
    """Token ids that a drafter is trained and measured on.

    Attributes:
        corpus: Where `trained` and `heldout` come from.
        trained: Each training file.
        heldout: Each held-out file.
        own: Texts that the target wrote after pieces of training files.
        eos: The end-of-text token.
        decoder: The target.
    """

    corpus: Corpus
    trained: Sequence[list[int]]
    heldout: Sequence[list[int]]
    own: Sequence[list[int]]
    eos: int
    decoder: Decoder

    @classmethod
    def load(cls, target: Path, corpus: Corpus, own: int, run: Run) -> Texts:
        """Encode a corpus, and let the target in the folder `target` write `own` texts.

        These are kept in `run.work`; writing them is not part of `run.minutes`. In a run of several
        processes, the first one writes them.
        """
        tokenizer = load_tokenizer(target)
        trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
        eos, decoder = tokenizer.eos_token_id, Decoder.load(target)
        with PartialState(cpu=torch.device(run.device).type == "cpu").main_process_first():
            written = own_texts(decoder, trained, own, eos, run.work / "own.safetensors")
        return cls(corpus, trained, heldout, written, eos, decoder)

    def batches(self, files: int) -> Batches:
        """Batches of the target's own texts and of the first `files` training files."""
        return Batches([*self.own, *self.trained[:files]], self.eos)

    def card_section(self, files: int | None) -> str:
        """The section of a model card about these texts."""
        return f"""## Data

{len(self.trained[:files])} files of the {self.corpus.source} and {len(self.own):,} texts that the
target wrote after 128 tokens from random positions of {len(self.trained)} such files, half of them
greedy, half at temperature 1. {len(self.heldout)} files are held out from target and drafter."""


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
        """The learning rates, for a model card."""
        if self.muon_rate is None:
            return f"AdamW {self.adamw_rate:g}"
        return f"Muon {self.muon_rate:g} for matrices, AdamW {self.adamw_rate:g} for the rest"


def train_drafter(
    drafter: DrafterModel,
    objective: Objective,
    batches: Rows,
    plan: Plan,
    run: Run,
    heldout: Heldout,
    notes: Mapping[str, Any],
    out: Path,
) -> Progress | None:
    """Train `drafter` and write its folder to `out`, with `notes` in its config.json.

    Returns the counts of the run; None in all processes but the first, which write nothing.
    """
    optimizer = Optimizer(objective.module, objective.muon_rate, objective.adamw_rate)
    progress = train(
        objective.module, objective.loss, batches, optimizer, plan, run, lambda _: heldout.log()
    )
    if not PartialState().is_main_process:
        return None
    accepted = {ACCEPTED: round(length, 3)} if (length := progress.last("heldout")) else {}
    drafter.save(cleared(out), {**progress.summary(), **accepted, **notes})
    return progress


def parameters(model: nn.Module) -> str:
    """Number of parameters, for a model card."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"


def machine() -> str:
    """This machine's processors, for a model card."""
    return f"{os.cpu_count()} threads of a processor {processor_name()}"


def rounds_section(rounds: Rounds) -> str:
    """The section of a model card about accepted tokens."""
    positions = range(1, 1 + max([1, *map(max, rounds.values())]))
    header = ["texts", "rounds", "accepted length", *(f"position {p}" for p in positions)]
    rows = [header, ["---"] * len(header)]
    for key, found in rounds.items():
        shares = [f"{mean(n >= position for n in found):.2f}" for position in positions]
        rows.append(
            [
                ", ".join(filter(None, key)),
                f"{len(found):,}",
                f"**{accepted_length(found):.2f}**",
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
