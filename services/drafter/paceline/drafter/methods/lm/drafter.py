"""A small language model with the target's tokenizer as a tree drafter.

Trees grow level by level (:mod:`paceline.drafter.methods.beam`), ranked with the verifier's own
noise. The drafter keeps its own KV: accepted nodes stay in the slots where a round computed them,
up to compaction, and rejected ones are overwritten. Rounds that wait together share every forward
pass. Under a KV budget (option ``context``) a round attends to a copy of selected positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from paceline.decoder import Decoder
from paceline.drafter.methods.base import Fit, Generation, Resources
from paceline.drafter.methods.beam import BeamOptions, check_context
from paceline.drafter.methods.beam_drafter import BeamDrafter
from paceline.drafter.methods.checkpoint import load_model, read_fit, required_folder, weight_bytes
from paceline.drafter.methods.decoder_sequence import forward_blocks
from paceline.drafter.methods.lm.selection import POLICIES, ScoreObserver
from paceline.drafter.methods.lm.sequence import LmSequence
from paceline.drafter.methods.options import check_choice, check_range, parse_options


@dataclass(frozen=True)
class LmOptions(BeamOptions):
    """Options of ``lm``."""

    widths: tuple[int, ...] = (4, 4, 4, 4)
    max_nodes: int = 16
    min_survival: float = 0.03

    context: int = 0
    """KV budget: most positions of the text that a round attends to; 0: all. The tokens since the
    last round and the tree are not counted. Unit: tokens."""

    kv_policy: str = "streaming"
    """Positions within the budget: streaming (the first and the newest) or chunk_topk (the newest,
    and chunks of 8 by cumulative attention)."""

    kv_gib: float = 4.0
    """Most memory for the KV of all sequences. A sequence that does not fit drafts no more.
    Unit: GiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_drafted()
        check_range("kv_gib", self.kv_gib, 0.001, 1 << 20)
        check_context(self.context)
        check_choice("kv_policy", self.kv_policy, POLICIES)


class LmDrafter(BeamDrafter[LmSequence]):
    """The method ``lm``."""

    method: ClassVar[str] = "lm"
    options: LmOptions

    def __init__(self, decoder: Decoder, options: LmOptions, fit: Fit, size: int) -> None:
        super().__init__(decoder.config, options, fit, size)
        self.decoder = decoder
        self.kv_limit = int(options.kv_gib * (1 << 30) / decoder.config.kv_bytes_per_token)
        """Most KV slots of all sequences."""
        self.kv_slots = 0
        """KV slots that they occupy."""

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LmDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(LmOptions, options)
        fit = read_fit(folder)
        dtype = parsed.torch_dtype("auto")
        decoder = load_model(folder, resources, Decoder.load, folder, dtype, resources.device)
        return cls(decoder, parsed, fit, weight_bytes(folder))

    def start(self, generation: Generation) -> LmSequence:
        return LmSequence(self, generation)

    def grow_level(self, growing: Sequence[LmSequence]) -> None:
        blocks = [sequence.block(index) for index, sequence in enumerate(growing)]
        stops = accumulate(len(block.tokens) for block in blocks)
        observed = [
            rows
            for sequence, stop in zip(growing, stops, strict=True)
            for rows in sequence.observed_rows(stop)
        ]
        logits = forward_blocks(
            self.decoder,
            blocks,
            [sequence.round_cache for sequence in growing],
            ScoreObserver(observed) if observed else None,
        )
        for sequence, part in zip(growing, logits, strict=True):
            sequence.add_level(part)
