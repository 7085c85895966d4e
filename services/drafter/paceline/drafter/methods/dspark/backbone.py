"""The DSpark backbone that drafts: blocks of many generations in one pass over their contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.decoder.linear import Linear
from paceline.decoder.rope import Rope
from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.slots import WindowCache, plan_slots
from paceline.drafter.methods.target import TargetEmbedding
from paceline.kernels import Norm, TreePlan, TreeSegment, plan_trees, row_kernels, tree_attention


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm]
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class DSparkBackbone:
    """Weights and forward pass. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    def __init__(
        self,
        config: DSparkConfig,
        weights: Mapping[str, Tensor],
        embedding: TargetEmbedding,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Builds the backbone from tensors of :func:`~.checkpoint.load_weights`."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self._embedding = embedding
        self._layers = [_layer(config, weights, index) for index in range(config.layers)]
        self._fc = Linear(weights["fc.weight"])
        self._context_norm = _norm(config, weights, "hidden_norm")
        # All layers project the same context: one product computes all their keys and values.
        names = [
            f"layers.{i}.self_attn.{n}_proj.weight" for i in range(config.layers) for n in "kv"
        ]
        self._context_kv = Linear(torch.cat([weights[name] for name in names]))
        self._norm = _norm(config, weights, "norm")
        self._rope = Rope(config, device)
        self._kernels = row_kernels(device)
        self._scale = config.head_dim**-0.5

    def new_context(self) -> WindowCache:
        """Returns an empty context for one generation: the KV of its hidden states.

        A block's keys follow the newest context, and the next round overwrites them. So a block
        attends to the first slots, whose order does not matter to attention.
        """
        config = self.config
        return WindowCache(
            config, config.layers, config.window, config.block, self.dtype, self.device
        )

    @torch.inference_mode()
    def add_states(self, batch: Sequence[tuple[WindowCache, int, Tensor]]) -> None:
        """Adds hidden states to contexts.

        Args:
            batch: For each context the first position and the states from there on, ``[n, taps *
                hidden]``, at most a window of them.
        """
        config = self.config
        states = torch.cat([each.to(self.device, self.dtype) for _, _, each in batch])
        contexts = [context for context, _, _ in batch]
        ranges = [range(first, first + len(each)) for _, first, each in batch]
        for context, new in zip(contexts, ranges, strict=True):
            context.reserve(new.stop)
        plan = plan_slots(
            [c.slots(new.start, new.stop) for c, new in zip(contexts, ranges, strict=True)],
            [position for new in ranges for position in new],
            self.device,
        )
        table = self._rope.table(plan.longest)
        hidden = self._fc(states).float()
        hidden = self._kernels.add_norm(hidden, None, self._context_norm, self.dtype)
        parts = self._context_kv(hidden).split(2 * config.kv_heads * config.head_dim, dim=1)
        for index, (layer, part) in enumerate(zip(self._layers, parts, strict=True)):
            keys, values = self._caches(index, contexts)
            # The kernel rotates queries, keys and values together; the context has no queries.
            heads = pad(part, (config.q_heads * config.head_dim, 0))
            self._kernels.rotate(heads, layer.head_norms, table, plan, keys, values)
        for context, new in zip(contexts, ranges, strict=True):
            context.length = new.stop

    @torch.inference_mode()
    def forward(self, blocks: Sequence[tuple[WindowCache, int]]) -> tuple[Tensor, Tensor]:
        """Drafts a block after each context.

        Args:
            blocks: For each generation its context, complete up to its anchor, and the anchor's
                token.

        Returns:
            Hidden states ``[S, levels, hidden]`` of the positions that predict, and the target's
            logits of them ``[S, levels, V]``, in the weights' type.
        """
        config, count = self.config, len(blocks)
        contexts = [context for context, _ in blocks]
        for context in contexts:
            context.reserve(context.length)
        masks = [config.mask_token] * (config.block - 1)
        tokens = [token for _, anchor in blocks for token in (anchor, *masks)]
        starts = [context.extra_slot for context in contexts]
        positions = [c.length + offset for c in contexts for offset in range(config.block)]
        plan = plan_slots([[(start, config.block)] for start in starts], positions, self.device)
        # All positions attend to the same keys: they are passed as query heads of the last one.
        attention_plan = plan_trees(
            [TreeSegment(i, start + config.block - 1, None, 1) for i, start in enumerate(starts)],
            device=self.device,
        )
        table = self._rope.table(plan.longest)
        x = self._embedding.embed(torch.tensor(tokens, device=self.device))
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            keys, values = self._caches(index, contexts)
            inputs = self._kernels.add_norm(x, delta, layer.attention_norm, self.dtype)
            heads = layer.qkv(inputs)
            q = self._kernels.rotate(heads, layer.head_norms, table, plan, keys, values)
            attended = layer.out(self._attend(q, keys, values, starts, attention_plan))
            inputs = self._kernels.add_norm(x, attended, layer.mlp_norm, self.dtype)
            delta = layer.down(self._kernels.gate(layer.gate_up(inputs)))
        hidden = self._kernels.add_norm(x, delta, self._norm, self.dtype)
        hidden = hidden.view(count, config.block, -1)[:, config.block - config.levels :]
        logits = self._embedding.logits(hidden.flatten(0, 1))
        return hidden, logits.view(count, config.levels, -1)

    def _attend(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        starts: Sequence[int],
        plan: TreePlan,
    ) -> Tensor:
        """Attends over each generation's keys: ``[S block, Hq, D]`` to ``[S block, Hq D]``."""
        config, block = self.config, self.config.block
        kv, group, dim = config.kv_heads, config.group, config.head_dim
        packed = q.view(-1, block, kv, group, dim).transpose(1, 2).reshape(len(starts), -1, dim)
        stops = [start + block for start in starts]
        out = tree_attention(
            packed,
            [each[:, :stop] for each, stop in zip(keys, stops, strict=True)],
            [each[:, :stop] for each, stop in zip(values, stops, strict=True)],
            plan,
            scale=self._scale,
        )
        out = out.view(-1, kv, block, group, dim).transpose(1, 2)
        return out.reshape(-1, kv * group * dim).to(self.dtype)

    @staticmethod
    def _caches(index: int, contexts: Sequence[WindowCache]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [context.layer(index) for context in contexts]
        return [keys for keys, _ in pairs], [values for _, values in pairs]


def _norm(config: DSparkConfig, weights: Mapping[str, Tensor], name: str) -> Norm:
    return Norm(weights[f"{name}.weight"].float(), config.norm_eps)


def _layer(config: DSparkConfig, weights: Mapping[str, Tensor], index: int) -> _Layer:
    base = f"layers.{index}."

    def fused(*names: str) -> Linear:
        return Linear(torch.cat([weights[f"{base}{name}_proj.weight"] for name in names]))

    return _Layer(
        attention_norm=_norm(config, weights, f"{base}input_layernorm"),
        qkv=fused("self_attn.q", "self_attn.k", "self_attn.v"),
        head_norms=(
            _norm(config, weights, f"{base}self_attn.q_norm"),
            _norm(config, weights, f"{base}self_attn.k_norm"),
        ),
        out=fused("self_attn.o"),
        mlp_norm=_norm(config, weights, f"{base}post_attention_layernorm"),
        gate_up=fused("mlp.gate", "mlp.up"),
        down=fused("mlp.down"),
    )
