"""The DSpark backbone that drafts: blocks of many generations in one pass over their contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.drafter.methods.layers import LayerWeights
from paceline.drafter.methods.slots import WindowCache, chain_segments
from paceline.drafter.methods.target_drafter import DraftLayers
from paceline.drafter.methods.trees_there import HostPass, Passes
from paceline.kernels import Context, Program, Recorder, TreeSegment, send


class DSparkBackbone(DraftLayers):
    """The backbone. A block's keys follow the newest context; the next round overwrites them."""

    config: DSparkConfig

    def record(self, tensors: LayerWeights) -> list[Program]:
        self.cached_layers = self.context_layers = self.config.layers
        self.heads = DSparkHeads(self.config, tensors.tensors, self.dtype, self.device, self.bits)
        return [_record_context(self, tensors), _record_block(self, tensors)]

    def states_pass(self, batch: Sequence[tuple[int, WindowCache, int, Tensor]]) -> HostPass:
        """Makes room for hidden states in contexts.

        Args:
            batch: For each context its number among those of the pass, the context, the first
                position and the states from there on, ``[n, taps * hidden]``, at most a window.

        Returns:
            The pass of :meth:`write_states`.
        """
        segments: list[TreeSegment] = []
        positions: list[int] = []
        for index, context, first, states in batch:
            stop = first + len(states)
            context.reserve(stop)
            segments += chain_segments(index, first - context.base, stop - context.base)
            positions += range(first, stop)
            context.length = stop
        found = [send(each, self.device).to(self.dtype) for *_, each in batch]
        return HostPass(segments, positions, inputs=torch.cat(found) if found else None)

    def write_states(self, passes: Passes) -> None:
        """Writes the keys and values of hidden states to contexts, by the first pass."""
        plan = passes.plan(0)
        if plan is not None:
            self.run(0, None, plan, passes.caches, inputs=passes.inputs(0))

    def block_pass(
        self, blocks: Sequence[tuple[WindowCache, int, Tensor]]
    ) -> tuple[HostPass, list[Context]]:
        """Makes room for blocks after contexts.

        Args:
            blocks: For each generation its context, complete up to its anchor, the anchor's token,
                and the hidden states of the position before it, ``[1, taps * hidden]``.

        Returns:
            The pass of :meth:`draft`, and its contexts.
        """
        config, length = self.config, self.config.block
        caches = [context for context, _, _ in blocks]
        for cache in caches:
            cache.reserve(cache.length)
        starts = [cache.length - cache.base for cache in caches]
        masks = [config.mask_token] * (length - 1)
        last = range(length - config.levels, length)
        inputs = None
        if config.state_input:
            states = torch.cat([state for _, _, state in blocks for _ in range(length)])
            inputs = states.to(self.device, self.dtype)
        block = HostPass(
            [TreeSegment(index, start, None, length) for index, start in enumerate(starts)],
            [cache.length + offset for cache in caches for offset in range(length)],
            [token for _, anchor, _ in blocks for token in (anchor, *masks)],
            [first * length + offset for first in range(len(blocks)) for offset in last],
            inputs,
        )
        return block, [
            Context(cache, start + length) for cache, start in zip(caches, starts, strict=True)
        ]

    def draft(self, passes: Passes) -> tuple[Tensor, Tensor]:
        """Writes hidden states to contexts, and drafts a block after each, by the second pass.

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


def _record_context(backbone: DSparkBackbone, tensors: LayerWeights) -> Program:
    """Hidden states to the keys and values of all layers."""
    config, program = backbone.config, Recorder(tensors.heads, backbone.dtype)
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
    """Tokens of blocks to logits; the tap is the hidden state that the LM head reads."""
    config, embedding = backbone.config, backbone.embedding
    program = Recorder(tensors.heads, backbone.dtype)
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
