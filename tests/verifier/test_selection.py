"""Selection policies: scores from verification, and the positions that are selected by them."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import until
from hypothesis import given
from hypothesis import strategies as st
from kv_support import caught_up, following, rounds
from torch import Tensor
from verifier_support import Serve

from paceline.convert import load_decoder
from paceline.drafter.kv import KvOptions
from paceline.drafter.kv.remote import SparseView
from paceline.kernels import SELECTION_CHUNK, PageBounds, QueryBlock, plan_trees
from paceline.kernels.caches import from_rows
from paceline.kv.policies import load_policy
from paceline.kv.selection import PAGE, InWindows, ScoreObserver, TopScores
from paceline.verifier.engine.batch import BatchObserver
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.segment import Segment, SegmentMemory

POLICIES = ("verified", "chunk_topk", "verified_pages", "verified_last_weights")
SCORED = (*POLICIES, "verified_weights", "verified_all", "verified_all_weights", "verified_last")


class Seen:
    def __init__(self, rows: int) -> None:
        self.q: dict[int, Tensor] = {}
        self._rows = range(rows)

    def probes(self, layer: int) -> list[Any]:
        return []

    def rows(self, layer: int) -> range:
        return self._rows

    def attended(self, layer: int, q: Tensor) -> None:
        self.q[layer] = q


def observer_of(policy: str, segment: Segment, layers: tuple[int, ...] = (0, 1)) -> ScoreObserver:
    observer = load_policy(policy)(segment, layers).observer
    assert observer is not None
    return observer


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *(("Llama", policy) for policy in SCORED),
        *product(("Mistral", "bf16", "int8 KV"), ("chunk_topk", "verified_pages")),
    ],
)
def test_scores_are_right_and_observers_change_nothing(
    models: dict[str, Path], family: str, policy: str
) -> None:
    """A batch of two trees and a plain step, two rounds: the same logits and KV, right scores."""
    kv = "int8" if family == "int8 KV" else "auto"
    decoder = load_decoder(models[family], kv_cache_dtype=kv)
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.kv_dtype)
    memory = SegmentMemory(layout, 1 << 30)
    pairs = [(Segment(memory, 768), Segment(memory, 768)) for _ in range(3)]
    prefixes, trees = (40, 300, 17), ((-1, 0, 0, 1), (-1, 0, 1, 2), None)
    observers = [observer_of(policy, watched) for watched, _ in pairs]
    weights = [torch.zeros(config.layers, 768, dtype=torch.float64) for _ in pairs]
    draws = torch.Generator().manual_seed(0)
    try:
        for start, both in zip(prefixes, pairs, strict=True):
            text = torch.randint(1, 60, (start,), generator=draws)
            for segment in both:
                segment.reserve(512)
                blocks = [
                    QueryBlock(0, at, None, min(256, start - at)) for at in range(0, start, 256)
                ]
                decoder.forward(text, plan_trees(blocks), [segment], logit_rows=None)
        for grown in (0, 1):  # the second round with the first's anchor committed
            blocks = [
                QueryBlock(index, start + grown, parents, len(parents or (0,)))
                for index, (start, parents) in enumerate(zip(prefixes, trees, strict=True))
            ]
            plan = plan_trees(blocks)
            tokens = torch.randint(1, 60, (plan.rows,), generator=draws)
            batch, seen = BatchObserver(), Seen(plan.rows)
            for index, (block, observer) in enumerate(zip(blocks, observers, strict=True)):
                batch.add(observer, index, block, plan.offsets[index])
            watched_side, plain_side = zip(*pairs, strict=True)
            observed = decoder.forward(
                tokens, plan, watched_side, logit_rows=None, observer=batch
            ).logits
            batch.publish(config.q_heads)
            plain_logits = decoder.forward(
                tokens, plan_trees(blocks), plain_side, logit_rows=None, observer=seen
            ).logits
            assert plain_logits.equal(observed)
            for index, (block, observer) in enumerate(zip(blocks, observers, strict=True)):
                watched, plain = pairs[index]
                assert watched.kv[..., : block.stop, :].equal(plain.kv[..., : block.stop, :])
                deepest = block.depths.index(max(block.depths))
                nodes = sorted({0, deepest})
                if "all" in policy:
                    nodes = [*range(block.length)]
                elif "last" in policy:
                    nodes = [min(1 + grown, block.length - 1)]
                observer.accepted(nodes[-1])
                found = observer.scores
                assert found is not None
                right = [
                    _scores(policy, seen.q[layer], plan, index, nodes, watched, layer, config, w)
                    for layer, w in zip(range(config.layers), weights[index], strict=True)
                ]
                torch.testing.assert_close(found.double(), torch.stack(right), rtol=1e-3, atol=1e-3)
    finally:
        for pair in pairs:
            for segment in pair:
                segment.close()


def _scores(
    policy: str, q: Tensor, plan: Any, index: int, nodes: list[int], cache: Segment, layer: int,
    config: Any, weights: Tensor,
) -> Tensor:  # fmt: skip
    """By the definitions, in float64."""
    block, window = plan.blocks[index], config.windows[layer]
    heads = torch.stack([q[plan.offsets[index] + node] for node in nodes]).double()
    group = config.q_heads // config.kv_heads
    keys = from_rows(cache.layer(layer)[0][:, : block.stop]).double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hpd->rhp", heads, keys) * config.head_dim**-0.5
    prefix = block.start
    if policy == "verified_pages":
        pages = keys[:, : prefix // PAGE * PAGE].unflatten(1, (-1, PAGE))
        low, high = pages.aminmax(dim=2)
        bound = torch.maximum(heads.unsqueeze(2) * low, heads.unsqueeze(2) * high).sum(-1)
        return bound.sum((0, 1))
    for row, node in enumerate(nodes):
        ancestors = torch.from_numpy(block.ancestors())[node]
        scores[row, :, prefix:].masked_fill_(~ancestors, -torch.inf)
        at = prefix + block.depths[node]
        if window is not None:
            scores[row, :, : max(0, at - window + 1)] = -torch.inf
    if not policy.endswith(("_weights", "chunk_topk")):
        return scores[..., :prefix].mean((0, 1))
    mean = scores.softmax(-1)[..., :prefix].mean((0, 1))
    if policy != "chunk_topk":
        return mean
    weights[:prefix] += mean
    whole = prefix // SELECTION_CHUNK * SELECTION_CHUNK
    return weights[:whole].unflatten(0, (-1, SELECTION_CHUNK)).sum(-1)


class FakeCache:
    """A cache of which nothing is read."""

    capacity = 0
    device = torch.device("cpu")

    def layer(self, index: int) -> Any:
        raise AssertionError("not read")


class Given(ScoreObserver):
    def __init__(self, scores: Tensor, chunk: int) -> None:
        super().__init__(range(len(scores)))
        self.scores, self.chunk = scores, chunk

    def begin(self, block: int, nodes: Any, prefix: int) -> None: ...

    def publish(self, q_heads: int) -> None: ...


@given(
    committed=st.integers(1, 400),
    behind=st.integers(0, 30),
    budget=st.integers(1, 500),
    size=st.sampled_from([1, SELECTION_CHUNK, PAGE]),
    seed=st.integers(0, 99),
)
def test_the_best_and_all_newer_positions_are_selected(
    committed: int, behind: int, budget: int, size: int, seed: int
) -> None:
    prefix = max(0, committed - behind) // size
    scores = torch.randn(3, prefix, generator=torch.Generator().manual_seed(seed))
    chosen = TopScores(FakeCache(), Given(scores, size)).choose(committed, budget)
    assert len({len(positions) for positions in chosen}) == 1
    newer = set(range(prefix * size, committed))
    for layer, positions in enumerate(chosen):
        found = positions.tolist()
        assert found == sorted(set(found))
        assert len(found) <= budget
        assert max(found) < committed
        if committed <= budget:
            assert found == list(range(committed))
            continue
        assert len(found) > budget - size
        if len(newer) + size <= budget:
            assert newer <= set(found)
            chunks = {position // size for position in set(found) - newer}
            left = set(range(prefix)) - chunks
            assert not left or min(scores[layer, list(chunks)]) >= max(scores[layer, list(left)])
        else:
            assert found == list(range(committed - budget, committed))


def test_layers_with_a_window_give_their_newest_positions() -> None:
    """As many as the others, where the policy knows only these."""
    scores = torch.randn(2, 90, generator=torch.Generator().manual_seed(0))
    dense = TopScores(FakeCache(), Given(scores, 1))
    chosen = InWindows(dense, [True, False, True, False]).choose(100, 30)
    assert [positions.tolist() for positions in chosen[::2]] == [[*range(70, 100)]] * 2
    for positions, expected in zip(chosen[1::2], dense.choose(100, 30), strict=True):
        assert positions.equal(expected)


def test_page_bounds_hold() -> None:
    """No key of a page scores higher than the bound, whenever the page was taken in."""
    torch.manual_seed(0)
    keys, q = torch.randn(3, 2, 100, 8), torch.randn(3, 2, 6, 8)
    bounds = PageBounds(16)
    assert bounds.scores(q).shape == (3, 0)
    for length in (3, 40, 41, 100):
        bounds.extend(list(keys), length)
    one = PageBounds(16)
    one.extend([keys[1]], 100)
    torch.testing.assert_close(one.scores(q[1:2])[0], bounds.scores(q)[1])
    scores = torch.einsum("lrhd,lhpd->lrhp", q, keys.repeat_interleave(3, 1))
    exact = scores[..., :96].unflatten(3, (6, 16)).amax(-1).sum((1, 2))
    assert (bounds.scores(q) >= exact - 1e-4).all()


@pytest.mark.parametrize("policy", POLICIES[:2])
async def test_drafters_get_the_selected_positions(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Two followers and a sparse view of one cache; observers are removed with them."""
    async with serve("Llama") as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(200)]
        fields = {"max_new_tokens": 40, "ignore_eos": True}
        truth = await client.generate(prompt, None, **fields)
        created = await client.create(prompt, **fields)
        exchange, kv = await following(client, created, budget=48, kv_policy=policy)
        other_exchange, other = await following(client, created, (1,), budget=32)
        options = KvOptions(kv="map", kv_policy=policy)
        view = await exchange.open(client.address, created.read_grant, (0, 1), options, 48)
        assert isinstance(view, SparseView)
        (cache,) = client.service.store
        number, sparse_bytes = 0, 2 * 48 * 8
        async for tokens in rounds(client, created, prompt, 36):
            number += 1
            committed = len(prompt) + len(tokens) - 1
            await caught_up(kv, committed, 48)
            await caught_up(other, committed, 32)
            delta = kv.cache
            assert delta is not None
            assert 48 - 16 < len(delta) <= 48
            if number % 2:
                await caught_up(view.selection, committed, 48)
            else:  # the selection of this round comes too late
                monkeypatch.setattr(view.selection, "refresh", lambda below, budget: 0)
            assert view.refresh(committed, 48) == committed
            selected = view.selection.cache
            assert selected is not None
            newer = torch.arange(view.selection.committed, committed)
            assert bool(len(newer)) == (number % 2 == 0)
            for index in (0, 1):
                theirs = cache.sequence.kv.layer(index)
                positions = torch.cat([selected.positions(index), newer])
                parts = zip(*view.parts(index), strict=True)
                for mine, plane in zip(delta.layer(index), theirs, strict=True):
                    assert mine.equal(plane[:, delta.positions(index)])
                for mine, plane in zip(parts, theirs, strict=True):
                    assert torch.cat(mine, 1).equal(plane[:, positions])
                if number % 2:
                    assert set(positions.tolist()) == set(delta.positions(index).tolist())
            monkeypatch.undo()
        assert tokens == truth[: len(tokens)]
        assert view.received < number * sparse_bytes, "positions only"
        assert len(cache.sequence.observers) == 2
        assert not torch.equal(delta.positions(0).sort().values, delta.positions(1).sort().values)
        for reader in (kv, other, view):
            reader.close()
        await until(lambda: not cache.sequence.observers)
        await exchange.close()
        await other_exchange.close()


@pytest.mark.parametrize("policy", POLICIES)
async def test_scores_begin_with_the_prompt(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Before any round, a drafter that announced its policy gets positions by attention."""
    prompt = [random.Random(1).randrange(1, 61) for _ in range(600)]
    async with serve("Llama") as client:
        plain = await client.create(prompt, max_new_tokens=9)
        scored = {(policy, (0, -1)), (policy, (99,)), ("unknown", (0,))}
        monkeypatch.setattr(client.service.exchange, "scored", lambda drafter: scored)
        created = await client.create(prompt, max_new_tokens=9)
        assert created.first.tokens == plain.first.tokens
        cache = client.service.store.find_granted(created.read_grant)
        [(_, chosen)] = cache.policies.items()
        chunk = chosen.observer.chunk
        if "last" not in policy:  # which row that is, a round tells
            assert chosen.observer.scores.shape == (2, (len(prompt) - SELECTION_CHUNK) // chunk)
        exchange, kv = await following(client, created, budget=64, kv_policy=policy)
        await caught_up(kv, len(prompt))
        first, _ = kv.cache.positions(0).sort()
        expected = chosen.choose(len(prompt), 64)[0]
        assert first.equal(expected)
        assert not cache.policies
        kv.close()
        await exchange.close()
