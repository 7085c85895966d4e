"""The packed decoder: one forward pass over the query blocks of many sequences.

The residual stream, norms and RoPE are float32 for bfloat16 weights too. This is closer to the
float32 model, and the compiled kernels compute in float32 in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.decoder.cache import KVCacheView
from paceline.decoder.config import DecoderConfig
from paceline.decoder.linear import Linear, pad_rows
from paceline.decoder.packed import PackedWeights
from paceline.decoder.quantised import Weight, fuse, plain
from paceline.decoder.rope import Rope
from paceline.decoder.sources import ModelSource, open_model
from paceline.decoder.weights import take
from paceline.kernels import Norm, Plane, Probe, TreePlan, row_kernels, tree_attention


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward pass.

    Attributes:
        logits: ``[R, V]`` in the model's type, for the requested rows.
        taps: Per tapped layer, its output ``[M, hidden]`` in the model's type.
    """

    logits: Tensor
    taps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None  # of a query head, of a key head
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    window: int | None


_MATRICES = ("qkv", "out", "gate_up", "down")


class AttentionObserver(Protocol):
    """Receives attention scores of a forward pass, without an effect on the pass."""

    def probes(self, layer: int) -> Sequence[Probe]:
        """Scores to record in a layer, 0 for the first."""
        ...

    def attended(self, layer: int, q: Tensor) -> None:
        """Called after the attention of a layer, with its queries after RoPE, ``[M, Hq, D]``."""
        ...


