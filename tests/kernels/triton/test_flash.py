"""Prompts by flash-attn, with a stand-in for the package."""

import sys
from dataclasses import replace

import flash_package
import pytest
import torch
from reference import reference_attention
from triton_cases import check, draw_caches, in_pages, run

from paceline.cuda.kernels import cuda_kernels
from paceline.kernels import AttentionCall, DeviceKernels, QueryBlock, plan_trees

PROMPTS = {
    "of two texts": ([QueryBlock(0, 300, None, 3), QueryBlock(1, 0, None, 7)], [303, 7]),
    "in parts": ([QueryBlock(0, 0, None, 5), QueryBlock(0, 5, None, 2)], [5, 7]),
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DeviceKernels:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_package.module())
    flash_package.CALLS.clear()
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
    assert [(True, keys_seen)] == flash_package.CALLS


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
    assert not flash_package.CALLS


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
    assert len(flash_package.CALLS) == 4
