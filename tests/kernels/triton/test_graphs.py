"""What CUDA graphs replay, without a graph: fixed tables, paged KV, Triton kernels."""

import gc
import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from plain_layers import keep_plain
from torch import Tensor
from triton_cases import Waits

from paceline.bench.gpu.cases import RandomWeights
from paceline.convert import Packer
from paceline.convert.families import layer_shapes
from paceline.cuda.graphs import FIXED_SHAPES, GraphRunner
from paceline.cuda.products import FIXED_ROWS
from paceline.decoder import (
    Decoder,
    DecoderConfig,
    ForwardResult,
    LocalCache,
)
from paceline.decoder.linear import FixedProducts
from paceline.device import CPU, SHAPES, Device, DeviceLost
from paceline.kernels import QueryBlock, plan_trees
from paceline.text import Text
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.job import CachedSequence, Prefill, Request
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.served import check_states

CONFIG = DecoderConfig(
    model_type="llama", layers=2, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32,
    vocab_size=50, max_position=1024, norm_eps=1e-5,
    rope_inv_freq=tuple(0.3**i for i in range(16)), rope_scaling=1.0, windows=(None, 40),
    qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True, tied=True, eos_token_ids=(),
    bos_token_id=None, dtype=torch.float32, kv_dtype=torch.float32, weights="float32",
)  # fmt: skip


def make_decoder(config: DecoderConfig = CONFIG) -> Decoder:
    """With random weights, the same each time."""
    return Decoder(
        config, Packer(config, RandomWeights(config, torch.device("cpu"), 0), "cpu"), "cpu"
    )


@pytest.fixture
def pool() -> PagePool:
    """A pool with one page for each of two sequences."""
    layout = KvLayout(CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim, CONFIG.dtype)
    made = PagePool(layout, CPU, kv_bytes=4 << 20, max_sequences=2, max_context=1024)
    made.tables[1, 0], made.tables[2, 0] = 3, 1
    return made


def test_padded_batches_give_what_the_plain_decoder_gives(
    request: pytest.FixtureRequest, pool: PagePool
) -> None:
    """Prefill and two trees of two sequences, with taps, through one shape after another."""
    plain = make_decoder()
    caches = [LocalCache(CONFIG) for _ in range(2)]
    request.getfixturevalue("triton_on_cpu")
    pool.kv.fill_(torch.nan)
    runner = GraphRunner(make_decoder(), pool)
    steps = [
        [QueryBlock(0, 0, None, 9), QueryBlock(1, 0, None, 5)],
        [QueryBlock(1, 5, (-1, 0, 0), 3), QueryBlock(0, 9, None, 2)],
        [QueryBlock(1, 7, None, 1)],
    ]
    logits = []
    for blocks in steps:
        tokens = torch.randint(50, (sum(block.length for block in blocks),)).tolist()
        found = runner.forward(tokens, blocks, [1, 2], taps=[1])
        assert found is not None
        expected = plain.forward(
            torch.tensor(tokens), plan_trees(blocks), caches, logit_rows=None, taps=[1]
        )
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.taps[0], expected.taps[0], atol=1e-4, rtol=1e-4)
        logits.append(found.logits)
    assert len(runner) == 3
    assert len({each.data_ptr() for each in logits}) == 1, "one buffer for all graphs"
    written = pool.kv.isfinite().all(-1).flatten(1).all(1)
    assert not written.any(), "no page is whole, and none but the two was touched"
    assert pool.kv[[0, 2]].isnan().all()


@pytest.mark.usefixtures("triton_on_cpu", "products_of_a_gpu")
def test_hidden_states_of_a_captured_pass_have_the_bits_of_a_plain_one(pool: PagePool) -> None:
    """As a verifier checks it when a drafter joins."""
    decoder, cache = make_decoder(), pool.allocate(256, None)
    cache.reserve(3)
    assert check_states(decoder, GraphRunner(decoder, pool), cache, (0, 1), 3) == ""
    cache.close()


def test_batches_beyond_every_shape_are_left_to_others(pool: PagePool) -> None:
    runner = GraphRunner(make_decoder(), pool)
    blocks = [QueryBlock(0, start, None, 256) for start in (0, 256)]
    blocks.append(QueryBlock(0, 512, None, 1))
    assert runner.forward([0] * 513, blocks, [1]) is None


