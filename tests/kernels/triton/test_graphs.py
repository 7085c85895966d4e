"""What CUDA graphs replay, without a graph: fixed tables, paged KV, Triton kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from launches import Launches
from plain_layers import keep_plain
from torch import Tensor
from triton_cases import Waits

from paceline.bench.gpu.cases import RandomWeights
from paceline.convert import Packer
from paceline.convert.families import layer_shapes
from paceline.decoder import (
    Decoder,
    DecoderConfig,
    DeviceLost,
    ForwardResult,
    GraphRunner,
    LocalCache,
)
from paceline.decoder.graphs import FIXED_SHAPES, SHAPES
from paceline.decoder.linear import Experts
from paceline.decoder.products import FIXED_ROWS, FixedProducts
from paceline.kernels import PagedPlane, QueryBlock, plan_trees, rotated
from paceline.kv.selection import AttentionScores, PageScores, Rows
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.batch import Batch, BatchObserver
from paceline.verifier.engine.job import CachedSequence, Decode, Prefill, Request
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.model import check_states

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
    device = torch.device("cpu")
    made = PagePool(layout, device, kv_bytes=4 << 20, max_sequences=2, max_context=1024)
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": True},
        {"cumulative": True},
        {"rows": Rows.ALL},
        {"rows": Rows.LAST, "weights": True},
    ],
)
def test_scores_are_noted_in_a_captured_pass_as_in_a_plain_one(
    request: pytest.FixtureRequest, pool: PagePool, options: dict[str, Any]
) -> None:
    """Of a sequence with three rows and one with a row, in the layer without a window."""
    pool.kv.copy_(torch.randn(pool.kv.shape))
    blocks = [QueryBlock(0, 70, (-1, 0, 0), 3), QueryBlock(1, 33, None, 1)]
    views = [RowView(pool, row) for row in (1, 2)]
    published = []
    for captured in (False, True):
        batch, decoder = BatchObserver(), make_decoder()
        observers = [AttentionScores(view, [0], **options) for view in views]
        for index, observer in enumerate(observers):
            batch.add(observer, index, blocks[index], 3 * index)
        if captured:
            request.getfixturevalue("triton_on_cpu")
            runner = GraphRunner(decoder, pool)
            layers, probed = batch.scratch(CONFIG.windows)
            found = runner.forward([5, 6, 7, 8], blocks, [1, 2], (), layers, probed)
            assert found is not None
        else:
            plan = plan_trees(blocks)
            tokens = torch.tensor([5, 6, 7, 8])
            decoder.forward(tokens, plan, views, logit_rows=None, observer=batch)
        batch.publish(CONFIG.q_heads)
        for node, observer in zip((2, 0), observers, strict=True):
            observer.accepted(node)
        published.append([observer.scores.clone() for observer in observers])
    for plain, replayed, block in zip(*published, blocks, strict=True):
        assert replayed.shape == (1, block.start // observers[0].chunk)
        torch.testing.assert_close(plain, replayed, atol=1e-4, rtol=1e-4)
    again = runner.forward([5, 6], blocks[1:], [1, 2])
    assert again is not None, "the next batch has nothing to note"


def test_what_a_captured_pass_cannot_note_is_left_to_others() -> None:
    batch, cache, block = BatchObserver(), Cache(), QueryBlock(0, 20, None, 1)
    assert batch.scratch(CONFIG.windows) == ((), [])
    batch.add(AttentionScores(cache, [0]), 0, block, 0)
    batch.add(AttentionScores(cache, [0], cumulative=True), 1, block, 1)
    layers, probed = batch.scratch(CONFIG.windows)
    assert (layers, [each.again for each in probed]) == ((0,), [False, True])
    assert batch.scratch((40, 40)) == ((), []), "a window hides positions"
    batch.add(AttentionScores(cache, [0], weights=True), 1, block, 1)
    assert batch.scratch(CONFIG.windows) == ((), []), "two of one block"
    batch = BatchObserver()
    batch.add(PageScores(cache, [0]), 0, block, 0)
    assert batch.scratch(CONFIG.windows) == ((), []), "queries"


class Cache:
    """An empty cache, to be observed."""

    capacity = 256
    device = torch.device("cpu")

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.empty(2, CONFIG.kv_heads, self.capacity, CONFIG.head_dim)
        return keys, values


class RowView:
    """The cache of one row of a pool's page tables."""

    table = None
    capacity = 256
    device = torch.device("cpu")

    def __init__(self, pool: PagePool, row: int) -> None:
        self.pool, self.row = pool, row

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        return self.pool.layer(index, self.row, 256)


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


