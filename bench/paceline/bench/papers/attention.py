"""The experiment about attention, which needs no drafter and no text."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.papers.bench import Bench, Samples, samples
from paceline.decoder import DecoderConfig
from paceline.kernels import (
    Heads,
    LayerTable,
    Pass,
    QueryBlock,
    Recorder,
    TreePlan,
    choose_numerics,
    cpu_kernels,
    plan_trees,
)
from paceline.kernels.dense import AttentionCall, DenseBackend
from paceline.kernels.executor import NativeProgram
from paceline.kernels.operations import run_one_by_one

_REPEATS = 5  # times that attention is measured, of which the shortest counts


def attention(bench: Bench) -> None:
    """Tree attention in two parts beside one masked attention, in PyTorch and in SDPA."""
    config = bench.source.config()
    for rows in bench.args.rows:
        bench.cell(f"{rows} rows", f"{rows} rows", partial(_attend, bench, config, rows))


class _OneLayer:
    """A cache of one layer, as programs see it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._planes = keys, values
        self.table = LayerTable([self._planes])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._planes


def _native(q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan) -> Callable[[], object]:
    """The attention of a decoder's step on the CPU, as a program of its own."""
    _, heads, dim = q.shape
    numerics = choose_numerics("auto")  # as a verifier with KV in bfloat16
    recorder = Recorder(Heads(heads, keys.shape[0], dim), torch.float32, numerics=numerics)
    rotated = recorder.rotate_queries(recorder.input(heads * dim))
    recorder.tap(recorder.attend(rotated, 0, None), 0)
    still = torch.tensor([1.0, 0.0]).repeat_interleave(dim // 2).repeat(plan.longest + 1, 1)
    call = Pass(
        None, plan, [_OneLayer(keys, values)], still, taps=(0,), inputs=q.flatten(1).float()
    )  # fmt: skip
    library = cpu_kernels().library
    program = recorder.finish()
    if library is None:
        return partial(run_one_by_one, program, call)
    return partial(NativeProgram(library, program).run, call)


def _attend(bench: Bench, config: DecoderConfig, rows: int) -> Samples:
    found = samples()
    scale = config.head_dim**-0.5
    parents = tuple((node - 1) // 2 if node else -1 for node in range(rows))  # a binary tree
    for context in bench.args.contexts:
        stop = context + rows
        q = torch.randn(rows, config.q_heads, config.head_dim).to(config.dtype)
        keys, values = (
            torch.randn(config.kv_heads, stop, config.head_dim).to(config.dtype) for _ in range(2)
        )
        plan = plan_trees([QueryBlock(0, context, parents, rows)])
        mask = torch.zeros(rows, stop, dtype=torch.bool)
        mask[:, :context] = True
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
            mask[node, context + node] = True
        out = torch.empty_like(q)
        call = AttentionCall(q, [keys], [values], plan, scale, None, out, None, ())
        queries, k, v = (each[None] for each in (q.transpose(0, 1), keys, values))
        sdpa = partial(
            scaled_dot_product_attention, queries, k, v, mask, scale=scale, enable_gqa=True
        )
        ways: dict[str, Callable[[], object]] = {
            "SDPA with a mask": sdpa,
            "masked in PyTorch": partial(DenseBackend().attend, call),
            "tree attention": _native(q, keys, values, plan),
        }
        for _ in range(bench.args.texts):
            for name, way in ways.items():
                shortest = min(_milliseconds(way) for _ in range(_REPEATS))
                found[name]["ms by tokens of context"][context].append((shortest, 1))
    return found


def _milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3