def test_a_batch_that_needs_no_logits(request: pytest.FixtureRequest, pool: PagePool) -> None:
    """A part of a prompt in the middle, which a graph can run."""
    request.getfixturevalue("triton_on_cpu")
    decoder, kv = make_decoder(), pool.allocate(256, None)
    kv.reserve(20)
    batch = Batch()
    batch.add_prefill(Prefill(CachedSequence(Request(Text(tuple(range(9)))), kv)), 6)
    logits, _ = batch.forward(decoder, GraphRunner(decoder, pool))
    assert logits.shape == (0, 50)
    kv.close()


# 69 rows are those of LongSpec's tree, 288 those of 32 sequences with 8 nodes each.
NEXT_SHAPES = {1: 1, 3: 4, 17: 24, 69: 96, 100: 128, 256: 256, 288: 384, 512: 512}
NEXT_FIXED = {1: 64, 64: 64, 69: 128, 129: 192, 256: 256, 257: 384, 512: 512}


@pytest.mark.parametrize("shapes", [NEXT_SHAPES, NEXT_FIXED])
def test_after_the_warm_up_no_step_captures_a_graph(
    monkeypatch: pytest.MonkeyPatch, pool: PagePool, shapes: dict[int, int]
) -> None:
    """Nor compiles a kernel; half precision has tiles of several sizes. Where products have fixed
    numbers of rows, so have graphs."""
    kv = torch.empty(pool.kv.shape, dtype=torch.float16)
    monkeypatch.setattr(pool, "kv", kv)
    decoder = make_decoder()
    if shapes is NEXT_FIXED:
        decoder.products = FixedProducts({}, "", "")
    runner = GraphRunner(decoder, pool)
    monkeypatch.setattr(runner, "capture", lambda plan, *_: Captured(plan).run)
    reported = list(runner.warm_up())
    assert reported == [(n, len(runner)) for n in range(1, len(runner) + 1)]
    for rows, shape in shapes.items():
        for widest in (1, 5, 30, 200):
            blocks = [QueryBlock(0, 9, None, min(rows, widest))]
            blocks += [QueryBlock(1, 9, None, 1)] * (rows - blocks[0].length)
            Captured.runs.clear()
            runner.forward([0] * rows, blocks, [1, 2])
            assert Captured.runs == [shape]
    assert len(runner) == len(reported)


def test_graphs_have_sizes_that_products_have() -> None:
    assert set(FIXED_SHAPES) <= set(FIXED_ROWS)
    assert FIXED_SHAPES[-1] == SHAPES[-1], "no step loses its graph"


def test_a_graph_that_cannot_be_captured_ends_no_start(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pool: PagePool,
) -> None:
    """Whatever the error is, that of a compiler too; its batches run kernel by kernel."""
    request.getfixturevalue("triton_on_cpu")
    decoder, kv = make_decoder(), pool.allocate(256, None)
    runner, capture = GraphRunner(decoder, pool), GraphRunner.capture

    def fail(plan: Any, *given: Any) -> Any:
        if plan.rows > 2:
            raise MemoryError("out of resource: shared memory")
        return capture(runner, plan, *given)

    monkeypatch.setattr(runner, "capture", fail)
    shapes = (1, 2, 8, 512)
    monkeypatch.setattr(runner, "shapes", shapes)
    assert list(runner.warm_up())[-1] == (len(shapes), len(shapes))
    assert (len(runner), runner.failed) == (2, 2)
    runner.report()
    assert "no CUDA graph of 512 rows" in caplog.text
    assert "2 could not be captured" in caplog.text
    kv.reserve(8)
    expected = []
    for graphs in (runner, None):
        batch = Batch()
        batch.add_prefill(Prefill(CachedSequence(Request(Text(tuple(range(9)))), kv)), 6)
        expected.append(batch.forward(decoder, graphs)[0])
    assert torch.equal(*expected)
    assert runner.forward([1], [QueryBlock(0, 3, None, 1)], [1]) is not None
    kv.close()
    required = GraphRunner(decoder, pool, required=True)
    monkeypatch.setattr(required, "capture", fail)
    with pytest.raises(MemoryError, match="shared memory"):
        next(required.warm_up())


