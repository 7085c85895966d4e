"""Attention over token trees, sampling noise and filters: one public function each.

Backends are chosen by device in :func:`backend_for`. Imports nothing but torch and numpy.
"""

from paceline.kernels.attention import (
    AttentionBackend,
    backend_for,
    register_backend,
    tree_attention,
)
from paceline.kernels.history import History
from paceline.kernels.noise import gumbel_noise, gumbel_noise_at, philox
from paceline.kernels.rows import Norm, RowKernels, row_kernels
from paceline.kernels.sampling import SamplingParams, choose_token, filter_logits, raw_logprobs
from paceline.kernels.trees import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment, plan_trees

__all__ = [
    "CHUNK",
    "MAX_TREE_NODES",
    "AttentionBackend",
    "History",
    "Norm",
    "RowKernels",
    "SamplingParams",
    "TreePlan",
    "TreeSegment",
    "backend_for",
    "choose_token",
    "filter_logits",
    "gumbel_noise",
    "gumbel_noise_at",
    "philox",
    "plan_trees",
    "raw_logprobs",
    "register_backend",
    "row_kernels",
    "tree_attention",
]
