"""The kernels of NVIDIA GPUs as one object."""

from __future__ import annotations

import torch

from paceline.cuda.triton.backend import Launch, TritonRows, accept_drafts, perturbed
from paceline.cuda.triton.candidates import best_of_rows
from paceline.cuda.triton.plan import PlanTables
from paceline.cuda.triton.products import multiply_by_experts, quantise_rotated, scaled_sums
from paceline.kernels.attention import AttentionCall, record_scores


class TritonKernels:
    """The kernels of a GPU. Attention is split-KV over contiguous or paged caches, in two.

    Keys and values are of one type, float16, bfloat16 or float32; queries are rounded to it. A row
    has the same bits in every batch, in a chain and in a tree (see
    :mod:`paceline.cuda.triton.tiles`), except in trees whose paths only the device knows.
    """

    name = "triton"
    rows = TritonRows()
    quantise_rows = staticmethod(quantise_rotated)
    scale_sums = staticmethod(scaled_sums)
    multiply_by_experts = staticmethod(multiply_by_experts)
    perturb = staticmethod(perturbed)
    accept_drafts = staticmethod(accept_drafts)
    best_candidates = staticmethod(best_of_rows)

    def attend(self, call: AttentionCall) -> None:
        """Attend, and record what the call asks for."""
        launch = Launch.of(call)
        probed = PlanTables.of(call.plan).probes_of(call.plan, call.probes, launch.tiling)
        target = call.out if call.out.is_contiguous() else torch.empty_like(call.out)
        q, lse = call.q.contiguous(), call.lse
        if lse is None and probed.wanted is not None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        launch.attend(q, probed, call.scale, target, lse, call.sinks)
        if lse is not None and probed.wanted is not None:
            launch.record(q, probed, call.scale, lse)
        if target is not call.out:
            call.out.copy_(target)
        record_scores(call, probed.others)
