"""The LongSpec layer that drafts: tokens of many generations in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.decoder.linear import Linear
from paceline.decoder.rope import Rope
from paceline.decoder.weights import take
from paceline.drafter.methods.layers import apply_rope
from paceline.drafter.methods.longspec.config import LongSpecConfig
from paceline.drafter.methods.slots import SlotRun, WindowCache, plan_slots, ring_slots
from paceline.drafter.methods.target import TargetEmbedding
from paceline.kernels import Norm, TreePlan, TreeSegment, plan_trees, row_kernels, tree_attention


@dataclass(frozen=True)
class Context:
    """The target's KV that a round of one generation reads.

    Attributes:
        keys: One or more parts of the positions, each ``[Hkv, n, D]``.
        values: Like ``keys``.
        plan: Attention plan of all levels of a round: one row per part, which attends to all of it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    plan: TreePlan

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Context | None:
        """Takes keys and values from :meth:`KvReader.parts`; None if there are none yet.

        They are copied only if they are on another device than the layer.
        """
        if not parts:
            return None
        segments = [
            TreeSegment(index, keys.shape[1] - 1, None, 1) for index, (keys, _) in enumerate(parts)
        ]
        here = [(keys.to(device), values.to(device)) for keys, values in parts]
        keys, values = zip(*here, strict=True)
        return cls(keys, values, plan_trees(segments, device=device))


@dataclass(frozen=True)
class StepInput:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: Token ids.
        positions: Position of each in its text.
        slots: Slots of the ring for their keys and values, in order.
        ring: Self-attention KV of the last ``window`` positions, and of a tree's nodes.
        mask: Mask of the last tokens, those that need logits; see :func:`ring_mask`. Of the others
            only keys and values are computed.
        context: The target's KV that those tokens attend to; None: nothing.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[SlotRun]
    ring: WindowCache
    mask: Tensor
    context: Context | None


