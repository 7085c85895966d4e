"""Selection policies: what verification notes, and which positions follow from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_support import caught_up, following
from torch import Tensor
from verifier_support import LAYOUT, Round, serving, until

from paceline.decoder import Decoder
from paceline.drafter.kv import KvExchange, KvOptions, VerifierAccess
from paceline.drafter.kv.remote import RemoteKv, SparseView
from paceline.kernels import SELECTION_CHUNK, PageBounds, TreeSegment, plan_trees
from paceline.kv.policies import load_policy
from paceline.kv.scores import PAGE, ScoreObserver
from paceline.kv.selection import TopScores
from paceline.verifier.engine.observer import BatchObserver
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment

POLICIES = ("verified", "chunk_topk", "quest")


class Seen:
    """Keeps queries, and the attention's results with and without collectors."""

    def __init__(self) -> None:
        self.q: dict[int, Tensor] = {}

    def probes(self, layer: int) -> list[Any]:
        return []

    def attended(self, layer: int, q: Tensor) -> None:
        self.q[layer] = q.clone()


def observer_of(policy: str, segment: Segment, layers: tuple[int, ...] = (0, 1)) -> ScoreObserver:
    observer = load_policy(policy)(segment, layers).observer
    assert observer is not None
    return observer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "bf16"])
