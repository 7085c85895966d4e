"""Attention over token trees, KV selection, sampling noise and filters: one public function each.

On a CPU programs are compiled; :func:`kernels_for` has the kernels of other devices. Imports
nothing but torch and numpy.
"""

from paceline.kernels._compile import processor, processor_name
from paceline.kernels._native import NUMERICS, KernelsError, choose_numerics, cpu_kernels
from paceline.kernels.attention import MAX_PROBES, AttentionCall, GraphProbes, Probe, ProbedBlock
from paceline.kernels.caches import KVCacheView, LayerTable, PagedPlane, Plane
from paceline.kernels.delta import Delta, DeltaShape, RecurrentStates
from paceline.kernels.devices import DeviceKernels, kernels_for, tree_attention
from paceline.kernels.executor import Executor
from paceline.kernels.noise import gumbel_noise_at
from paceline.kernels.program import (
    MAX_EXPERTS,
    Context,
    Heads,
    Pass,
    Program,
    Recorder,
    Routing,
    Rule,
)
from paceline.kernels.rows import Norm
from paceline.kernels.sampling import (
    Edits,
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    best_candidates,
    choose_token,
    choose_tokens,
    edit_rows,
    edits,
    filter_logits,
    perturbed_logits,
    raw_logprobs,
)
from paceline.kernels.selection import (
    SELECTION_CHUNK,
    SINKS,
    PageBounds,
    attention_weights,
    best_chunks,
    streaming,
)
from paceline.kernels.structures import MAX_TAPS
from paceline.kernels.trees import (
    CHUNK,
    MAX_TREE_NODES,
    EqualBlocks,
    LevelBlock,
    QueryBlock,
    TreePlan,
    plan_trees,
    send,
)

__all__ = [
    "CHUNK", "MAX_EXPERTS", "MAX_PROBES", "MAX_TAPS", "MAX_TREE_NODES", "NUMERICS",
    "SELECTION_CHUNK", "SINKS", "AttentionCall", "Context", "Delta", "DeltaShape", "DeviceKernels",
    "Edits", "EqualBlocks", "Executor", "GraphProbes", "Heads", "History", "KVCacheView",
    "KernelsError", "LayerTable", "LevelBlock", "Norm", "PageBounds", "PagedPlane", "Pass", "Plane",
    "Probe", "ProbedBlock", "Program", "Proposal", "QueryBlock", "Recorder", "RecurrentStates",
    "Routing", "Rule", "SamplingRules", "TreePlan", "accept_or_resample", "attention_weights",
    "best_candidates", "best_chunks", "choose_numerics", "choose_token", "choose_tokens",
    "cpu_kernels", "edit_rows", "edits", "filter_logits", "gumbel_noise_at", "kernels_for",
    "perturbed_logits", "plan_trees", "processor", "processor_name", "raw_logprobs", "send",
    "streaming", "tree_attention",
]  # fmt: skip
