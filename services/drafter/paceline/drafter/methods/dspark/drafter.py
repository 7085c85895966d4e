"""The DSpark drafter: a block in one pass, a tree from the block by a small sequential head.

After Cheng et al., "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation", section 3. A folder without heads is DFlash. The backbone attends to the target's
hidden states at all committed positions before the anchor, or at the last ``window``. Scores
include the verifier's noise, and trees grow as in :mod:`paceline.drafter.methods.beam`; a level
costs one pass of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.decoder import ModelSource, load_config
from paceline.drafter.methods.base import Fit, GenerationInfo
from paceline.drafter.methods.draft_graphs import PassShape
from paceline.drafter.methods.dspark.backbone import DSparkBackbone
from paceline.drafter.methods.dspark.config import DSparkConfig, read_dspark
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.drafter.methods.dspark.module import DSparkModel
from paceline.drafter.methods.target_drafter import StateOptions, StateSequence, TargetDrafter
from paceline.drafter.methods.trees_there import (
    HostDraft,
    Passes,
    TreeShape,
    TreesThere,
)
from paceline.kernels import send
from paceline.kernels.draft import BlockModel, DraftText, NativeDraft
from paceline.kernels.executor import NativeProgram


class DSparkSequence(StateSequence):
    """One generation of ``dspark``.

    A round adds the hidden states since the last round to the context, runs the backbone once over
    the block after it, and grows a tree with the heads alone. All paths of a level share the
    backbone's hidden state of the level.
    """

    _drafter: DSparkDrafter

    def __init__(self, drafter: DSparkDrafter, generation: GenerationInfo) -> None:
        config, backbone = drafter.layers.config, drafter.layers
        super().__init__(drafter, generation, backbone.new_cache(config.block), 1)
        width = len(config.taps) * config.hidden
        self.newest = torch.empty(1, width, dtype=backbone.dtype, device=backbone.device)
        """Hidden states of the newest position in the context, ``[1, taps * hidden]``."""
        if self.draft_text is not None:
            self.draft_text.newest = self.newest.data_ptr()
        self._block: tuple[Tensor, Tensor] | None = None
        """Hidden states and logits of the block, by level."""
        self._state: Tensor | None = None

    @property
    def anchor(self) -> int:
        """Newest token of the text."""
        return self.text[-1]

    def warm(self, limit: int) -> None:
        new = self.new_states(limit)
        if new is not None:
            backbone = self._drafter.layers
            draft = HostDraft([backbone.states_pass([(0, self.cache, *new)])], [self.cache])
            backbone.write_states(Passes(draft, backbone.device))
            self.states.check()

    def new_states(self, limit: int | None = None) -> tuple[int, Tensor] | None:
        """Reads hidden states that the context lacks, of at most ``limit`` positions.

        Returns:
            The first position and the states, ``[n, taps * hidden]``; None if there are none.
        """
        end = self.readable
        begin = self.cache.next_position(end)
        if limit is not None:
            end = min(end, begin + limit)
        if begin >= end:
            return None
        first, states = self.states.read(begin, end)
        if not len(states):
            return None
        self.newest.copy_(states[-1:], non_blocking=True)
        return first, states

    def set_block(self, hidden: Tensor, logits: Tensor) -> None:
        """Sets the block that the tree grows from: hidden states ``[levels, hidden]`` and their
        logits."""
        self._block, self._state = (hidden, logits), None

    def add_level(self, heads: DSparkHeads) -> None:
        """Adds a level to the tree."""
        assert self._block is not None
        beam, parents = self.tree, self.tree.frontier
        hidden, logits = (each[beam.level, None] for each in self._block)
        tokens = [beam.tokens[node] for node in parents] if beam.level else [self.anchor]
        before = send(torch.tensor([tokens]), hidden.device)
        scores, state, logs = heads.forward(hidden, logits, before, self._state)
        beam.add_level(self.rank(scores[0]), None if logs is None else logs[0].tolist())
        if state is not None:
            self._state = state[:, [beam.parents[n] - parents.start for n in beam.frontier]]

    def fill(self, text: DraftText) -> None:
        layers, cache = self._drafter.layers, self.cache
        new = self.new_states()
        text.first = text.length = self.readable
        if new is not None:
            text.first, states = new
            self._fresh = states.to(layers.dtype).contiguous()
            text.fresh = self._fresh.data_ptr()
        cache.reserve(text.length)
        cache.length = text.length
        super().fill(text)
        text.row = layers.heads.row(self.anchor)

    def clear(self) -> None:
        self._block = self._state = None


@dataclass(frozen=True)
class DSparkOptions(StateOptions):
    """Options of ``dspark``. By default ``depth`` is the length of the drafter's block."""

    widths: tuple[int, ...] = (4, 8)
    max_nodes: int = 16


