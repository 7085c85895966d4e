"""A GPU's kernels in plain operations of PyTorch, on any device.

Tests compare others with them, and run on a CPU with them what only GPUs have otherwise: KV in
pages, simulated graphs. :func:`register` makes them the CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from paceline.kernels import (
    AttentionCall,
    LevelBlock,
    Norm,
    Plane,
    Proposal,
    QueryBlock,
    SamplingRules,
    TreePlan,
    devices,
    perturbed_logits,
    send,
)
from paceline.kernels.attention import record_scores
from paceline.kernels.caches import PagedPlane, from_rows, span, to_rows
from paceline.kernels.rotated import LARGEST, SMALLEST, IntSums, RotatedMatrix
from paceline.kernels.rows import normalised
from paceline.kernels.sampling import resampled

G = TypeVar("G", Tensor, Tensor | None)


def register(kind: str = "cpu") -> None:
    """Make these the kernels of a type of device."""
    devices.LOADED[kind] = ReferenceKernels()


def _scaled(given: G | IntSums) -> G | Tensor:
    return given.scaled() if isinstance(given, IntSums) else given


def write(plane: Plane, start: int, rows: Tensor) -> None:
    """Fill the slots from ``start`` on with ``[Hkv, n, D]``, converted to the plane's type."""
    if isinstance(plane, PagedPlane):
        slots = torch.arange(start, start + rows.shape[1], device=rows.device)
        pages = plane.tables[plane.row, slots // plane.page_size].long()
        plane.pool[pages, :, slots % plane.page_size] = rows.transpose(0, 1).to(plane.dtype)
    else:
        plane.narrow(1, start, rows.shape[1]).copy_(to_rows(rows, plane.dtype))


def rotate(x: Tensor, size: int) -> Tensor:
    """Hadamard transforms, not normalised, of blocks of ``size`` columns: float32 ``[rows, n]``."""
    rotated: Tensor = x.unflatten(1, (-1, size))
    step = 1
    while step < size:
        low, high = rotated.unflatten(2, (-1, 2, step)).unbind(3)
        rotated = torch.stack([low + high, low - high], 3).flatten(2)
        step *= 2
    return rotated.flatten(1)


def rotated_rows(matrix: RotatedMatrix, indices: Tensor) -> Tensor:
    """Return the weights of some outputs, int64 ``[n]``, not rotated: float32 ``[n, ins]``."""
    return rotate(matrix.values[indices].float(), matrix.size) * matrix.scale[indices, None]


class ReferenceRows:
    """The row operations."""

    scale_sums = False

    def add_norm(
        self, x: Tensor, delta: Tensor | IntSums | None, norm: Norm, dtype: torch.dtype
    ) -> Tensor:
        delta = _scaled(delta)
        if delta is not None:
            x += delta
        return normalised(x, norm).to(dtype)

    def gate(self, gate_up: Tensor | IntSums) -> Tensor:
        gate_up = _scaled(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        return silu(gate).mul_(up).to(gate_up.dtype)

    def rotate(
        self,
        heads: Tensor | IntSums,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        plan: TreePlan,
        keys: Sequence[Plane],
        values: Sequence[Plane],
    ) -> Tensor:
        heads = _scaled(heads)
        dim, kv_heads = table.shape[1], keys[0].shape[0]
        heads = heads[: plan.rows].view(plan.rows, -1, dim)
        q_heads = heads.shape[1] - 2 * kv_heads
        q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
        q, k = q.float(), k.float()
        if norms is not None:
            q, k = normalised(q, norms[0]), normalised(k, norms[1])
        cos, sin = table[plan.positions].unsqueeze(1).chunk(2, dim=-1)
        factors = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        q, k = _rotated(q, factors), _rotated(k, factors)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        for block, row in zip(plan.blocks, plan.offsets, strict=False):
            start, count = block.start, block.length
            write(keys[block.sequence], start, k.narrow(1, row, count))
            write(values[block.sequence], start, v.narrow(1, row, count))
        return q


def _rotated(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = factors
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos).addcmul_(swapped, sin)


class ReferenceKernels:
    """All of them. Attention is one masked softmax per block, in float32; its memory grows with
    nodes times context."""

    name = "reference"
    rows = ReferenceRows()

    def attend(self, call: AttentionCall) -> None:
        plan = call.plan
        for index, block in enumerate(plan.blocks):
            rows = slice(plan.offsets[index], plan.offsets[index + 1])
            key = from_rows(span(call.keys[block.sequence], 0, block.stop)).float()
            value = from_rows(span(call.values[block.sequence], 0, block.stop)).float()
            nodes, heads, dim = call.q[rows].shape
            kv_heads = key.shape[0]
            packed = call.q[rows].float().view(nodes, kv_heads, -1, dim).permute(1, 2, 0, 3)
            # The heads of a KV head are rows of one product: a batch would copy the keys for each.
            scores = call.scores(packed.flatten(1, 2), key).unflatten(1, (-1, nodes))
            scores.masked_fill_(self.hidden(call, index, packed, key), float("-inf"))
            total = scores.logsumexp(-1, keepdim=True)
            if call.sinks is not None:
                total = torch.logaddexp(total, call.sinks.view(kv_heads, -1, 1, 1))
            attended = torch.matmul(scores.sub_(total).exp_().flatten(1, 2), value)
            attended = attended.unflatten(1, (-1, nodes)).permute(2, 0, 1, 3)
            call.out[rows] = attended.reshape(nodes, heads, dim)
            if call.lse is not None:
                call.lse[rows] = total[..., 0].permute(2, 0, 1).reshape(nodes, heads)
        record_scores(call, call.probes)

    def hidden(self, call: AttentionCall, index: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask of the keys that a block's nodes do not see, bool ``[..., nodes, stop]``,
        which spreads to scores ``[Hkv, group, nodes, stop]``.

        Args:
            queries: ``[Hkv, group, nodes, D]``.
            keys: ``[Hkv, stop, D]``.
        """
        return _hidden(call.plan, index, call.window)

    def quantise_rows(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        turned = rotate(x.float(), size)
        largest = turned.abs().amax(1, keepdim=True)
        finite = largest.isfinite()
        largest = largest.clamp_min(SMALLEST)
        # Not LARGEST / largest, which PyTorch computes as a product with the reciprocal.
        top = torch.full_like(largest, LARGEST)
        values = torch.where(finite, (turned * torch.div(top, largest)).round(), 0.0)
        scale = torch.where(finite, torch.div(largest, top), torch.nan)
        return values.to(torch.int8), scale[:, 0]

    def scale_sums(
        self, sums: Tensor, rows: Tensor, outs: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        wide = sums[: len(rows), : len(outs)].float() * rows[:, None] * outs
        return (wide if bias is None else wide + bias).to(dtype)

    def multiply_by_experts(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, chosen: Tensor
    ) -> Tensor:
        """Multiply each row by the matrix of its expert."""
        product = torch.bmm(weights[chosen], x.unsqueeze(2))[:, :, 0]
        return product if bias is None else product + bias[chosen]

    def perturb(
        self,
        logits: Tensor,
        params: Sequence[SamplingRules],
        positions: Sequence[int],
        ids: Tensor | None,
    ) -> Tensor:
        ids = None if ids is None else ids.cpu()
        return perturbed_logits(logits.cpu(), params, positions, ids).to(logits.device)

    def accept_drafts(
        self, scores: Tensor, tokens: Tensor, drafts: NDArray[np.int64], chances: NDArray[np.int64]
    ) -> None:
        which, places = np.divmod(chances[0], scores.shape[1])
        probabilities = chances[1].astype(np.int32).view(np.float32)
        for draft, (row, token, seed, position, _) in enumerate(drafts.tolist()):
            mask = which == draft
            proposal = Proposal(places[mask], probabilities[mask])
            key = seed % (1 << 64)
            tokens[row] = resampled(scores[row].cpu(), key, position, token, proposal)

    def best_candidates(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the rank by PyTorch, which orders equal scores freely."""
        ids = logits.topk(width).indices  # logs only after it: rounding could make scores equal
        return ids, logits.log_softmax(-1).gather(1, ids)


def _hidden(plan: TreePlan, index: int, window: int | None) -> Tensor:
    """Return the mask of hidden keys per node, bool ``[nodes, stop]``."""
    block = plan.blocks[index]
    hidden = send(~_seen(block, window), plan.device)
    if plan.ancestors is not None:
        hidden[:, block.start :] |= ~plan.ancestors[index]
    return hidden


def _seen(block: QueryBlock, window: int | None) -> Tensor:
    seen = torch.ones(block.length, block.stop, dtype=torch.bool)
    if not isinstance(block, LevelBlock):
        seen[:, block.start :] = torch.from_numpy(block.ancestors())
    if window is not None:
        at = torch.tensor(block.depths) + block.start
        new = at[: block.stop - block.start]
        seen &= torch.cat([torch.arange(block.start), new])[None, :] > at[:, None] - window
    return seen
