"""The LongSpec layer that drafts: tokens of many generations in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafter.methods.layers import LayerWeights
from paceline.drafter.methods.longspec.config import LongSpecConfig
from paceline.drafter.methods.target_drafter import DraftLayers
from paceline.kernels import Context, LayerTable, Program, Recorder


class TargetKv:
    """The target's KV that rounds of one generation read; a ``KVCacheView`` of one layer."""

    def __init__(self, config: LongSpecConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (2, config.kv_heads, 0, config.head_dim)
        self._copies = torch.empty(self._shape, dtype=dtype, device=device)

    def context(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Context:
        """Takes keys and values from :meth:`KvReader.parts`.

        They are copied if there are several parts, or of another type or device than the layer.
        """
        if not parts:  # a key with value 0 stands for nothing
            keys, values = self._reserve(1).zero_()
            parts = [(keys, values)]
        first, own = parts[0][0], self._copies
        if len(parts) > 1 or (first.dtype, first.device) != (own.dtype, own.device):
            parts = [self._copy(parts)]
        (self._planes,) = parts
        self.table = LayerTable.of([self._planes])
        return Context(self, self._planes[0].shape[1])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each ``[Hkv, n, D]``."""
        return self._planes

    def _copy(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        counts = [keys.shape[1] for keys, _ in parts]
        keys, values = self._reserve(sum(counts))
        for plane, each in zip((keys, values), zip(*parts, strict=True), strict=True):
            for to, part in zip(plane.split(counts, dim=1), each, strict=True):
                to.copy_(part)
        return keys, values

    def _reserve(self, slots: int) -> Tensor:
        """Memory of this object, ``[2, Hkv, slots, D]``."""
        if self._copies.shape[2] < slots:
            two, heads, _, dim = self._shape
            with torch.inference_mode(False):
                self._copies = self._copies.new_empty(two, heads, slots, dim)
        return self._copies[:, :, :slots]


class LongSpecLayer(DraftLayers):
    """The layer.

    A tree's nodes follow the text's slots (LongSpec, appendix D). Keys and values of self-attention
    depend on token and position alone, because the layer begins with it. So a text is prefilled
    with one small product per token.
    """

    config: LongSpecConfig
    context_layers = 1

    def record(self, tensors: LayerWeights) -> list[Program]:
        return [_record(self, tensors, outputs=outputs) for outputs in (False, True)]


def _record(layer: LongSpecLayer, tensors: LayerWeights, *, outputs: bool) -> Program:
    """Tokens to logits; without ``outputs`` to keys and values alone."""
    config, embedding, base = layer.config, layer.embedding, "layers.0."
    program = Recorder(tensors.heads, layer.dtype)
    x = program.embed(embedding.embedding)
    inputs = program.add_norm(x, 0, tensors.norm(f"{base}input_layernorm"))
    qkv = tensors.matrix(*(f"{base}self_attn.{name}_proj" for name in "qkv"))
    q = program.rotate(program.multiply(inputs, qkv), None, 0)
    if not outputs:
        return program.finish()
    attended = program.attend(q, 0, config.window)
    delta = program.multiply(attended, tensors.matrix(f"{base}self_attn.o_proj"))
    inputs = program.add_norm(x, delta, tensors.norm(f"{base}cross_layernorm"))
    q = program.multiply(inputs, tensors.matrix(f"{base}cross_attn.q_proj"))
    attended = program.attend_context(program.rotate_queries(q), 0, None)
    delta = program.multiply(attended, tensors.matrix(f"{base}cross_attn.o_proj"))
    program.add(x, tensors.feed_forward(program, x, delta, base))
    x = program.select(x)
    last = program.add_norm(x, 0, tensors.norm("norm")) if config.final_norm else x
    program.multiply(last, embedding.head)
    return program.finish()