class DSparkDrafter(TargetDrafter[DSparkSequence]):
    """The method ``dspark``."""

    method: ClassVar[str] = "dspark"
    options_type, layers_type, model_type = DSparkOptions, DSparkBackbone, DSparkModel
    layers: DSparkBackbone

    def __init__(self, layers: DSparkBackbone, options: DSparkOptions, fit: Fit, size: int) -> None:
        levels = layers.config.levels
        depth = min(options.depth or levels, levels)
        super().__init__(layers, replace(options, depth=depth), fit, size)

    @staticmethod
    def read_config(folder: Path, target: ModelSource | None) -> tuple[DSparkConfig, torch.dtype]:
        return read_dspark(folder, load_config(target).layers if target else 0)

    def start(self, generation: GenerationInfo) -> DSparkSequence:
        return DSparkSequence(self, generation)

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        config, heads = self.layers.config, self.layers.heads.native()
        if heads is None:
            return None
        block = BlockModel(
            programs[0],
            length=config.block,
            levels=config.levels,
            mask=config.mask_token,
            state_input=config.state_input,
            head=heads[0],
            confidence=heads[1],
        )
        return NativeDraft(programs[1], self.layers.dtype, ids, block)

    def grow_level(self, growing: Sequence[DSparkSequence]) -> None:
        if growing[0].tree.level == 0:
            passes = Passes(self.draft_passes(growing), self.device)
            for sequence, *block in zip(growing, *self.layers.draft(passes), strict=True):
                sequence.set_block(*block)
        for sequence in growing:
            sequence.add_level(self.layers.heads)

    def use_graphs(self) -> None:
        if self.layers.config.conv is None:
            super().use_graphs()

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        config = self.layers.config
        windows = tuple((w + 1 if w else None) for w, causal in config.attention if causal)
        contexts = tuple(
            (w + config.block if w else None) for w, causal in config.attention if not causal
        )
        states = PassShape(fed, 2, inputs=len(config.taps) * config.hidden)
        inputs = states.inputs if config.state_input else 0
        block = PassShape(config.block, 1, windows, contexts, True, config.levels, inputs)
        return [states, block]

    def draft_passes(
        self, growing: Sequence[DSparkSequence], shape: TreeShape | None = None
    ) -> HostDraft:
        found = [sequence.new_states() for sequence in growing]
        caches = [sequence.cache for sequence in growing]
        states = self.layers.states_pass(
            [(n, caches[n], *new) for n, new in enumerate(found) if new is not None]
        )
        blocks = [(each.cache, each.anchor, each.newest) for each in growing]
        block, contexts = self.layers.block_pass(blocks)
        return HostDraft([states, block], caches, contexts)

    def grow_there(self, passes: Passes, trees: TreesThere) -> None:
        hidden, logits = self.layers.draft(passes)
        before = passes.tokens(1).view(len(hidden), -1)[:, :1]  # the anchors
        state: Tensor | None = None
        while trees.grows:
            level = trees.level
            scores, state, logs = self.layers.heads.forward(
                hidden[:, level], logits[:, level], before, state
            )
            trees.add_level(scores.flatten(0, 1), logs)
            before = trees.tokens[:, trees.newest]
            if state is not None:
                state = state.gather(1, trees.places[..., None].expand(-1, -1, state.shape[2]))