def test_a_capture_that_loses_the_device_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    runner = GraphRunner(make_decoder(), pool)

    def fail(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(runner, "capture", fail)
    monkeypatch.setattr(Device, "lost", lambda device: DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        next(runner.warm_up())


class Captured:
    runs: ClassVar[list[int]] = []  # rows of the plans that were run

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def run(self) -> ForwardResult:
        self.runs.append(self.plan.rows)
        return ForwardResult(torch.empty(self.plan.rows, 50))


@pytest.mark.usefixtures("triton_on_cpu", "products_of_a_gpu")
def test_a_row_whose_heads_share_a_norm_has_the_same_bits_alone_and_beside_others(
    pool: PagePool,
) -> None:
    """As in OLMo 2: queries and keys are normalised with all heads of their row together."""
    config = replace(CONFIG, model_type="olmo2", layers=1, windows=(None,))
    shapes = {f"model.layers.0.{name}": of for name, of in layer_shapes(config).items()}
    shapes |= {"model.embed_tokens.weight": (50, config.hidden), "model.norm.weight": (64,)}
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (config.q_heads * config.head_dim,)
    torch.manual_seed(0)
    weights = {name: torch.randn(of) for name, of in shapes.items()}
    decoder = Decoder(config, Packer(config, weights, "cpu"), "cpu")
    runner, text = GraphRunner(decoder, pool), [5, 6, 7]

    def forward(tokens: list[int], *blocks: QueryBlock) -> Tensor:
        found = runner.forward(tokens, blocks, [1, 2])
        assert found is not None
        return found.logits.clone()

    alone = [forward([token], QueryBlock(0, at, None, 1)) for at, token in enumerate(text)]
    beside = forward([*text, *range(9)], QueryBlock(1, 0, None, 3), QueryBlock(0, 0, None, 9))
    assert torch.equal(beside[:3], torch.cat(alone))
    assert beside[:3].isfinite().all()


MIXTURE = replace(CONFIG, model_type="qwen3_moe", experts=5, experts_per_token=2)


def test_a_mixture_of_experts_can_be_captured(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    """The whole pass: which experts a row has is known on the device alone."""
    tokens, blocks = [3, 1, 4, 2], [QueryBlock(0, 0, None, 4)]
    wanted = make_decoder(MIXTURE).forward(
        torch.tensor(tokens), plan_trees(blocks), [LocalCache(MIXTURE)], logit_rows=None
    )
    request.getfixturevalue("triton_on_cpu")
    keep_plain(monkeypatch)
    decoder = make_decoder(MIXTURE)
    runner = GraphRunner(decoder, pool)
    assert runner.forward(tokens, blocks, [1]) is not None
    ((_, run),) = runner._graphs.values()
    with torch.inference_mode(), Waits():
        found = run()
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)


# Kernels are compiled before the passes that launch them, all at once


def gate() -> torch.Tensor:
    from paceline.cuda.triton.backend import TritonRows

    return TritonRows().gate(torch.ones(2, 8))


def test_a_pass_that_only_compiles_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that fails, which is reported and ends nothing."""
    from paceline.cuda.triton import backend
    from paceline.cuda.triton.ahead import compile_ahead

    wanted, found = gate(), []
    monkeypatch.setattr(backend.torch, "empty", torch.zeros)
    compile_ahead([lambda: found.append(gate())])
    assert torch.equal(found[0], torch.zeros_like(wanted))
    assert torch.equal(gate(), wanted)


def test_a_pass_that_fails_is_reported_and_the_next_one_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from paceline.cuda.triton.ahead import compile_ahead

    ran: list[bool] = []

    def fail() -> None:
        raise RuntimeError("the device has no memory")

    with caplog.at_level(logging.WARNING):
        compile_ahead([fail, lambda: ran.append(gc.isenabled())])
    assert ran == [False], "a collection would let two threads parse at once"
    assert gc.isenabled()
    assert "the device has no memory" in caplog.text
    assert gate().any(), "launches launch again"
