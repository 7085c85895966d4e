"""The DSpark drafter: a block in one pass, a tree from the block by a small sequential head.

After Cheng et al., "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation", section 3. A folder without heads is DFlash. The backbone attends to the target's
hidden states at all committed positions before the anchor, or at the last ``window``. Scores
include the verifier's noise, and trees grow as in :mod:`paceline.drafter.methods.beam`; a level
costs one pass of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from paceline.decoder import load_config
from paceline.drafter.kv.options import TRANSPORTS
from paceline.drafter.methods.base import Fit, Generation, Needs, Resources
from paceline.drafter.methods.beam_drafter import BeamDrafter, required
from paceline.drafter.methods.checkpoint import load_model, read_fit, required_folder
from paceline.drafter.methods.dspark.backbone import DSparkBackbone
from paceline.drafter.methods.dspark.checkpoint import load_weights, read_dspark
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.drafter.methods.dspark.sequence import DSparkSequence
from paceline.drafter.methods.options import check_choice, parse_options
from paceline.drafter.methods.target import TargetOptions


@dataclass(frozen=True)
class DSparkOptions(TargetOptions):
    """Options of ``dspark``. By default ``depth`` is the length of the drafter's block."""

    widths: tuple[int, ...] = (4, 8)
    max_nodes: int = 16

    states: str = "auto"
    """Transport of hidden states: map (shared memory), follow (copies over gRPC), or auto: map if
    drafter and verifier share a machine and a user, otherwise follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths:
            raise ValueError("option widths is empty, expected at least one number")
        check_choice("states", self.states, TRANSPORTS)


class DSparkDrafter(BeamDrafter[DSparkSequence]):
    """The method ``dspark``."""

    method: ClassVar[str] = "dspark"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    options: DSparkOptions

    def __init__(
        self,
        backbone: DSparkBackbone,
        heads: DSparkHeads,
        options: DSparkOptions,
        fit: Fit,
        size: int,
    ) -> None:
        config = backbone.config
        depth = min(options.depth or config.levels, config.levels)
        super().__init__(config, replace(options, depth=depth), fit, size)
        self.backbone, self.heads = backbone, heads
        self.needs = Needs(
            hidden_state_layers=config.taps,
            hidden_state_window=config.window,
            hidden_state_transport=options.states,
        )

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> DSparkDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(DSparkOptions, options)
        fit = read_fit(folder)
        return load_model(folder, resources, _read, folder, fit, parsed, resources.device)

    def start(self, generation: Generation) -> DSparkSequence:
        states = required(generation.states, "dspark", "hidden states")
        return DSparkSequence(self, generation, states)

    def grow_level(self, growing: Sequence[DSparkSequence]) -> None:
        if growing[0].tree.level == 0:
            self._draft_blocks(growing)
        outputs = self.heads.forward([sequence.head_input() for sequence in growing])
        for sequence, output in zip(growing, outputs, strict=True):
            sequence.add_level(output)

    def _draft_blocks(self, growing: Sequence[DSparkSequence]) -> None:
        """Adds new hidden states to the contexts, then runs the backbone."""
        found = [(sequence.context, sequence.new_states()) for sequence in growing]
        if batch := [(context, *new) for context, new in found if new is not None]:
            self.backbone.add_states(batch)
        blocks = [(sequence.context, sequence.anchor) for sequence in growing]
        for sequence, hidden, logits in zip(growing, *self.backbone.forward(blocks), strict=True):
            sequence.set_block(hidden, logits)


def _read(folder: Path, fit: Fit, options: DSparkOptions, device: str) -> DSparkDrafter:
    target = options.target_folder
    config, dtype = read_dspark(folder, load_config(target).layers if target else 0)
    dtype = options.torch_dtype(dtype)
    embedding = options.read_embedding(folder, fit, config, dtype, device)
    weights = load_weights(folder, config, dtype, device)
    with torch.inference_mode():
        backbone = DSparkBackbone(config, weights, embedding, dtype, device)
        heads = DSparkHeads(config, weights, dtype, device)
    size = sum(tensor.nbytes for tensor in weights.values()) + embedding.private_bytes
    return DSparkDrafter(backbone, heads, options, fit, size)
