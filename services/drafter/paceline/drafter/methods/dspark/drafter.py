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
from torch import Tensor

from paceline.decoder import load_config
from paceline.drafter.kv.reader import StateReader
from paceline.drafter.methods.base import (
    Fit,
    GenerationInfo,
    Needs,
    Resources,
    parse_options,
)
from paceline.drafter.methods.beam_drafter import BeamDrafter, BeamSequence, required
from paceline.drafter.methods.checkpoint import (
    StateOptions,
    load_model,
    load_weights,
    read_fit,
    required_folder,
)
from paceline.drafter.methods.draft_graphs import GraphModel, PassShape, graphs_work_on
from paceline.drafter.methods.dspark.backbone import DSparkBackbone
from paceline.drafter.methods.dspark.config import read_dspark
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.drafter.methods.dspark.module import DSparkModel
from paceline.drafter.methods.trees_there import (
    HostDraft,
    Passes,
    PassesThere,
    TreeShape,
    TreesThere,
)
from paceline.kernels import send
from paceline.kernels.draft import BlockModel, DraftText, NativeDraft


class DSparkSequence(BeamSequence):
    """One generation of ``dspark``.

    A round adds the hidden states since the last round to the context, runs the backbone once over
    the block after it, and grows a tree with the heads alone. All paths of a level share the
    backbone's hidden state of the level.
    """

    _drafter: DSparkDrafter

    def __init__(
        self, drafter: DSparkDrafter, generation: GenerationInfo, states: StateReader
    ) -> None:
        super().__init__(drafter, generation, 1)
        self.states = states
        backbone = drafter.backbone
        self.context = backbone.new_context()
        width = len(backbone.config.taps) * backbone.config.hidden
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

    @property
    def backlog(self) -> int:
        return max(0, self._readable - self.context.next_position(self._readable))

    def warm(self, limit: int) -> None:
        new = self.new_states(limit)
        if new is not None:
            backbone = self._drafter.backbone
            draft = HostDraft([backbone.states_pass([(0, self.context, *new)])], [self.context])
            backbone.write_states(PassesThere(draft, backbone.device), 0)
            self.states.check()

    def new_states(self, limit: int | None = None) -> tuple[int, Tensor] | None:
        """Reads hidden states that the context lacks, of at most ``limit`` positions.

        Returns:
            The first position and the states, ``[n, taps * hidden]``; None if there are none.
        """
        end = self._readable
        begin = self.context.next_position(end)
        if limit is not None:
            end = min(end, begin + limit)
        if begin >= end:
            return None
        first, states = self.states.read(begin, end)
        if not len(states):
            return None
        self.newest.copy_(states[-1:], non_blocking=True)
        return first, states

    def prepare(self) -> bool:
        """Returns False unless the hidden states of all positions before the anchor are there."""
        self.states.check()
        self._state = None
        return self._readable >= self.length - 1 and self.length >= 2

    def set_block(self, hidden: Tensor, logits: Tensor) -> None:
        """Sets the block that the tree grows from: hidden states ``[levels, hidden]`` and their
        logits."""
        self._block = hidden, logits

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
        drafter, context = self._drafter, self.context
        new = self.new_states()
        text.first = text.length = self._readable
        if new is not None:
            text.first, states = new
            self._fresh = states.to(drafter.backbone.dtype).contiguous()
            text.fresh = self._fresh.data_ptr()
        context.reserve(text.length)
        context.length = text.length
        assert context.table is not None
        text.context, text.base = context.table.address, context.base
        text.anchor, text.row = self.anchor, drafter.heads.row(self.anchor)

    def finish(self) -> None:
        self._clear_block()
        self.states.check()

    def close(self) -> None:
        super().close()
        self._clear_block()

    def _clear_block(self) -> None:
        self._block = self._state = None

    @property
    def _readable(self) -> int:
        """Positions below this are read: committed ones, and none beyond this text's anchor."""
        return min(self.states.committed, self.length - 1)


