"""Prompts by flash-attn, with a stand-in for the package."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from reference import reference_attention
from torch import Tensor
from triton_cases import check, draw_caches, in_pages, run

from paceline.cuda.kernels import cuda_kernels
from paceline.kernels import AttentionCall, DeviceKernels, QueryBlock, plan_trees

PROMPTS = {
    "of two texts": ([QueryBlock(0, 300, None, 3), QueryBlock(1, 0, None, 7)], [303, 7]),
    "in parts": ([QueryBlock(0, 0, None, 5), QueryBlock(0, 5, None, 2)], [5, 7]),
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DeviceKernels:
    monkeypatch.setitem(sys.modules, "flash_attn", module())
    CALLS.clear()
    return cuda_kernels("flash_attn")


@pytest.mark.parametrize("name", PROMPTS)
def test_the_package_attends_to_prompts(backend: DeviceKernels, name: str) -> None:
    torch.manual_seed(0)
    blocks, keys_seen = PROMPTS[name]
    blocks = [replace(block, final=True) for block in blocks]
    sequences = [QueryBlock(0, 0, None, 7)] if name == "in parts" else blocks
    q, keys, values = draw_caches(sequences, (4, 2, 64), torch.float16)
    expected = reference_attention(q, keys, values, plan_trees(blocks), scale=0.125)
    paged = in_pages(keys, values, 256)
    check(run(blocks, q, *paged, None, backend=backend), expected, torch.float16)
    assert [(True, keys_seen)] == CALLS


def test_other_calls_are_left_to_the_kernels(backend: DeviceKernels) -> None:
    """Of plain decoding, chains and trees, whose rows must have equal bits, and what the package
    does not do."""
    torch.manual_seed(0)
    prompt = QueryBlock(0, 300, None, 3, final=True)
    q, keys, values = draw_caches([prompt], (4, 2, 64), torch.float16)
    paged = in_pages(keys, values, 256)
    for block, planes, window, sinks in (
        (QueryBlock(0, 300, None, 3), paged, None, None),
        (QueryBlock(0, 300, (-1, 0, 0), 3), paged, None, None),
        (prompt, (keys, values), None, None),
        (prompt, in_pages(keys, values, 16), None, None),
        (prompt, paged, 40, None),
        (prompt, paged, None, torch.randn(4)),
    ):
        found = run([block], q, *planes, window, backend=backend, sinks=sinks)
        assert found[0].isfinite().all()
    assert not CALLS


def test_layers_share_a_plan(backend: DeviceKernels) -> None:
    """And two plans in turns do not take each other's."""
    torch.manual_seed(0)
    cases = []
    for block in (QueryBlock(0, 300, None, 3, True), QueryBlock(0, 40, None, 2, True)):
        q, keys, values = draw_caches([block], (4, 2, 64), torch.float16)
        plan = plan_trees([block])
        expected = reference_attention(q, keys, values, plan, scale=0.125)
        cases.append((q, *in_pages(keys, values, 256), plan, expected))
    for index in (0, 0, 1, 0):
        q, keys, values, plan, expected = cases[index]
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        backend.attend(AttentionCall(q, keys, values, plan, 0.125, None, out, lse))
        check((out, lse), expected, q.dtype)
    assert len(CALLS) == 4


# Of each call, whether it was causal and the numbers of keys.
CALLS: list[tuple[bool, list[int]]] = []


def attend(
    q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, count: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """One sequence: ``[n, Hq, D]`` and log-sum-exp ``[n, Hq]``, keys ``[pages, slots, Hkv, D]``."""
    key, value = (each[pages.long()].flatten(0, 1)[:count] for each in (keys, values))
    group = q.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1).float() for each in (key, value))
    scores = torch.einsum("nhd,shd->nhs", q.float(), key) * scale
    if causal:  # aligned with the ends
        seen = torch.ones(len(q), count, dtype=torch.bool).tril(count - len(q))
        scores.masked_fill_(~seen[:, None], -torch.inf)
    out = torch.einsum("nhs,shd->nhd", scores.softmax(-1), value)
    return out.half(), scores.logsumexp(-1)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float, causal: bool, return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention 2: a padded batch ``[S, n, Hq, D]``, log-sum-exp ``[S, Hq, n]``."""
    assert return_softmax_lse
    assert k_cache.shape[1] % 256 == 0
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    CALLS.append((causal, cache_seqlens.tolist()))
    found = [
        attend(row, k_cache, v_cache, table, count, softmax_scale, causal)
        for row, table, count in zip(q, block_table, cache_seqlens.tolist(), strict=True)
    ]
    out, lse = (torch.stack(each) for each in zip(*found, strict=True))
    return out, lse.transpose(1, 2)


def module() -> ModuleType:
    made = ModuleType("flash_attn")
    made.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    return made