@pytest.mark.parametrize("rows", [300, 512, 513])
def test_a_piece_of_a_prompt_takes_the_graph_that_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, pool: PagePool, rows: int
) -> None:
    decoder, kv = make_decoder(), pool.allocate(1024, None)
    runner = GraphRunner(decoder, pool)
    monkeypatch.setattr(runner, "capture", lambda plan, *_: Captured(plan).run)
    kv.reserve(rows)
    batch = Batch()
    batch.add_prefill(Prefill(CachedSequence(Request(Text(tuple(range(40)) * 13)), kv)), rows)
    assert (batch._replay(decoder, runner, ()) is None) == (rows > 512)
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
    assert len(reported) == (6 if shapes is NEXT_FIXED else 15), "each takes time of a start"
    assert reported == [(n, len(runner)) for n in range(1, len(runner) + 1)]
    for rows, shape in shapes.items():
        for widest in (1, 5, 30, 200):
            blocks = [QueryBlock(0, 9, None, min(rows, widest))]
            blocks += [QueryBlock(1, 9, None, 1)] * (rows - blocks[0].length)
            Captured.runs.clear()
            runner.forward([0] * rows, blocks, [1, 2])
            assert Captured.runs == [shape]
    assert len(runner) == len(reported)


def test_graphs_with_hidden_states_are_captured_before_a_step_needs_one(
    monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    """Those of all drafters at once: a step with some of the layers takes no graph of its own."""
    runner = GraphRunner(make_decoder(), pool)
    made: list[tuple[int, ...]] = []

    def capture(plan: Any, taps: Any, layers: Any) -> Any:
        made.append(taps)
        run = Captured(plan).run
        states = tuple(torch.full((plan.rows, 4), float(layer)) for layer in taps)
        return lambda: replace(run(), taps=states)

    monkeypatch.setattr(runner, "capture", capture)
    plain = len(list(runner.warm_up()))
    assert len(list(runner.warm_up((0, 1)))) == plain
    assert made == [()] * plain + [(0, 1)] * plain
    for taps in ((), (1,), (0,), (0, 1), (1, 0)):
        for rows in (1, 64, 300):
            blocks = [QueryBlock(0, 9, None, 1)] * rows
            found = runner.forward([0] * rows, blocks, [1], taps)
            assert found is not None
            assert [tap.unique().tolist() for tap in found.taps] == [[layer] for layer in taps]
            assert all(len(tap) == rows for tap in found.taps)
    assert len(runner) == 2 * plain
    list(runner.warm_up((0, 1)))
    assert len(runner) == 2 * plain, "drafters that join again need no more"


def test_the_next_step_of_plain_decoding_is_prepared_while_a_gpu_computes(
    monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    """Then it writes its tokens alone. A step that comes otherwise has its own tables."""
    from paceline.kernels.triton.plan import PassTables

    decoder, fill = make_decoder(), PassTables.fill
    runner = GraphRunner(decoder, pool)
    plans: list[Any] = []

    def capture(plan: Any, *_: Any) -> Any:
        plans.append(plan)
        return Captured(plan).run

    monkeypatch.setattr(runner, "capture", capture)
    filled: list[None] = []

    def counted(*args: Any) -> bool:
        filled.append(None)
        return fill(*args)

    monkeypatch.setattr(PassTables, "fill", counted)
    caches = [pool.allocate(512, None) for _ in range(2)]
    sequences = [CachedSequence(Request(Text((1,) * 9)), cache) for cache in caches]

    def step(lengths: tuple[int, int], tree: TokenTree = EMPTY) -> tuple[int, Any]:
        """Tables filled for a step, and those that it runs with; then prepares the next one."""
        batch = Batch()
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.committed = length
            batch.add_decode(Decode(sequence), tree)
        filled.clear()
        assert batch._replay(decoder, runner, ()) is not None
        found = len(filled)
        tables = [each.clone() for each in plans[-1]._staging.device]
        batch.prepare_next(runner)
        return found, tables

    assert step((4, 7))[0] > 0
    prepared, tables = step((5, 8))
    assert prepared == 0
    for plan in plans:
        plan._filled = None
    fresh, expected = step((5, 8))
    assert fresh > 0
    assert all(map(torch.equal, tables, expected))
    assert step((7, 9))[0] > 0, "a text went on by two tokens"
    assert step((8, 10), TokenTree((1,), (-1,)))[0] > 0
    assert step((9, 11))[0] > 0, "a step with drafts prepares none"
    for cache in caches:
        cache.close()


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
    first, count = caplog.messages
    assert first == (
        "no CUDA graph of 512 rows, whose work runs kernel by kernel: out of resource: shared "
        "memory"
    )
    assert count == "CUDA graphs of steps: 2; 2 could not be captured"
    assert caplog.text.count("Traceback") == 1
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
    monkeypatch.setattr("paceline.decoder.graphs.device_lost", lambda device: DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        next(runner.warm_up())


class Captured:
    """Runs nothing."""

    runs: ClassVar[list[int]] = []  # rows of the plans that were run

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def run(self) -> ForwardResult:
        self.runs.append(self.plan.rows)
        return ForwardResult(torch.empty(self.plan.rows, 50))


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_layer_launches_its_kernels_and_no_others(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    pool: PagePool,
    weights: str,
) -> None:
    """The project's own, beside the products: nothing is copied or filled between them."""
    from paceline.kernels.triton import products

    request.getfixturevalue("triton_on_cpu")
    for module in ("decoder.model", "convert.pack", "convert.weights"):
        monkeypatch.setattr(
            f"paceline.{module}.is_rotated", lambda weights, device: weights == "int8"
        )
    decoder = make_decoder(replace(CONFIG, weights=weights, tied=False))
    monkeypatch.setattr(rotated, "quantise_rows", products.quantise_rotated)
    monkeypatch.setattr(rotated, "scale_sums", products.scaled_sums)
    decoder.products = FixedProducts({}, "", "")  # graphs have as many rows as products need
    runner = GraphRunner(decoder, pool)
    blocks = [QueryBlock(0, 0, None, 2)]
    runner.forward([1, 2], blocks, [1])
    ((_, run),) = runner._graphs.values()
    with torch.inference_mode(), Launches() as launched:
        run()
    found, layers = Counter(launched.names), CONFIG.layers
    kernels = ("attend_items", "merge_items", "rotate_rows", "gate_rows")
    assert [found.pop(kernel) for kernel in kernels] == [layers] * len(kernels)
    products = 4 * layers + 1
    if weights == "float32":
        assert found.pop("product") == products
    else:
        assert [found.pop(name) for name in ("quantise_rotated_rows", "_int_mm")] == [products] * 2
        assert found.pop("scale_int_sums") == 2, "others are scaled by the kernels that read them"
    assert found.pop("add_norm_rows") == 2 * layers + 1
    assert sum(found.values()) == 3, "embedding, last residual, and the copy of logits"


def test_products_of_integers_give_what_torch_gives(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pool: PagePool
) -> None:
    """Kernels scale what they read. Queries are as wide as the model, so that they take the buffer
    of an earlier product."""
    from paceline.kernels.triton import products

    for module in ("decoder.model", "convert.pack", "convert.weights"):
        monkeypatch.setattr(f"paceline.{module}.is_rotated", lambda *_: True)
    config = replace(CONFIG, weights="int8", hidden=CONFIG.q_heads * CONFIG.head_dim)
    decoder, cache = make_decoder(config), LocalCache(config)
    tokens, blocks = list(range(7)), [QueryBlock(0, 0, None, 7)]
    wanted = decoder.forward(torch.tensor(tokens), plan_trees(blocks), [cache], logit_rows=None)
    request.getfixturevalue("triton_on_cpu")
    monkeypatch.setattr(rotated, "quantise_rows", products.quantise_rotated)
    monkeypatch.setattr(rotated, "scale_sums", products.scaled_sums)
    found = GraphRunner(decoder, pool).forward(tokens, blocks, [1])
    assert found is not None
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)


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
    from paceline.kernels.triton.products import multiply_by_experts

    def multiply(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
        assert experts._stacked is not None
        return multiply_by_experts(x, experts._stacked, experts._bias, chosen)

    tokens, blocks = [3, 1, 4, 2], [QueryBlock(0, 0, None, 4)]
    wanted = make_decoder(MIXTURE).forward(
        torch.tensor(tokens), plan_trees(blocks), [LocalCache(MIXTURE)], logit_rows=None
    )
    request.getfixturevalue("triton_on_cpu")
    keep_plain(monkeypatch)
    decoder = make_decoder(MIXTURE)
    for layer in decoder._layers:
        for experts in (layer.gate_up, layer.down):
            assert isinstance(experts, Experts)
            experts.stack()
    monkeypatch.setattr(Experts, "__call__", multiply)
    runner = GraphRunner(decoder, pool)
    assert runner.forward(tokens, blocks, [1]) is not None
    ((_, run),) = runner._graphs.values()
    with torch.inference_mode(), Waits():
        found = run()
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