class Decoder:
    """A Llama, Mistral, Qwen2 or Qwen3 language model over packed query blocks.

    On the CPU, if :func:`check_batch_invariance` holds, the bits of a token's logits depend neither
    on the rest of the batch nor on whether its ancestors are committed or nodes of the tree. Safe
    to call from several threads that use different caches.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        device: torch.device | str,
        shared: PackedWeights | None = None,
    ) -> None:
        """Build from tensors by their Hugging Face names; see :meth:`load`."""
        self.config = config
        self.device = torch.device(device)
        self._shared = shared  # keeps the memory that weights point into

        def head() -> Weight:
            if config.tied:
                return embedding
            return take(weights, "lm_head.weight", (config.vocab_size, config.hidden))

        self._norm = _norm(config, weights, "model.norm", config.hidden)
        if shared is None:
            embedding = take(
                weights, "model.embed_tokens.weight", (config.vocab_size, config.hidden)
            )
            self._embedding = plain(embedding, config.dtype)
        else:
            self._embedding = shared.tensor("embedding")
        self._head = Linear(head() if shared is None else shared.tensor("head"))
        self._layers = [_layer(config, weights, index, shared) for index in range(config.layers)]
        self._rope = Rope(config, device)
        self._rows = row_kernels(device)
        self._scale = config.head_dim**-0.5

    @staticmethod
    def load(
        source: str | Path | ModelSource,
        weights: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        shared: PackedWeights | None = None,
    ) -> Decoder:
        """Load a Hugging Face folder with safetensors weights, or a GGUF file.

        Args:
            source: The folder or file.
            weights: float32, bfloat16, int8, int4, or "auto" for the stored format (bfloat16 for
                float16). int8 and int4 quantise in blocks of 32.
            device: Where to run.
            shared: The ``large_tensors`` that a decoder of the same model and format has published,
                mapped instead of loaded. None: all tensors are loaded.

        Raises:
            UnsupportedModelError: The model needs a feature that the decoder does not support, or
                a file is damaged.
            FileNotFoundError: There is no such file, or the folder has no config.json.
        """
        found = source if isinstance(source, ModelSource) else open_model(source)
        config = found.config(weights)
        with torch.inference_mode():
            return Decoder(config, found.weights(config, device), device, shared)

    def large_tensors(self) -> dict[str, Tensor]:
        """Embedding and matrices by name, packed as in memory; no norms and biases."""
        found = {"embedding": self._embedding.contiguous(), "head": self._head.weight}
        for index, layer in enumerate(self._layers):
            for name in _MATRICES:
                found[f"layers.{index}.{name}"] = getattr(layer, name).weight
        return found

    @property
    def embedding(self) -> Tensor:
        """Token embedding ``[V, hidden]``, shared with drafters; must not be changed."""
        return self._embedding

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        *,
        logit_rows: Tensor | None,
        taps: Sequence[int] = (),
        observer: AttentionObserver | None = None,
    ) -> ForwardResult:
        """Run packed query blocks and write their keys and values into the caches.

        Args:
            tokens: Token ids, int64 ``[M]``, packed as in the plan.
            plan: Query blocks; ``segment.sequence`` indexes ``caches``.
            caches: One per sequence, with room up to ``segment.stop``.
            logit_rows: Rows to compute logits for, int64 ``[R]``; None for all.
            taps: Layers whose outputs to return, 0 for the first.
            observer: Receives attention scores, if any.

        Returns:
            Logits and taps. The caller commits the caches.

        Raises:
            ValueError: Tokens and plan differ in length.
        """
        if tokens.shape != (plan.rows,):
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, plan has {plan.rows} rows")
        table = self._rope.table(plan.longest)
        x = self._embedding[tokens].float()
        if self._head.packed:  # once here, not in every layer
            x = pad_rows(x)
        tapped: dict[int, Tensor] = {}
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            inputs = self._rows.add_norm(x, delta, layer.attention_norm, self.config.dtype)
            if index - 1 in taps:
                tapped[index - 1] = x[: plan.rows].to(self.config.dtype, copy=True)
            attended = self._attend(layer, index, inputs, plan, caches, table, observer)
            inputs = self._rows.add_norm(x, attended, layer.mlp_norm, self.config.dtype)
            delta = layer.down(self._rows.gate(layer.gate_up(inputs)))
        if delta is not None:
            x += delta
        x = x[: plan.rows]
        if len(self._layers) - 1 in taps:
            tapped[len(self._layers) - 1] = x.to(self.config.dtype, copy=True)
        if logit_rows is not None:
            x = x[logit_rows]
        hidden = self._rows.add_norm(x, None, self._norm, self.config.dtype)
        return ForwardResult(self._head(hidden), tuple(tapped[i] for i in taps))

    def linears(self) -> list[Linear]:
        """One linear layer of every shape: those of the first layer, and the LM head."""
        first = self._layers[0]
        return [first.qkv, first.out, first.gate_up, first.down, self._head]

    def with_layers(self, indices: Sequence[int]) -> Decoder:
        """A decoder over some of the layers, with the same weights; its caches have as many."""
        windows = tuple(self.config.windows[index] for index in indices)
        part = copy(self)
        part.config = replace(self.config, layers=len(windows), windows=windows)
        part._layers = [self._layers[index] for index in indices]
        return part

    def head(self, hidden: Tensor) -> Tensor:
        """LM head without the final norm: ``[R, hidden]`` to ``[R, V]``."""
        return self._head(hidden)

    def _attend(
        self,
        layer: _Layer,
        index: int,
        inputs: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        table: Tensor,
        observer: AttentionObserver | None,
    ) -> Tensor:
        """Attention of a layer: writes keys and values; returns its output ``[rows, hidden]``."""
        keys: list[Plane] = []
        values: list[Plane] = []
        for cache in caches:
            key, value = cache.layer(index)
            keys.append(key)
            values.append(value)
        heads = layer.qkv(inputs)
        q = self._rows.rotate(heads, layer.head_norms, table, plan, keys, values)
        attended = inputs.new_zeros(inputs.shape[0], layer.out.in_features)
        out = attended[: plan.rows].view(q.shape)
        probes = () if observer is None else observer.probes(index)
        tree_attention(
            q, keys, values, plan, scale=self._scale, window=layer.window, out=out, probes=probes
        )
        if observer is not None:
            observer.attended(index, q)
        return layer.out(attended)


def _norm(config: DecoderConfig, weights: Mapping[str, Weight], name: str, width: int) -> Norm:
    return Norm(plain(take(weights, f"{name}.weight", (width,)), torch.float32), config.norm_eps)


def _layer(
    config: DecoderConfig, weights: Mapping[str, Weight], index: int, shared: PackedWeights | None
) -> _Layer:
    base = f"model.layers.{index}."
    dim = config.head_dim
    q, kv, wide, hidden = (
        config.q_heads * dim, config.kv_heads * dim, config.intermediate, config.hidden
    )  # fmt: skip

    def fused(
        matrix: str, names: Sequence[str], outs: Sequence[int], ins: int, bias: bool
    ) -> Linear:
        def parts(kind: str, *tail: int) -> Weight:
            each = zip(names, outs, strict=True)
            return fuse([take(weights, f"{base}{n}.{kind}", (o, *tail)) for n, o in each])

        if shared is not None:
            weight: Weight = shared.tensor(f"layers.{index}.{matrix}")
        else:
            weight = parts("weight", ins)
        return Linear(weight, plain(parts("bias"), torch.float32) if bias else None)

    def norm(name: str, width: int) -> Norm:
        return _norm(config, weights, base + name, width)

    head_norms = None
    if config.qk_norm:
        head_norms = (norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim))
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=fused("qkv", attention, (q, kv, kv), hidden, config.qkv_bias),
        head_norms=head_norms,
        out=fused("out", ["self_attn.o_proj"], (hidden,), q, config.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=fused(
            "gate_up", ["mlp.gate_proj", "mlp.up_proj"], (wide, wide), hidden, config.mlp_bias
        ),
        down=fused("down", ["mlp.down_proj"], (hidden,), wide, config.mlp_bias),
        window=config.windows[index],
    )
