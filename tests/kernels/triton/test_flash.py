"""Backends of installed packages, with stand-ins for these."""

from __future__ import annotations

import sys

import flash_packages
import pytest
import torch
from reference import reference_attention
from triton_cases import check, draw_caches, in_pages, run

from paceline.kernels import AttentionBackend, AttentionCall, TreeSegment, plan_trees
from paceline.kernels.attention import cuda_backend

TREE = TreeSegment(0, 300, (-1, 0, 0), 3)
SHORT = TreeSegment(0, 9, (-1, -1), 2)
CASES = {
    "trees": ([TREE, TreeSegment(1, 5, None, 2), TreeSegment(2, 256, (-1, -1), 2)], [256, 256]),
    "all have a prefix": ([TREE, TreeSegment(1, 290, (-1,), 1)], [256, 256]),
    "chains": ([TreeSegment(0, 300, None, 3), TreeSegment(1, 0, None, 7)], [303, 7]),
    "parts of a prompt": ([TreeSegment(0, 0, None, 5), TreeSegment(0, 5, None, 2)], [5, 7]),
    "plain decoding": ([TreeSegment(0, 511, None, 1), TreeSegment(1, 20, (-1,), 1)], [512, 21]),
}


@pytest.fixture(params=["flash_attn", "flash_attn_3", "flashinfer"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    for name, module in flash_packages.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    flash_packages.CALLS.clear()
    made = cuda_backend(request.param)
    assert made.name == request.param
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_package_attends_to_what_is_no_tree(backend: AttentionBackend, name: str) -> None:
    """To chains as a whole; else to tiles of prefixes, merged with what the kernels do."""
    torch.manual_seed(0)
    segments, keys_seen = CASES[name]
    sequences = [TreeSegment(0, 0, None, 7)] if name == "parts of a prompt" else segments
    q, keys, values = draw_caches(sequences, (4, 2, 64), torch.float16)
    expected = reference_attention(q, keys, values, plan_trees(segments), scale=0.125)
    paged = in_pages(keys, values, 256)
    check(run(segments, q, *paged, None, backend=backend), expected, torch.float16)
    assert [(all(s.is_chain for s in segments), keys_seen)] == flash_packages.CALLS


def test_other_calls_are_left_to_the_kernels(backend: AttentionBackend) -> None:
    torch.manual_seed(0)
    q, keys, values = draw_caches([TREE], (4, 2, 64), torch.float16)
    paged, plan = in_pages(keys, values, 256), plan_trees([TREE])
    sinks, window = torch.randn(4), 40
    for planes, how in (
        ((keys, values), {}),
        (paged, {"window": window}),
        (paged, {"sinks": sinks}),
        (in_pages(keys, values, 16), {} if backend.name == "flash_attn" else {"sinks": sinks}),
    ):
        found = run([TREE], q, *planes, how.get("window"), backend=backend, sinks=how.get("sinks"))
        if not how:
            check(found, reference_attention(q, keys, values, plan, scale=0.125), q.dtype)
        assert found[0].isfinite().all()
    q, keys, values = draw_caches([SHORT], (4, 2, 64), torch.float16)
    run([SHORT], q, *in_pages(keys, values, 256), None, backend=backend)
    assert not flash_packages.CALLS, "and no tile of the last prefix is whole"


def test_layers_share_a_plan(backend: AttentionBackend) -> None:
    """And two plans in turns do not take each other's."""
    torch.manual_seed(0)
    cases = []
    for segment in (TreeSegment(0, 300, None, 3), TreeSegment(0, 40, None, 2)):
        q, keys, values = draw_caches([segment], (4, 2, 64), torch.float16)
        plan = plan_trees([segment])
        expected = reference_attention(q, keys, values, plan, scale=0.125)
        cases.append((q, *in_pages(keys, values, 256), plan, expected))
    for index in (0, 0, 1, 0):
        q, keys, values, plan, expected = cases[index]
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        backend.attend(AttentionCall(q, keys, values, plan, 0.125, None, out, lse))
        check((out, lse), expected, q.dtype)
    assert len(flash_packages.CALLS) == (3 if backend.name == "flashinfer" else 4)