def test_what_is_collected_and_that_it_leaves_no_trace(
    models: dict[str, Path], family: str, policy: str
) -> None:
    """A batch of two trees and a plain step, two rounds: the same logits and KV, right scores."""
    decoder = Decoder.load(models[family])
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
    pairs = [(Segment(layout, 768), Segment(layout, 768)) for _ in range(3)]
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
                    TreeSegment(0, at, None, min(256, start - at)) for at in range(0, start, 256)
                ]
                decoder.forward(text, plan_trees(blocks), [segment], logit_rows=None)
        for grown in (0, 1):  # the second round with the first's anchor committed
            segments = [
                TreeSegment(index, start + grown, parents, len(parents or (0,)))
                for index, (start, parents) in enumerate(zip(prefixes, trees, strict=True))
            ]
            plan = plan_trees(segments)
            tokens = torch.randint(1, 60, (plan.rows,), generator=draws)
            batch, seen = BatchObserver(), Seen()
            for index, (segment, observer) in enumerate(zip(segments, observers, strict=True)):
                batch.add(observer, index, segment, plan.offsets[index])
            watched_side, plain_side = zip(*pairs, strict=True)
            observed = decoder.forward(
                tokens, plan, watched_side, logit_rows=None, observer=batch
            ).logits
            batch.publish()
            plain_logits = decoder.forward(
                tokens, plan_trees(segments), plain_side, logit_rows=None, observer=seen
            ).logits
            assert plain_logits.equal(observed)
            for index, (segment, observer) in enumerate(zip(segments, observers, strict=True)):
                watched, plain = pairs[index]
                assert watched.kv[..., : segment.stop, :].equal(plain.kv[..., : segment.stop, :])
                deepest = segment.depths.index(max(segment.depths))
                nodes = sorted({0, deepest})
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
    policy: str,
    q: Tensor,
    plan: Any,
    index: int,
    nodes: list[int],
    cache: Segment,
    layer: int,
    config: Any,
    weights: Tensor,
) -> Tensor:
    """By the definitions, in float64."""
    segment, window = plan.segments[index], config.windows[layer]
    heads = torch.stack([q[plan.offsets[index] + node] for node in nodes]).double()
    group = config.q_heads // config.kv_heads
    keys = cache.layer(layer)[0][:, : segment.stop].double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hpd->rhp", heads, keys) * config.head_dim**-0.5
    prefix = segment.start
    if policy == "quest":
        pages = keys[:, : prefix // PAGE * PAGE].unflatten(1, (-1, PAGE))
        low, high = pages.aminmax(dim=2)
        bound = torch.maximum(heads.unsqueeze(2) * low, heads.unsqueeze(2) * high).sum(-1)
        return bound.sum((0, 1))
    for row, node in enumerate(nodes):
        ancestors = torch.from_numpy(segment.ancestors())[node]
        scores[row, :, prefix:].masked_fill_(~ancestors, -torch.inf)
        at = prefix + segment.depths[node]
        if window is not None:
            scores[row, :, : max(0, at - window + 1)] = -torch.inf
    if policy == "verified":
        return scores[..., :prefix].mean((0, 1))
    weights[:prefix] += scores.softmax(-1)[..., :prefix].mean((0, 1))
    whole = prefix // SELECTION_CHUNK * SELECTION_CHUNK
    return weights[:whole].unflatten(0, (-1, SELECTION_CHUNK)).sum(-1)


class FakeCache:
    """A cache of which nothing is read."""

    capacity = 0
    device = torch.device("cpu")

    def layer(self, index: int) -> Any:
        raise AssertionError("not read")


class Given(ScoreObserver):
    """Scores that a test made up."""

    def __init__(self, scores: Tensor, chunk: int) -> None:
        super().__init__(range(len(scores)))
        self.scores, self.chunk = scores, chunk

    def begin(self, block: int, nodes: Any, prefix: int) -> list[Any]:
        return []

    def attended(self, layer: int, q: Tensor, rows: Any) -> None: ...

    def publish(self) -> None: ...


@given(
    committed=st.integers(1, 400),
    behind=st.integers(0, 30),
    budget=st.integers(1, 500),
    size=st.sampled_from([1, SELECTION_CHUNK, PAGE]),
    seed=st.integers(0, 99),
)
def test_the_best_are_chosen_and_all_that_is_newer(
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


@pytest.mark.parametrize("policy", POLICIES)
async def test_followers_get_what_a_policy_chooses(
    models: dict[str, Path], tmp_path: Path, policy: str
) -> None:
    """Two followers of one cache, trees and free runs; collectors go as they leave."""
    async with serving(models["Llama"], tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(200)]
        fields = {"max_new_tokens": 40, "ignore_eos": True}
        truth = await client.generate(prompt, drafters.nothing, **fields)
        created = await client.create(prompt, **fields)
        exchange, kv = await following(client, created, budget=48, kv_policy=policy)
        other_exchange, other = await following(client, created, (1,), budget=32)
        (cache,) = client.service.store
        stream, rng = client.stub.Verify(), random.Random(2)
        tokens, number = list(created.first.tokens), 0
        while len(tokens) < 36:
            number += 1
            tree = drafters.random_tree([*prompt, *tokens], rng)
            await stream.write(Round.of(created.handle, number, tree))
            tokens += (await stream.read()).result.tokens
            await caught_up(kv, cache.sequence.committed, 48)
            await caught_up(other, cache.sequence.committed, 32)
            held = kv.cache
            assert held is not None
            assert 48 - 16 < len(held) <= 48
            for index in (0, 1):
                keys, values = held.layer(index)
                theirs = cache.sequence.segment.layer(index)
                assert keys.equal(theirs[0][:, held.positions(index)])
                assert values.equal(theirs[1][:, held.positions(index)])
        assert tokens == truth[: len(tokens)]
        assert len(cache.sequence.observers) == 1
        assert not torch.equal(held.positions(0).sort().values, held.positions(1).sort().values)
        for followed, opened in ((kv, exchange), (other, other_exchange)):
            followed.close()
            await opened.close()
        await until(lambda: not cache.sequence.observers)
        await client.release(created.handle)


@pytest.mark.parametrize("policy", POLICIES)
async def test_mappers_read_where_a_policy_chooses(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The same positions as a follower has, and what is newer, in the verifier's own memory."""
    async with serving(models["Llama"], tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        prompt = [random.Random(1).randrange(1, 61) for _ in range(200)]
        created = await client.create(prompt, max_new_tokens=40, ignore_eos=True)
        exchange = KvExchange(VerifierAccess())
        options = KvOptions(kv="map", kv_policy=policy)
        kv = await exchange.open(client.address, created.read_grant, (0, 1), options, 48)
        assert isinstance(kv, SparseView)
        (cache,) = client.service.store
        stream, chosen = client.stub.Verify(), kv.selection
        for number in range(1, 7):
            await stream.write(Round.of(created.handle, number))
            await stream.read()
            committed = cache.sequence.committed
            if number % 2:
                await until(lambda at=committed: _took_in(chosen, at))
            else:  # this choice comes too late
                monkeypatch.setattr(chosen, "refresh", lambda below, budget: 0)
            held = chosen.cache
            assert held is not None
            assert kv.refresh(committed, 48) == committed
            for index in (0, 1):
                newer = torch.arange(chosen.committed, committed)
                assert len(newer) == (number + 1) % 2
                positions = torch.cat([held.positions(index), newer])
                parts = zip(*kv.parts(index), strict=True)
                for mine, plane in zip(parts, cache.sequence.segment.layer(index), strict=True):
                    assert torch.cat(mine, 1).equal(plane[:, positions])
            monkeypatch.undo()
        assert 48 - 16 < kv.positions <= 48
        assert kv.received < 6 * 2 * 48 * 8, "positions alone"
        kv.close()
        await exchange.close()
        await until(lambda: not cache.sequence.observers)
        await client.release(created.handle)


def _took_in(chosen: RemoteKv, committed: int) -> bool:
    chosen.refresh(committed, 48)
    return chosen.committed == committed


def test_a_cache_of_no_layer_in_common_is_let_alone() -> None:
    """Only the layers that are followed are looked at."""
    segment = Segment(LAYOUT, 512)
    batch = BatchObserver()
    batch.add(observer_of("verified", segment, (1,)), 0, TreeSegment(0, 4, None, 1), 0)
    assert not batch.probes(0)
    assert len(batch.probes(1)) == 1
    segment.close()