class LongSpecLayer:
    """Weights and forward pass. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    def __init__(
        self,
        config: LongSpecConfig,
        weights: Mapping[str, Tensor],
        embedding: TargetEmbedding,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Builds the layer from the folder's tensors and the target's.

        Raises:
            UnsupportedModelError: A tensor is missing or of another shape.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self._embedding = embedding
        width, hidden = config.q_heads * config.head_dim, config.hidden
        kv = config.kv_heads * config.head_dim

        def norm(name: str) -> Norm:
            return Norm(take(weights, f"{name}.weight", (hidden,)).float(), config.norm_eps)

        def linear(ins: int, outs: Mapping[str, int]) -> Linear:
            parts = [take(weights, f"layers.0.{n}.weight", (o, ins)) for n, o in outs.items()]
            return Linear(torch.cat(parts))

        attention, mlp = {"q": width, "k": kv, "v": kv}, ("gate", "up")
        self._self_norm = norm("layers.0.input_layernorm")
        self._qkv = linear(hidden, {f"self_attn.{n}_proj": o for n, o in attention.items()})
        self._self_out = linear(width, {"self_attn.o_proj": hidden})
        self._cross_norm = norm("layers.0.cross_layernorm")
        self._cross_q = linear(hidden, {"cross_attn.q_proj": width})
        self._cross_out = linear(width, {"cross_attn.o_proj": hidden})
        self._mlp_norm = norm("layers.0.post_attention_layernorm")
        self._gate_up = linear(hidden, {f"mlp.{n}_proj": config.intermediate for n in mlp})
        self._down = linear(config.intermediate, {"mlp.down_proj": hidden})
        self._norm = norm("norm") if config.final_norm else None
        self._rope = Rope(config, device)
        self._kernels = row_kernels(device)
        self._scale = config.head_dim**-0.5

    def new_ring(self, nodes: int) -> WindowCache:
        """Returns a ring for one generation whose trees have at most ``nodes`` nodes.

        A tree's nodes follow the text's slots (LongSpec, appendix D). Neither rejected nor accepted
        nodes are moved: accepted tokens are fed again as text.
        """
        return WindowCache(self.config, 1, self.config.window, nodes, self.dtype, self.device)

    @torch.inference_mode()
    def write_kv(self, step: StepInput) -> None:
        """Writes the self-attention KV of tokens to their ring, and computes nothing else.

        It depends on token and position alone, because the layer begins with self-attention. So a
        text is prefilled with one small product per token.
        """
        self._project([step], _plan([step], self.device))

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepInput]) -> Tensor:
        """Runs tokens of several generations.

        Returns:
            Logits of each input's last tokens, as many as its mask has rows, input after input:
            ``[R, V]`` in the weights' type.
        """
        plan = _plan(batch, self.device)
        x, q = self._project(batch, plan)
        positions = plan.positions
        rows = _logit_rows(batch)
        if len(rows) < plan.rows:
            index = torch.tensor(rows, device=self.device)
            x, q, positions = x[index], q[index], positions[index]
        kernels, dtype = self._kernels, self.dtype

        attended = self._self_out(self._attend_each(self._self_attention, q, batch))
        inputs = kernels.add_norm(x, attended, self._cross_norm, dtype)
        heads = self._cross_q(inputs).float().view(len(inputs), self.config.q_heads, -1)
        cos, sin = self._rope.table(plan.longest)[positions].unsqueeze(1).chunk(2, dim=-1)
        q = apply_rope(heads, (cos, sin))
        attended = self._cross_out(self._attend_each(self._cross_attention, q, batch))
        inputs = kernels.add_norm(x, attended, self._mlp_norm, dtype)
        delta = self._down(kernels.gate(self._gate_up(inputs)))
        if self._norm is not None:
            return self._embedding.logits(kernels.add_norm(x, delta, self._norm, dtype))
        return self._embedding.logits((x + delta).to(dtype))

    def _project(self, batch: Sequence[StepInput], plan: TreePlan) -> tuple[Tensor, Tensor]:
        """Writes keys and values; returns float32 ``[M, hidden]`` and queries ``[M, Hq, D]``."""
        tokens = [token for each in batch for token in each.tokens]
        x = self._embedding.embed(torch.tensor(tokens, device=self.device))
        heads = self._qkv(self._kernels.add_norm(x, None, self._self_norm, self.dtype))
        caches = [each.ring.layer(0) for each in batch]
        keys, values = [keys for keys, _ in caches], [values for _, values in caches]
        table = self._rope.table(plan.longest)
        return x, self._kernels.rotate(heads, None, table, plan, keys, values)

    def _attend_each(
        self, attend: Callable[[Tensor, StepInput], Tensor], q: Tensor, batch: Sequence[StepInput]
    ) -> Tensor:
        """Runs an attention for each generation, ``[R, Hq, D]`` to ``[R, Hq D]``.

        ``attend`` takes and returns ``[Hkv, rows group, D]``. With the query heads that share keys
        among its rows, it computes one matrix product per kv head.
        """
        kv, group, dim = self.config.kv_heads, self.config.group, self.config.head_dim
        outs = []
        for part, step in zip(q.split([len(each.mask) for each in batch]), batch, strict=True):
            packed = part.view(-1, kv, group, dim).transpose(0, 1).reshape(kv, -1, dim)
            out = attend(packed, step).view(kv, -1, group, dim)
            outs.append(out.transpose(0, 1).reshape(-1, kv * group * dim))
        return torch.cat(outs).to(self.dtype)

    def _self_attention(self, q: Tensor, step: StepInput) -> Tensor:
        slots = step.mask.shape[1]
        keys, values = step.ring.layer(0)
        mask = step.mask.to(self.device, self.dtype).repeat_interleave(self.config.group, dim=0)
        return scaled_dot_product_attention(
            q[None].to(self.dtype),
            keys[None, :, :slots],
            values[None, :, :slots],
            attn_mask=mask,
            scale=self._scale,
        )[0]

    def _cross_attention(self, q: Tensor, step: StepInput) -> Tensor:
        """Attends to the target's keys.

        All rows attend to the same keys. They are passed as query heads of one row, the last
        position of a part, which attends to itself and all before it: keys are read once for all
        rows, and no mask is needed. Parts are merged by log-sum-exp.
        """
        context = step.context
        if context is None:
            return torch.zeros_like(q)
        keys, values, plan = context.keys, context.values, context.plan
        heads = q.view(1, -1, q.shape[-1])
        if plan.rows == 1:
            return tree_attention(heads, keys, values, plan, scale=self._scale).view(q.shape)
        heads = heads.expand(plan.rows, -1, -1)
        parts, lse = tree_attention(heads, keys, values, plan, scale=self._scale, return_lse=True)
        return (parts * lse.softmax(0).unsqueeze(-1)).sum(0).view(q.shape)


def _plan(batch: Sequence[StepInput], device: torch.device) -> TreePlan:
    positions = [position for each in batch for position in each.positions]
    return plan_slots([each.slots for each in batch], positions, device)


def _logit_rows(batch: Sequence[StepInput]) -> list[int]:
    """Packed rows that need logits: the last ones of each input."""
    rows: list[int] = []
    stop = 0
    for each in batch:
        stop += len(each.tokens)
        rows += range(stop - len(each.mask), stop)
    return rows


def ring_mask(window: int, position: int, length: int, paths: Sequence[Sequence[int]]) -> Tensor:
    """Returns the additive attention mask over the ring, of tokens at one position.

    Args:
        window: Positions that a token attends to, including its own.
        position: Position of all the tokens.
        length: Tokens of the text, all of which are written before the mask is used.
        paths: For each token the tree's nodes on its path, including itself; empty for the newest
            token of the text.

    Returns:
        float32 ``[tokens, slots]``, 0 or -inf; no token attends to slots after the last one.
    """
    nodes = max((path[-1] + 1 for path in paths if path), default=0)
    # In numpy: a dozen small steps, each a fraction of its cost in torch.
    mask = np.full((len(paths), window + nodes), -np.inf, np.float32)
    for slot, count in ring_slots(max(0, position - window + 1), length, window):
        mask[:, slot : slot + count] = 0.0
    for row, path in zip(mask, paths, strict=True):
        row[[window + node for node in path[-window:]]] = 0.0
    return torch.from_numpy(mask)
