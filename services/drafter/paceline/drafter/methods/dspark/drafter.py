"""The DSpark drafter: a block in one pass, a tree from the block by a small sequential head.

After Cheng et al., "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation", section 3. A folder without heads is DFlash. The backbone attends to the target's
hidden states at all committed positions before the anchor, or at the last ``window``. A level
costs one pass of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.growth.levels import (
    HostDraft,
    HostPass,
    LevelTrees,
    Passes,
    PassShape,
    TreeShape,
)
from paceline.drafter.growth.sequence import chain_blocks
from paceline.drafter.growth.target_data import StateRows
from paceline.drafter.kv.reader import StateSlice
from paceline.drafter.methods.base import Fit, GenerationInfo
from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.drafter.methods.layers import LayerWeights
from paceline.drafter.methods.options import TreeOptions
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    StateOptions,
    StateSequence,
    TargetDrafter,
    TargetOptions,
    WindowCache,
    fill_cache,
)
from paceline.kernels import Context, Program, QueryBlock
from paceline.kernels.draft import DraftBlockModel, NativeDraft
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText


class DSparkBackbone(DraftLayers):
    """The backbone. A block's keys follow the newest context; the next round overwrites them."""

    config: DSparkConfig

    def record(self, tensors: LayerWeights) -> list[Program]:
        self.cached_layers = self.context_layers = self.config.layers
        self.heads = DSparkHeads(self.config, tensors.tensors, self.dtype, self.device, self.bits)
        return [_record_context(self, tensors), _record_block(self, tensors)]

    def states_pass(self, batch: Sequence[tuple[int, WindowCache, StateSlice]]) -> HostPass:
        """Make room for hidden states in contexts: for each its number in the pass, the context,
        and the states that follow it, of at most a window. Returns the pass of
        :meth:`write_states`."""
        blocks: list[QueryBlock] = []
        positions: list[int] = []
        for index, context, states in batch:
            stop = states.first + states.count
            context.reserve(stop)
            blocks += chain_blocks(index, states.first - context.base, stop - context.base)
            positions += range(states.first, stop)
            context.length = stop
        fresh = [states for *_, states in batch]
        return HostPass(blocks, positions, inputs=StateRows(fresh, self.states) if fresh else None)

    def write_states(self, passes: Passes) -> None:
        """Write the keys and values of hidden states to contexts, by the first pass."""
        plan = passes.plan(0)
        if plan is not None:
            self.run(0, None, plan, passes.caches, inputs=passes.inputs(0))

    def block_pass(
        self, blocks: Sequence[tuple[WindowCache, int, StateSlice | None]]
    ) -> tuple[HostPass, list[Context]]:
        """Make room for blocks after contexts: for each generation its context, complete up to its
        anchor, the anchor's token, and the hidden states of the position before it, if the model
        reads them. Returns the pass of :meth:`draft`, and its contexts."""
        config, length = self.config, self.config.block
        caches = [context for context, _, _ in blocks]
        for cache in caches:
            cache.reserve(cache.length)
        starts = [cache.length - cache.base for cache in caches]
        masks = [config.mask_token] * (length - 1)
        last = range(length - config.levels, length)
        newest = [state for _, _, state in blocks if state is not None]
        inputs = StateRows(newest, self.states, length) if newest else None
        block = HostPass(
            [QueryBlock(index, start, None, length) for index, start in enumerate(starts)],
            [cache.length + offset for cache in caches for offset in range(length)],
            [token for _, anchor, _ in blocks for token in (anchor, *masks)],
            [first * length + offset for first in range(len(blocks)) for offset in last],
            inputs,
        )
        return block, [
            Context(cache, start + length) for cache, start in zip(caches, starts, strict=True)
        ]

    def draft(self, passes: Passes) -> tuple[Tensor, Tensor]:
        """Write hidden states to contexts, and draft a block after each, by the second pass.

        Returns:
            Hidden states ``[S, levels, hidden]`` of the positions that predict, in the weights'
            type, and the target's logits of them ``[S, levels, V]``, or of drafted tokens alone.
        """
        self.write_states(passes)
        plan = passes.plan(1)
        assert plan is not None
        result = self.run(
            1, passes.tokens(1), plan, passes.caches, passes.logit_rows(1),
            taps=(0,), contexts=passes.contexts, inputs=passes.inputs(1),
        )  # fmt: skip
        shape = (-1, self.config.levels)
        return result.taps[0].unflatten(0, shape), result.logits.unflatten(0, shape)

    @property
    def captured(self) -> bool:  # type: ignore[override]
        return self.config.conv is None

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        config, heads = self.config, self.heads.native()
        if heads is None:
            return None
        block = DraftBlockModel(
            programs[0],
            length=config.block,
            levels=config.levels,
            mask=config.mask_token,
            state_input=config.state_input,
            head=heads[0],
            confidence=heads[1],
        )
        return NativeDraft(programs[1], self.dtype, ids, block)

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        config = self.config
        windows = tuple((w + 1 if w else None) for w, causal in config.attention if causal)
        contexts = tuple(
            (w + config.block if w else None) for w, causal in config.attention if not causal
        )
        states = PassShape(fed, 2, inputs=len(config.taps) * config.hidden, taps=len(config.taps))
        block = PassShape(config.block, 1, windows, contexts, True, config.levels)
        if config.state_input:
            block = replace(block, inputs=states.inputs, taps=states.taps)
        return [states, block]

    def draft_passes(self, batch: Sequence[DSparkSequence], shape: TreeShape) -> HostDraft:
        fresh = [sequence.new_states() for sequence in batch]
        caches = [sequence.cache for sequence in batch]
        states = self.states_pass(
            [(n, caches[n], new) for n, new in enumerate(fresh) if new is not None]
        )
        block, contexts = self.block_pass(
            [(sequence.cache, sequence.tokens[-1], sequence.newest_states()) for sequence in batch]
        )
        return HostDraft([states, block], caches, contexts)

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        hidden, logits = self.draft(passes)
        before = passes.tokens(1).view(len(hidden), -1)[:, :1]  # the anchors
        while trees.grows:
            level = trees.level
            scores, logs = self.heads.forward(hidden[:, level], logits[:, level], before, level)
            trees.add_level(scores.flatten(0, 1), logs)
            before = trees.tokens[:, trees.frontier]


