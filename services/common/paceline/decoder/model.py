"""The packed decoder: one forward pass over the query blocks of many sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from paceline.decoder.cache import KVCacheView
from paceline.decoder.config import DecoderConfig, load_config
from paceline.decoder.linear import Linear
from paceline.decoder.rope import Rope, rotate
from paceline.decoder.weights import load_weights, take
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
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
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
        self._norm = take(weights, "model.norm.weight", (config.hidden,))
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
            dtype: float32, bfloat16, or "auto" for what the folder names.
            device: Where to run.

        Raises:
            UnsupportedModelError: The model needs something the decoder does not do.
            FileNotFoundError: There is no config.json.
        """
        config = load_config(folder, dtype)
        with torch.inference_mode():
            return Decoder(config, load_weights(folder, config.dtype, device), device)

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
        longest = max(s.start + max(s.depths) for s in plan.segments)
        factors = self._rope.rows(plan.positions, longest)
        x = self._embedding[tokens]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x = self._layer(layer, index, x, plan, caches, factors)
            if index in taps:
                tapped[index] = x.clone()
        if logit_rows is not None:
            x = x[logit_rows]
        logits = self._head(rms_norm(x, x.shape[-1:], self._norm, self.config.norm_eps))
        return ForwardResult(logits, tuple(tapped[i] for i in taps))

    def head(self, hidden: Tensor) -> Tensor:
        """LM head without the final norm: ``[R, hidden]`` to ``[R, V]``."""
        return self._head(hidden)

    def _layer(
        self,
        layer: _Layer,
        index: int,
        x: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        factors: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        normed = rms_norm(x, x.shape[-1:], layer.attention_norm, config.norm_eps)
        heads = layer.qkv(normed).view(x.shape[0], -1, config.head_dim)
        turning = heads[:, : config.q_heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            turning = torch.cat(
                [
                    rms_norm(heads[:, : config.q_heads], (config.head_dim,), layer.q_norm,
                             config.norm_eps),
                    rms_norm(turning[:, config.q_heads :], (config.head_dim,), layer.k_norm,
                             config.norm_eps),
                ],
                dim=1,
            )  # fmt: skip
        turned = rotate(turning, factors)
        keys, values = _write(
            turned[:, config.q_heads :], heads[:, -config.kv_heads :], index, plan, caches
        )
        attended = torch.empty(
            x.shape[0], config.q_heads, config.head_dim, dtype=x.dtype, device=x.device
        )
        tree_attention(
            turned[:, : config.q_heads], keys, values, plan,
            scale=self._scale, window=layer.window, out=attended,
        )  # fmt: skip
        x = layer.out.add_to(attended.view(x.shape[0], -1), x)
        normed = rms_norm(x, x.shape[-1:], layer.mlp_norm, config.norm_eps)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down.add_to(silu(gate).mul_(up), x)


def _write(
    k: Tensor, v: Tensor, index: int, plan: TreePlan, caches: Sequence[KVCacheView]
) -> tuple[list[Tensor], list[Tensor]]:
    """Write packed ``[M, Hkv, D]`` keys and values into the slots of their blocks."""
    layers = [cache.layer(index) for cache in caches]
    for segment, first in zip(plan.segments, plan.offsets, strict=False):
        key, value = layers[segment.sequence]
        rows = slice(first, first + segment.length)
        key[:, segment.start : segment.stop] = k[rows].transpose(0, 1)
        value[:, segment.start : segment.stop] = v[rows].transpose(0, 1)
    return [key for key, _ in layers], [value for _, value in layers]


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

    def norm(name: str, size: int) -> Tensor:
        return take(weights, f"{base}{name}.weight", (size,))

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=fused(attention, (q, kv, kv), hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
        out=fused(["self_attn.o_proj"], (hidden,), q, config.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=fused(["mlp.gate_proj", "mlp.up_proj"], (wide, wide), hidden, config.mlp_bias),
        down=fused(["mlp.down_proj"], (hidden,), wide, config.mlp_bias),
        window=config.windows[index],
    )
