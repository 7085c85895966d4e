"""The LongSpec layer, fast: packed tokens of many generations, keys in rings and at the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.decoder.linear import Linear
from paceline.decoder.rope import Rope
from paceline.decoder.weights import take
from paceline.drafter.methods.longspec_frozen import Frozen
from paceline.drafter.methods.longspec_ring import Ring, Run
from paceline.kernels import Norm, TreePlan, TreeSegment, plan_trees, row_kernels, tree_attention
from paceline.longspec import LongSpecConfig


@dataclass(frozen=True)
class Context:
    """What a round of one generation may read of the target.

    Attributes:
        keys: One or more parts of the positions, each ``[Hkv, n, D]``.
        values: Like ``keys``.
        plan: For the attention; kept, because every level of a round asks for the same. One row
            for each part, which sees all of it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    plan: TreePlan

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Context | None:
        """Keys and values as :meth:`KvReader.parts` returns them; None if there are none yet.

        They are copied only where they lie on another device than the layer.
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
class Feed:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: What to feed.
        positions: Where each stands in its text.
        runs: Slots of the ring that their keys and values go to, in order.
        ring: The ring.
        mask: For the last tokens, those that want logits: what they see of the ring, see
            :meth:`Ring.mask`. The others only leave their keys and values.
        context: What those that want logits see of the target; None for nothing.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    runs: Sequence[Run]
    ring: Ring
    mask: Tensor
    context: Context | None


class LongSpecLayer:
    """Weights, and the forward pass. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    def __init__(
        self,
        config: LongSpecConfig,
        weights: Mapping[str, Tensor],
        frozen: Frozen,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Build from the folder's tensors and the target's.

        Raises:
            UnsupportedModelError: A tensor is missing or of another shape.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self._frozen = frozen
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
        self._rows = row_kernels(device)
        self._scale = config.head_dim**-0.5

    def new_ring(self, room: int) -> Ring:
        """A ring for one generation whose trees have at most ``room`` nodes."""
        c = self.config
        return Ring(c.kv_heads, c.head_dim, c.window, room, self.dtype, self.device)

    @torch.inference_mode()
    def remember(self, feed: Feed) -> None:
        """Only leave the keys and values of these tokens in their ring.

        They depend on token and position alone, since the first thing in the layer is the
        self-attention: a text is caught up with by two small products a token.
        """
        self._enter([feed], _plan([feed], self.device))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Feed tokens of several generations.

        Returns:
            Logits of each feed's last tokens, as many as its mask has rows, feed after feed:
            ``[R, V]`` in the weights' type.
        """
        plan = _plan(feeds, self.device)
        x, q = self._enter(feeds, plan)
        positions = plan.positions
        wanted = _wanted_rows(feeds)
        if len(wanted) < plan.rows:
            at = torch.tensor(wanted, device=self.device)
            x, q, positions = x[at], q[at], positions[at]
        rows, dtype = self._rows, self.dtype

        attended = self._self_out(self._each(self._own, q, feeds))
        inputs = rows.add_norm(x, attended, self._cross_norm, dtype)
        q = self._turned(self._cross_q(inputs), self._rope.table(plan.longest)[positions])
        attended = self._cross_out(self._each(self._cross, q, feeds))
        inputs = rows.add_norm(x, attended, self._mlp_norm, dtype)
        delta = self._down(rows.gate(self._gate_up(inputs)))
        if self._norm is not None:
            return self._frozen.logits(rows.add_norm(x, delta, self._norm, dtype))
        return self._frozen.logits((x + delta).to(dtype))

    def _enter(self, feeds: Sequence[Feed], plan: TreePlan) -> tuple[Tensor, Tensor]:
        """Write keys and values; embeddings float32 ``[M, hidden]``, queries ``[M, Hq, D]``."""
        tokens = [token for feed in feeds for token in feed.tokens]
        x = self._frozen.embedded(torch.tensor(tokens, device=self.device))
        heads = self._qkv(self._rows.add_norm(x, None, self._self_norm, self.dtype))
        keys = [feed.ring.keys for feed in feeds]
        values = [feed.ring.values for feed in feeds]
        table = self._rope.table(plan.longest)
        return x, self._rows.turn(heads, None, table, plan, keys, values)

    def _each(
        self, attend: Callable[[Tensor, Feed], Tensor], q: Tensor, feeds: Sequence[Feed]
    ) -> Tensor:
        """One of the attentions for each generation, ``[R, Hq, D]`` to ``[R, Hq D]``.

        ``attend`` gets and returns ``[Hkv, rows group, D]``: with the heads that share keys among
        its rows, a product over keys is one matrix product a kv head.
        """
        kv, group, dim = self.config.kv_heads, self.config.group, self.config.head_dim
        outs = []
        for part, feed in zip(q.split([len(feed.mask) for feed in feeds]), feeds, strict=True):
            packed = part.view(-1, kv, group, dim).transpose(0, 1).reshape(kv, -1, dim)
            out = attend(packed, feed).view(kv, -1, group, dim)
            outs.append(out.transpose(0, 1).reshape(-1, kv * group * dim))
        return torch.cat(outs).to(self.dtype)

    def _own(self, q: Tensor, feed: Feed) -> Tensor:
        """Self-attention over the ring."""
        slots = feed.mask.shape[1]
        mask = feed.mask.to(self.device, self.dtype).repeat_interleave(self.config.group, dim=0)
        return scaled_dot_product_attention(
            q[None].to(self.dtype),
            feed.ring.keys[None, :, :slots],
            feed.ring.values[None, :, :slots],
            attn_mask=mask,
            scale=self._scale,
        )[0]

    def _cross(self, q: Tensor, feed: Feed) -> Tensor:
        """Attention to the target's keys.

        All rows see the same of them. So they pass as many query heads of one row, the last
        position of a range, which sees itself and all before it: keys are read once for all rows,
        and no mask is needed. Ranges are merged by log-sum-exp.
        """
        context = feed.context
        if context is None:
            return torch.zeros_like(q)
        keys, values, plan = context.keys, context.values, context.plan
        heads = q.view(1, -1, q.shape[-1])
        if plan.rows == 1:
            return tree_attention(heads, keys, values, plan, scale=self._scale).view(q.shape)
        heads = heads.expand(plan.rows, -1, -1)
        parts, lse = tree_attention(heads, keys, values, plan, scale=self._scale, return_lse=True)
        return (parts * lse.softmax(0).unsqueeze(-1)).sum(0).view(q.shape)

    def _turned(self, heads: Tensor, factors: Tensor) -> Tensor:
        """Queries ``[R, Hq D]`` rotated by rows of the table ``[R, D]``: float32 ``[R, Hq, D]``."""
        cos, sin = factors.unsqueeze(1).chunk(2, dim=-1)
        low, high = heads.float().view(len(heads), self.config.q_heads, -1).chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _plan(feeds: Sequence[Feed], device: torch.device) -> TreePlan:
    """Where keys and values go. Positions are the text's, which slots say nothing about."""
    segments = [
        TreeSegment(index, slot, None, count)
        for index, feed in enumerate(feeds)
        for slot, count in feed.runs
    ]
    positions = [position for feed in feeds for position in feed.positions]
    return TreePlan(
        segments=tuple(segments),
        offsets=tuple(accumulate((segment.length for segment in segments), initial=0)),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        longest=max(positions),
        device=device,
    )


def _wanted_rows(feeds: Sequence[Feed]) -> list[int]:
    """Packed rows that want logits: the last ones of each feed."""
    rows: list[int] = []
    stop = 0
    for feed in feeds:
        stop += len(feed.tokens)
        rows += range(stop - len(feed.mask), stop)
    return rows