@dataclass(frozen=True)
class DSparkOptions(StateOptions):
    """Options of ``dspark``. By default ``depth`` is the length of the drafter's block."""

    widths: tuple[int, ...] = (4, 8)
    max_nodes: int = 16


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
        drafted_tokens: Tensor | None,
    ) -> None:
        config = backbone.config
        depth = min(options.depth or config.levels, config.levels)
        super().__init__(config, replace(options, depth=depth), fit, size)
        self.backbone, self.heads = backbone, heads
        self.set_device(backbone.device, drafted_tokens)
        self.native, self.rope = self._native(), backbone.rope
        if graphs_work_on(self.device) and config.conv is None:
            self.use_graphs(self.graph_model())
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

    def start(self, generation: GenerationInfo) -> DSparkSequence:
        states = required(generation.states, "dspark", "hidden states")
        return DSparkSequence(self, generation, states)

    def _native(self) -> NativeDraft | None:
        programs, heads = self.backbone.native, self.heads.native()
        if programs is None or heads is None:
            return None
        config, tokens = self.backbone.config, self.drafted_tokens
        block = BlockModel(
            programs[0],
            length=config.block,
            levels=config.levels,
            mask=config.mask_token,
            state_input=config.state_input,
            head=heads[0],
            confidence=heads[1],
        )
        ids = torch.arange(config.vocab_size) if tokens is None else tokens
        return NativeDraft(programs[1], self.backbone.dtype, ids, block)

    def grow_level(self, growing: Sequence[DSparkSequence]) -> None:
        if growing[0].tree.level == 0:
            passes = PassesThere(self.draft_passes(growing), self.device)
            self.backbone.write_states(passes, 0)
            for sequence, *block in zip(growing, *self.backbone.run_blocks(passes, 1), strict=True):
                sequence.set_block(*block)
        for sequence in growing:
            sequence.add_level(self.heads)

    def graph_model(self) -> GraphModel:
        """Returns what graphs need."""
        config, width = self.backbone.config, len(self.backbone.config.taps)
        windows = tuple((w + 1 if w else None) for w, causal in config.attention if causal)
        contexts = tuple(
            (w + config.block if w else None) for w, causal in config.attention if not causal
        )

        def passes(fed: int, shape: TreeShape) -> list[PassShape]:
            states = PassShape(fed, 2, inputs=width * config.hidden)
            inputs = states.inputs if config.state_input else 0
            return [
                states,
                PassShape(config.block, 1, windows, contexts, True, config.levels, inputs),
            ]

        longest = config.max_position + config.block
        return GraphModel(
            config, config.layers, config.layers, self.backbone.dtype, longest,
            self.drafted_there, passes, self.grow_there,
        )  # fmt: skip

    def draft_passes(
        self, growing: Sequence[DSparkSequence], shape: TreeShape | None = None
    ) -> HostDraft:
        found = [sequence.new_states() for sequence in growing]
        caches = [sequence.context for sequence in growing]
        states = self.backbone.states_pass(
            [(n, caches[n], *new) for n, new in enumerate(found) if new is not None]
        )
        blocks = [(each.context, each.anchor, each.newest) for each in growing]
        block, contexts = self.backbone.block_pass(blocks)
        return HostDraft([states, block], caches, contexts)

    def grow_there(self, passes: Passes, trees: TreesThere) -> None:
        self.backbone.write_states(passes, 0)
        hidden, logits = self.backbone.run_blocks(passes, 1)
        before = passes.tokens(1).view(len(hidden), -1)[:, :1]  # the anchors
        state: Tensor | None = None
        while trees.grows:
            level = trees.level
            scores, state, logs = self.heads.forward(
                hidden[:, level], logits[:, level], before, state
            )
            trees.add_level(scores.flatten(0, 1), logs)
            before = trees.tokens[:, trees.newest]
            if state is not None:
                state = state.gather(1, trees.places[..., None].expand(-1, -1, state.shape[2]))


def _read(folder: Path, fit: Fit, options: DSparkOptions, device: str) -> DSparkDrafter:
    target = options.open_target()
    config, dtype = read_dspark(folder, load_config(target).layers if target else 0)
    dtype = options.torch_dtype(dtype)
    embedding, fit = options.read_embedding(folder, fit, config, dtype, device)
    weights = load_weights(folder, config, DSparkModel, dtype, device)
    bits = options.bits(folder)
    with torch.inference_mode():
        backbone = DSparkBackbone(config, weights, embedding, dtype, device, bits)
        heads = DSparkHeads(config, weights, dtype, device, bits)
    size = sum(tensor.nbytes for tensor in weights.values()) + embedding.private_bytes
    drafter = DSparkDrafter(backbone, heads, options, fit, size, embedding.tokens)
    drafter.warm_up()
    return drafter
