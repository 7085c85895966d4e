"""A small language model with the target's tokenizer as a tree drafter.

Level by level (dynamic beam, see :mod:`paceline.drafter.methods.beam`), ranked with the verifier's
own noise. Keeps its own KV: accepted nodes stay where a round computed them, up to compaction, and
rejected ones are overwritten. Rounds that wait together share every forward pass. Under a KV budget
(option ``context``) a round looks at a copy of chosen positions, at the positions they stand at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch

from paceline.decoder import Decoder
from paceline.drafter.checkpoint import read_fit
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    Generation,
    LoadError,
    Resources,
)
from paceline.drafter.methods.growth import grow
from paceline.drafter.methods.lm_budget import Look, Looks
from paceline.drafter.methods.lm_options import LmOptions
from paceline.drafter.methods.lm_sequence import KvAccount, LmSequence
from paceline.drafter.methods.loading import on_passing_thread
from paceline.drafter.methods.options import parse_options
from paceline.drafter.tree import Tree
from paceline.kernels import TreeSegment, plan_trees


class LmDrafter(Drafter):
    """The method ``lm``. All but :meth:`start` runs on one thread at a time."""

    method: ClassVar[str] = "lm"

    def __init__(self, decoder: Decoder, options: LmOptions, fit: Fit, weight_bytes: int) -> None:
        self.decoder = decoder
        self.options = options
        self.fit = fit
        self.max_nodes = min(options.max_nodes, options.drafted)
        self.max_depth = options.levels
        self.weight_bytes = weight_bytes
        self.kv = KvAccount(int(options.kv_gib * (1 << 30) / decoder.config.kv_bytes_per_token))

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LmDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "lm needs a model folder: lm:DIR")
        parsed = parse_options(LmOptions, options)
        fit = read_fit(folder)
        dtype = parsed.dtype if parsed.dtype == "auto" else getattr(torch, parsed.dtype)
        try:
            decoder = on_passing_thread(resources, Decoder.load, folder, dtype, resources.device)
        except Exception as error:  # damaged files make the libraries raise anything
            raise LoadError("UNSUPPORTED_MODEL", f"cannot load {folder}: {error}") from error
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return cls(decoder, parsed, fit, weight_bytes)

    def start(self, generation: Generation) -> LmSequence:
        return LmSequence(self, generation)

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[Tree]:
        return grow(cast(Sequence[tuple[LmSequence, Budget]], rounds), self._grow_level)

    def _grow_level(self, growing: Sequence[LmSequence]) -> None:
        """One forward pass over the frontiers of all, and one more level for each."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[TreeSegment] = []
        rows: list[int] = []
        counts: list[int] = []
        looks: list[Look] = []
        for index, sequence in enumerate(growing):
            block = sequence.block(index)
            tokens += block.tokens
            positions += block.positions
            segments += block.segments
            rows += range(len(tokens) - block.wanted, len(tokens))
            counts.append(block.wanted)
            looks += sequence.looks(len(tokens))
        device = self.decoder.device
        logits = self.decoder.forward(
            torch.tensor(tokens, device=device),
            plan_trees(segments, positions=positions, device=device),
            [sequence.seen for sequence in growing],
            logit_rows=torch.tensor(rows, device=device),
            observer=Looks(looks) if looks else None,
        ).logits
        for sequence, part in zip(growing, logits.split(counts), strict=True):
            sequence.add_level(part)