def _record_context(backbone: DSparkBackbone, tensors: LayerWeights) -> Program:
    """Record the program from hidden states to the keys and values of all layers."""
    config, program = backbone.config, tensors.recorder(backbone.dtype)
    states = program.input(len(config.taps) * config.hidden)
    projected = program.multiply(states, tensors.matrix("fc"))
    inputs = program.add_norm(projected, 0, tensors.norm("hidden_norm"))
    for index in range(config.layers):
        base = f"layers.{index}."
        names = (f"{base}self_attn.{name}_proj" for name in "kv")
        pair = program.multiply(inputs, tensors.matrix(*names))
        program.write(pair, tensors.head_norms(base), index)
    return program.finish()


def _record_block(backbone: DSparkBackbone, tensors: LayerWeights) -> Program:
    """Record the program from tokens of blocks to logits; its tap is what the LM head reads."""
    config, embedding = backbone.config, backbone.embedding
    program = tensors.recorder(backbone.dtype)
    x, delta = program.embed(embedding.embedding, config.embedding_factor), 0
    if config.state_input:
        states = program.input(len(config.taps) * config.hidden)
        delta = program.multiply(states, tensors.matrix("fc"))

    def convolve(inputs: int, kernel: int, name: str, which: int) -> int:
        base = tensors.tensors[f"{name}.base_kernel"][which].float()
        return program.convolve(inputs, kernel, base, which)

    for index, (window, causal) in enumerate(config.attention):
        base, attention = f"layers.{index}.", f"layers.{index}.self_attn."
        inputs, conv = program.add_norm(x, delta, tensors.norm(f"{base}input_layernorm")), 0
        if config.conv is not None:
            conv = program.multiply(
                inputs, tensors.matrix(f"{base}attention_conv.kernel_projection")
            )
            inputs = convolve(inputs, conv, f"{base}attention_conv", 0)
        heads = program.multiply(inputs, tensors.matrix(*(f"{attention}{n}_proj" for n in "qkv")))
        q = program.rotate(heads, tensors.head_norms(base), index)
        if causal:
            attended = program.attend(q, index, window + 1 if window else None)
        else:
            attended = program.attend_context(q, index, window + config.block if window else None)
        delta = program.multiply(attended, tensors.matrix(f"{attention}o_proj"))
        if config.conv is None:
            delta = tensors.feed_forward(program, x, delta, base)
            continue
        delta = convolve(delta, conv, f"{base}attention_conv", 1)
        inputs = program.add_norm(x, delta, tensors.norm(f"{base}post_attention_layernorm"))
        conv = program.multiply(inputs, tensors.matrix(f"{base}mlp_conv.kernel_projection"))
        delta = tensors.gated(program, convolve(inputs, conv, f"{base}mlp_conv", 0), base)
        delta = convolve(delta, conv, f"{base}mlp_conv", 1)
    program.add(x, delta)
    x = program.select(x)
    norm = tensors.norm("norm")
    hidden = program.add_norm(x, 0, norm)
    program.tap(hidden, 0)
    if config.logit_factor != 1:
        hidden = program.add_norm(x, 0, replace(norm, weight=norm.weight * config.logit_factor))
    logits = program.multiply(hidden, embedding.head)
    if config.logit_cap:
        program.cap_logits(logits, config.logit_cap)
    return program.finish()


