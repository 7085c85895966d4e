"""Tree attention in plain PyTorch, for any device.

It serves devices without a backend of their own. Scores are materialised: memory grows with nodes
times context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.cache_rows import from_rows
from paceline.kernels.probes import Probe, note_scores
from paceline.kernels.trees import TreePlan, TreeSegment


class DenseBackend:
    """One masked softmax per segment, in fp32."""

    name = "dense"
    pages = False

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`."""
        for index, segment in enumerate(plan.segments):
            rows = slice(plan.offsets[index], plan.offsets[index + 1])
            key = from_rows(keys[segment.sequence][:, : segment.stop]).float()
            value = from_rows(values[segment.sequence][:, : segment.stop]).float()
            nodes, heads, dim = q[rows].shape
            kv_heads = key.shape[0]
            packed = q[rows].float().view(nodes, kv_heads, -1, dim).permute(1, 2, 0, 3)
            scores = torch.matmul(packed, key.transpose(1, 2).unsqueeze(1)).mul_(scale)
            scores.masked_fill_(_hidden(plan, index, window), float("-inf"))
            total = scores.logsumexp(-1, keepdim=True)
            attended = torch.matmul(scores.sub_(total).exp_(), value.unsqueeze(1))
            out[rows] = attended.permute(2, 0, 1, 3).reshape(nodes, heads, dim)
            if lse is not None:
                lse[rows] = total[..., 0].permute(2, 0, 1).reshape(nodes, heads)
        note_scores(q, keys, plan, probes, scale=scale, window=window, lse=lse)


def _hidden(plan: TreePlan, index: int, window: int | None) -> Tensor:
    """Mask of hidden keys per node, bool ``[nodes, stop]``; computed once per plan."""
    key = ("dense", index, window)
    if key not in plan.prepared:
        plan.prepared[key] = ~_seen(plan.segments[index], window).to(plan.device)
    hidden: Tensor = plan.prepared[key]
    return hidden


def _seen(segment: TreeSegment, window: int | None) -> Tensor:
    seen = torch.ones(segment.length, segment.stop, dtype=torch.bool)
    seen[:, segment.start :] = torch.from_numpy(segment.ancestors())
    if window is not None:
        at = torch.tensor(segment.depths) + segment.start
        seen &= torch.cat([torch.arange(segment.start), at])[None, :] > at[:, None] - window
    return seen
