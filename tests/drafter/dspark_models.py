"""Random DSpark drafters, random hidden states, and a dense reference of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import load_config
from paceline.decoder.weights import Checkpoint
from paceline.drafter.methods.base import GenerationInfo, Resources
from paceline.drafter.methods.checkpoint import TargetRef, load_weights
from paceline.drafter.methods.dspark import (
    DSparkConfig,
    DSparkModel,
    read_dspark,
    save_dspark,
)
from paceline.drafter.methods.dspark.drafter import DSparkDrafter, DSparkSequence
from paceline.train.acceptance import RecordedStates
from paceline.v1 import sampling_pb2

from .models import GREEDY, VOCAB, beam_search


class FakeStates(RecordedStates):
    """A target's hidden states, which can be lost."""

    gone = False

    def check(self) -> None:
        if self.gone:
            raise ConnectionError("the cache is gone")

    @property
    def states(self) -> Tensor:
        """All rows, ``[S, taps * hidden]``."""
        return self._states

    def spoil(self, begin: int, end: int | None = None) -> None:
        """Makes positions unusable."""
        self._states[begin:end] = torch.nan


def made_up_states(
    config: DSparkConfig, committed: int, seed: int = 0, window: int = 0
) -> FakeStates:
    """Random states, which at a position do not depend on ``committed``."""
    draws = torch.Generator().manual_seed(seed)
    width = len(config.taps) * config.hidden
    states = FakeStates(torch.randn(1024, width, generator=draws), window)
    states.committed = committed
    return states


def write_dspark(folder: Path, target: Path, seed: int = 0, **shape: Any) -> Path:
    """Save a random drafter for a target, in fp32."""
    shape = {"taps": (0, 1), "block": 4, "mask_token": 3, **shape}
    from_anchor = shape.pop("from_anchor", True)
    config = DSparkConfig.for_target(target, **shape)
    if not from_anchor:
        config = DSparkConfig(**{**config.__dict__, "from_anchor": False})
    torch.manual_seed(seed)
    model = DSparkModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if model.d2t is not None:
        model.d2t.copy_(torch.randperm(VOCAB)[: len(model.d2t)].sort().values)
    save_dspark(folder, config, model.state_dict(), TargetRef.of(target), dtype=torch.float32)
    return folder


def load(folder: Path, target: Path, /, **options: str) -> DSparkDrafter:
    """The method `dspark` on a folder."""
    return DSparkDrafter.load(folder, {"target": str(target), **options}, Resources())


def start(
    drafter: DSparkDrafter,
    text: Sequence[int],
    states: FakeStates,
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> DSparkSequence:
    """Starts a generation of a prompt."""
    return drafter.start(GenerationInfo(text, len(text), VOCAB, sampling, states=states))


class Dense:
    """The same drafter in plain dense PyTorch."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config, dtype = read_dspark(folder)
        self.model = DSparkModel(self.config)
        self.model.load_state_dict(load_weights(folder, self.config, DSparkModel, dtype))
        weights = Checkpoint(target, torch.float32)
        self.embedding = weights["model.embed_tokens.weight"]
        tied = load_config(target).tied
        self.head = self.embedding if tied else weights["lm_head.weight"]

    def block(self, text: Sequence[int], states: FakeStates) -> Tensor:
        """Hidden states of the positions that predict, ``[levels, hidden]``."""
        end = min(states.committed, len(text) - 1)
        begin = max(0, end - self.config.window) if self.config.window else 0
        fed = [text[-1], *[self.config.mask_token] * (self.config.block - 1)]
        hidden: Tensor = self.model(
            self.embedding[torch.tensor(fed)][None, None],
            torch.tensor([[end]]),
            states.states[None, begin:end],
            torch.arange(begin, end)[None],
        )
        return hidden[0, 0]

    def after(self, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, float]:
        """Logits after the anchor and a path, and the log confidence of that position."""
        levels, drafted = len(tokens), self.model.d2t
        scores, confidence = self.model.draft_head(self.head) @ hidden[levels - 1], 0.0
        rows = None
        if self.model.markov_head is not None:
            before = self.model.draft_rows(torch.tensor(tokens))[None]
            features, rows = self.model.markov_head(before, hidden[None, :levels])
            scores = scores + self.model.markov_head.markov_w2(features)[0, -1]
        if self.model.confidence_head is not None:
            logit = self.model.confidence_head(
                hidden[levels - 1], None if rows is None else rows[0, -1]
            )
            confidence = float(torch.nn.functional.logsigmoid(logit))
        if drafted is not None:
            whole = torch.full((len(self.head),), -torch.inf)
            whole[drafted] = scores
            scores = whole
        return scores, confidence

    @torch.inference_mode()
    def tree(
        self,
        text: list[int],
        states: FakeStates,
        sampling: sampling_pb2.SamplingParams,
        widths: Sequence[int],
    ) -> dict[tuple[int, ...], float]:
        """See :func:`beam_search`."""
        hidden = self.block(text, states)
        chain = set(widths) == {1}

        def adjust(path: tuple[int, ...], logs: Tensor) -> Tensor:
            if self.model.confidence_head is None:
                return logs
            change = self.after(hidden, [text[-1], *path])[1] - float(logs.max())
            return logs + (change if chain else min(0.0, change))

        return beam_search(
            text, sampling, widths, lambda path: self.after(hidden, [text[-1], *path])[0], adjust
        )