class DSparkSequence(StateSequence):
    """A generation that ``dspark`` drafts for.

    A round adds the hidden states since the last round to the context, runs the backbone once over
    the block after it, and grows a tree with the heads alone. All paths of a level share the
    backbone's hidden state of the level.
    """

    def __init__(self, drafter: DSparkDrafter, generation: GenerationInfo) -> None:
        backbone, config = drafter.layers, drafter.layers.config
        super().__init__(drafter, generation, config.block, 1)
        self._backbone = backbone
        width = len(config.taps) * config.hidden
        # Hidden states of the newest position in the context, `[1, taps * hidden]`.
        self.newest_row = torch.empty(1, width, dtype=backbone.dtype, device=backbone.device)

    def warm(self, limit: int) -> None:
        new = self.new_states(limit)
        if new is not None:
            backbone = self._backbone
            draft = HostDraft([backbone.states_pass([(0, self.cache, new)])], [self.cache])
            backbone.write_states(Passes(draft, backbone.device))
            self.states.settle()

    def new_states(self, limit: int | None = None) -> StateSlice | None:
        """Return hidden states that the context lacks, of at most ``limit`` positions; None if
        there are none."""
        end = self.readable
        begin = self.cache.next_position(end)
        if limit is not None:
            end = min(end, begin + limit)
        if begin >= end:
            return None
        states = self.states.slice(begin, end)
        if not states.count:
            return None
        # States in pages can be read again, by a draft that is not native.
        if not self.states.paged or self.native is not None:
            self.newest_row.copy_(states.read()[-1:], non_blocking=True)
        return states

    def newest_states(self) -> StateSlice | None:
        """Return the hidden states of the position before the anchor; None if they are not
        read."""
        if not self._backbone.config.state_input:
            return None
        last = self.length - 2
        if self.states.paged:
            return self.states.slice(last, last + 1)
        return StateSlice(last, self.newest_row)

    def fill(self, text: DraftText) -> None:
        new = self.new_states()
        text.first = text.length = self.readable
        if new is not None:
            text.first = new.first
            self._fresh = new.read().to(self._backbone.dtype).contiguous()
            text.fresh = self._fresh.data_ptr()
        self.cache.reserve(text.length)
        fill_cache(text, self.cache, self.tokens[-1])
        text.newest = self.newest_row.data_ptr()
        text.row = self._backbone.heads.row(self.tokens[-1])

    def keep(self) -> None:
        self.cache.length = self.readable


@dataclass(frozen=True)
class DSparkOptions(TreeOptions, TargetOptions, StateOptions):
    """Options of ``dspark``. By default ``depth`` is the length of the drafter's block."""

    widths: tuple[int, ...] = (4, 8)
    max_nodes: int = 16
    formats: ClassVar[tuple[str, ...]] = FORMATS

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        self.check(self.widths)


class DSparkDrafter(TargetDrafter):
    method: ClassVar[str] = "dspark"
    label: ClassVar[str] = "DSpark"
    recipe: ClassVar[str] = "paceline.train.recipes.dspark:DSparkRecipe"
    cpu_tree: ClassVar[Mapping[str, str]] = {"widths": "3,2,1", "max_nodes": "6"}
    cpu_weights: ClassVar[str] = "int4"
    option_type = DSparkOptions
    shape_type = DSparkConfig
    layer_type = DSparkBackbone
    sequence_type = DSparkSequence
    layers: DSparkBackbone

    def __init__(self, layers: DSparkBackbone, options: DSparkOptions, fit: Fit, size: int) -> None:
        levels = layers.config.levels
        depth = min(options.depth or levels, levels)
        super().__init__(layers, replace(options, depth=depth), fit, size)
