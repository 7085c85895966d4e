"""Random LongSpec drafters, random target KV, and a dense reference of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import Decoder, load_config
from paceline.decoder.weights import Checkpoint
from paceline.drafter.kv.reader import StreamingReader
from paceline.drafter.methods.base import GenerationInfo, Resources
from paceline.drafter.methods.checkpoint import load_weights
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    read_longspec,
    save_longspec,
    window_mask,
)
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter, LongSpecSequence
from paceline.kernels import streaming
from paceline.v1 import sampling_pb2

from .models import GREEDY, VOCAB, beam_search, forward


@dataclass
class FakeKv(StreamingReader):
    """A target's KV in memory."""

    keys: Tensor
    values: Tensor
    committed: int = 0
    gone: bool = False

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def check(self) -> None:
        if self.gone:
            raise ConnectionError("the cache is gone")

    def close(self) -> None:
        """Nothing to release."""

    def spoil(self, begin: int) -> None:
        """Makes positions from ``begin`` on unusable."""
        self.keys[:, begin:] = self.values[:, begin:] = torch.nan


def made_up_kv(config: Any, committed: int, seed: int = 0) -> FakeKv:
    """Random KV of ``committed`` positions."""
    draws = torch.Generator().manual_seed(seed)
    shape = (2, config.kv_heads, committed, config.head_dim)
    keys, values = torch.randn(shape, generator=draws)
    return FakeKv(keys, values, committed)


def target_kv(target: Path, config: LongSpecConfig, text: Sequence[int]) -> FakeKv:
    """KV of the target's layer when all but the newest token of a text is committed.

    Behind it lie numbers that must not be read.
    """
    _, cache = forward(Decoder.load(target), text, 50)
    keys, values = (each.clone() for each in cache.layer(config.target_layer))
    keys[:, len(text) - 1 :] = values[:, len(text) - 1 :] = torch.nan
    return FakeKv(keys, values, len(text) - 1)


def write_longspec(folder: Path, target: Path, seed: int = 0, **shape: Any) -> Path:
    """Save a random LongSpec drafter for a target, in fp32."""
    config = LongSpecConfig.for_target(target, **shape)
    torch.manual_seed(seed)
    model = LongSpecModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if config.draft_vocab_size:
        model.d2t.copy_(torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values)
    save_longspec(folder, config, model.state_dict(), TargetRef.of(target), dtype=torch.float32)
    return folder


def load(folder: Path, target: Path, /, **options: str) -> LongSpecDrafter:
    """The method `longspec` on a folder."""
    return LongSpecDrafter.load(folder, {"target": str(target), **options}, Resources())


def start(
    drafter: LongSpecDrafter,
    text: Sequence[int],
    kv: FakeKv,
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> LongSpecSequence:
    """Starts a generation of a prompt."""
    return drafter.start(GenerationInfo(text, len(text), VOCAB, sampling, kv=kv))


class Dense:
    """The same drafter in plain dense PyTorch, reading ``context`` target positions."""

    def __init__(self, folder: Path, target: Path, context: int = 0) -> None:
        self.config, dtype = read_longspec(folder)
        self.context = context
        self.model = LongSpecModel(self.config)
        self.model.load_state_dict(load_weights(folder, self.config, LongSpecModel, dtype))
        weights = Checkpoint(target, torch.float32)
        self.embedding = weights["model.embed_tokens.weight"]
        tied = load_config(target).tied
        self.head = self.embedding if tied else weights["lm_head.weight"]

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seen: Tensor,
        kv: FakeKv,
        committed: int,
    ) -> Tensor:
        """Logits ``[S, V]`` of tokens with the mask ``[S, S]``, which all read the same KV."""
        read = torch.zeros(len(tokens), committed, dtype=torch.bool)
        for part in streaming(committed, self.context):
            read[:, part.start : part.stop] = True
        hidden = self.model(
            self.embedding[torch.tensor(tokens)][None],
            torch.tensor(positions),
            seen,
            kv.keys[None, :, :committed],
            kv.values[None, :, :committed],
            read,
        )
        out: Tensor = hidden[0] @ self.head.T
        if self.config.draft_vocab_size:
            left_out = torch.ones(out.shape[1], dtype=torch.bool)
            left_out[self.model.d2t] = False
            out[:, left_out] = -torch.inf
        return out

    def after(self, text: Sequence[int], path: Sequence[int], kv: FakeKv, committed: int) -> Tensor:
        """Logits after a drafted path, ``[V]``, by one pass over all of it."""
        tokens = [*text, *path]
        seen = window_mask(len(tokens), self.config.window)
        return self.logits(tokens, range(len(tokens)), seen, kv, committed)[-1]

    def tree(
        self,
        text: list[int],
        kv: FakeKv,
        sampling: sampling_pb2.SamplingParams,
        widths: Sequence[int],
    ) -> dict[tuple[int, ...], float]:
        """See :func:`beam_search`."""
        committed = min(kv.committed, len(text) - 1)
        return beam_search(
            text, sampling, widths, lambda path: self.after(text, path, kv, committed)
        )
