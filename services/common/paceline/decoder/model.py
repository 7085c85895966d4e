"""The packed decoder: one forward pass over the query blocks of many sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.decoder.cache import KVCacheView
from paceline.decoder.config import DecoderConfig, load_config
from paceline.decoder.linear import Linear
from paceline.decoder.norm import RmsNorm
from paceline.decoder.rope import Rope, rotate
from paceline.decoder.weights import Checkpoint, take
from paceline.kernels import TreePlan, tree_attention


@dataclass(frozen=True)
class ForwardResult:
    """What a forward pass gives.

    Attributes:
        logits: ``[R, V]`` in the model's type, for the requested rows.
        taps: Per tapped layer, its output ``[M, hidden]`` in the model's type.
    """

    logits: Tensor
    taps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Layer:
    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """A Llama, Mistral, Qwen2 or Qwen3 language model over packed query blocks.

    On the CPU the logits of a token have the same bits whatever else is in the batch, and whether
    its ancestors are committed or nodes of the tree (see :func:`is_batch_invariant`). Safe to call
    from several threads as long as no two of them use one cache.
    """

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        """Build from tensors by their Hugging Face names; see :meth:`load`."""
        self.config = config
        self.device = torch.device(device)
        self._embedding = take(
            weights, "model.embed_tokens.weight", (config.vocab_size, config.hidden)
        )
        norm = take(weights, "model.norm.weight", (config.hidden,))
        self._norm = RmsNorm(norm, config.norm_eps, config.dtype)
        head = self._embedding
        if not config.tied:
            head = take(weights, "lm_head.weight", (config.vocab_size, config.hidden))
        self._head = Linear(head)
        self._layers = [_layer(config, weights, index) for index in range(config.layers)]
        self._rope = Rope(config, device)
        self._scale = config.head_dim**-0.5

    @staticmethod
    def load(
        folder: str | Path,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
    ) -> Decoder:
        """Load a Hugging Face folder with safetensors weights.

        Args:
            folder: The model folder.
            dtype: float32, bfloat16, or "auto" for what the folder names (bfloat16 for
                float16).
            device: Where to run.

        Raises:
            UnsupportedModelError: The model needs something the decoder does not do.
            FileNotFoundError: There is no config.json.
        """
        config = load_config(folder, dtype)
        with torch.inference_mode():
            return Decoder(config, Checkpoint(folder, config.dtype, device), device)

    @property
    def embedding(self) -> Tensor:
        """Token embedding ``[V, hidden]``, for drafters that share it; not to be changed."""
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
    ) -> ForwardResult:
        """Run packed query blocks and write their keys and values into the caches.

        Args:
            tokens: Token ids, int64 ``[M]``, packed as the plan says.
            plan: Query blocks; ``segment.sequence`` indexes ``caches``.
            caches: One per sequence, with room up to ``segment.stop``.
            logit_rows: Rows to make logits for, int64 ``[R]``; None for all.
            taps: Layers whose outputs to return, 0 for the first.

        Returns:
            Logits and taps. The caller commits the caches.

        Raises:
            ValueError: Tokens and plan differ in length.
        """
        if tokens.shape != (plan.rows,):
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, plan has {plan.rows} rows")
        factors = self._rope.rows(plan.positions, plan.longest)
        x = self._embedding[tokens].float()
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            self._attend(layer, index, x, plan, caches, factors)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x += layer.down(silu(gate).mul_(up))
            if index in taps:
                tapped[index] = x.to(self.config.dtype, copy=True)
        if logit_rows is not None:
            x = x[logit_rows]
        return ForwardResult(self._head(self._norm(x)), tuple(tapped[i] for i in taps))

    def with_layers(self, indices: Sequence[int]) -> Decoder:
        """A decoder over some of the layers, sharing the weights; caches are as deep as it is."""
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
        x: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        factors: tuple[Tensor, Tensor],
    ) -> None:
        """Attention half of a layer: writes keys and values, adds to the residual stream ``x``."""
        config = self.config
        rows = x.shape[0]
        heads = layer.qkv(layer.attention_norm(x)).view(rows, -1, config.head_dim)
        turning, v = heads.split((config.q_heads + config.kv_heads, config.kv_heads), dim=1)
        if layer.qk_norm is not None:
            turning = layer.qk_norm(turning.float())
        q, k = rotate(turning, factors).split((config.q_heads, config.kv_heads), dim=1)
        keys, values = _write(k, v, index, plan, caches)
        attended = x.new_empty(rows, config.q_heads, config.head_dim, dtype=config.dtype)
        tree_attention(q, keys, values, plan, scale=self._scale, window=layer.window, out=attended)
        x += layer.out(attended.view(rows, -1))


def _write(
    k: Tensor, v: Tensor, index: int, plan: TreePlan, caches: Sequence[KVCacheView]
) -> tuple[list[Tensor], list[Tensor]]:
    """Write packed ``[M, Hkv, D]`` keys and values into the slots of their blocks."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for cache in caches:
        key, value = cache.layer(index)
        keys.append(key)
        values.append(value)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    for segment, row in zip(plan.segments, plan.offsets, strict=False):
        start, count = segment.start, segment.length
        keys[segment.sequence].narrow(1, start, count).copy_(k.narrow(1, row, count))
        values[segment.sequence].narrow(1, start, count).copy_(v.narrow(1, row, count))
    return keys, values


def _layer(config: DecoderConfig, weights: Mapping[str, Tensor], index: int) -> _Layer:
    base = f"model.layers.{index}."
    dim = config.head_dim
    q, kv, wide, hidden = (
        config.q_heads * dim, config.kv_heads * dim, config.intermediate, config.hidden
    )  # fmt: skip

    def fused(names: Sequence[str], outs: Sequence[int], ins: int, bias: bool) -> Linear:
        weight = torch.cat(
            [take(weights, f"{base}{n}.weight", (o, ins)) for n, o in zip(names, outs, strict=True)]
        )
        if not bias:
            return Linear(weight)
        biases = [take(weights, f"{base}{n}.bias", (o,)) for n, o in zip(names, outs, strict=True)]
        return Linear(weight, torch.cat(biases))

    def norm(name: str) -> RmsNorm:
        weight = take(weights, f"{base}{name}.weight", (hidden,))
        return RmsNorm(weight, config.norm_eps, config.dtype)

    def qk_norm() -> RmsNorm:
        each = [take(weights, f"{base}self_attn.{n}_norm.weight", (dim,)) for n in "qk"]
        weight = torch.cat(
            [w.expand(n, -1) for w, n in zip(each, (config.q_heads, config.kv_heads), strict=True)]
        )
        return RmsNorm(weight, config.norm_eps, torch.float32)

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        attention_norm=norm("input_layernorm"),
        qkv=fused(attention, (q, kv, kv), hidden, config.qkv_bias),
        qk_norm=qk_norm() if config.qk_norm else None,
        out=fused(["self_attn.o_proj"], (hidden,), q, config.o_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused(["mlp.gate_proj", "mlp.up_proj"], (wide, wide), hidden, config.mlp_bias),
        down=fused(["mlp.down_proj"], (hidden,), wide, config.mlp_bias),
        window=config.windows[index],
    )
