"""Malformed requests and those for which there is no room: a clear status, and others go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import details_of, failure, reason_of
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from verifier_support import CONTEXT, VOCAB, Client, serving

from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier import store as store_module
from paceline.verifier.engine.drafted import rank
from paceline.verifier.scheduler.scheduler import admit, min_survival

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [3, 1, 4, 1, 5]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": PROMPT, "sampling": sampling_pb2.SamplingParams(**fields)}


CREATE: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"prompt_tokens": []}, INVALID, "PROMPT_EMPTY"),
    ({"prompt_tokens": [1] * CONTEXT}, INVALID, "PROMPT_TOO_LONG"),
    ({"prompt_tokens": [1] * 1_000_000}, INVALID, "PROMPT_TOO_LONG"),
    ({"prompt_tokens": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": [2**32 - 1]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "output_tokens": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "stop_token_ids": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "output_tokens": [1, 2], "max_new_tokens": 2}, INVALID,
     "NOTHING_LEFT"),
    ({"prompt_tokens": PROMPT, "stop_token_ids": [1] * 1025}, INVALID, "TOO_MANY_STOP_TOKENS"),
    ({"prompt_tokens": PROMPT, "top_logprobs": 21}, INVALID, "BAD_TOP_LOGPROBS"),
    ({"prompt_tokens": PROMPT, "prompt_logprobs": 21}, INVALID, "BAD_TOP_LOGPROBS"),
    ({"prompt_tokens": PROMPT, "parent_handle": b"short"}, INVALID, "BAD_HANDLE"),
    ({"prompt_tokens": PROMPT, "parent_handle": bytes(16)}, grpc.StatusCode.NOT_FOUND,
     "CACHE_NOT_FOUND"),
    ({"prompt_tokens": PROMPT, "drafter": "x" * 257}, INVALID, "BAD_DRAFTER"),
    (sampling(mode=77), INVALID, "INVALID_SAMPLING"),
    (sampling(temperature=-1), INVALID, "INVALID_SAMPLING"),
    (sampling(logit_bias={VOCAB: 1.0}), INVALID, "TOKEN_OUT_OF_VOCABULARY"),
]  # fmt: skip


async def test_creations(client: Client) -> None:
    plain = await client.generate(PROMPT, None, max_new_tokens=8)
    for fields, code, reason in CREATE:
        error = await failure(client.stub.CreateCache(verifier_pb2.CreateCacheRequest(**fields)))
        assert (error.code(), reason_of(error)) == (code, reason), fields
        info = details_of(error, error_details_pb2.ErrorInfo)
        assert info.domain == "paceline"
        assert len(error.details()) > 20, "the message says what was wrong"
    assert len(client.service.store) == 0
    assert await client.generate(PROMPT, None, max_new_tokens=8) == plain


@pytest.mark.parametrize("handle", [b"", b"short", bytes(17)])
async def test_handles_of_a_wrong_size(client: Client, handle: bytes) -> None:
    assert await client.refusal(handle) == (INVALID, "BAD_HANDLE")
    for call in (
        client.stub.RenewLease(verifier_pb2.RenewLeaseRequest(handle=handle)),
        client.stub.ReleaseCache(verifier_pb2.ReleaseCacheRequest(handle=handle)),
    ):
        error = await failure(call)
        assert (error.code(), reason_of(error)) == (INVALID, "BAD_HANDLE")


async def test_a_handle_is_valid_for_its_owner_only(client: Client) -> None:
    created = await client.create(PROMPT)
    thief = (("authorization", "Bearer someone-else"),)
    start = verifier_pb2.GenerateStart(handle=created.handle, position=1)
    stream = client.stub.Generate(metadata=thief)
    await stream.write(verifier_pb2.GenerateRequest(start=start))
    fork = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT, parent_handle=created.handle)
    renewal = verifier_pb2.RenewLeaseRequest(handle=created.handle)
    for call in (
        stream,
        client.stub.RenewLease(renewal, metadata=thief),
        client.stub.CreateCache(fork, metadata=thief),
    ):
        error = await failure(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")
    release = verifier_pb2.ReleaseCacheRequest(handle=created.handle)
    assert not (await client.stub.ReleaseCache(release, metadata=thief)).released
    _, reason = await client.refusal(created.read_grant)
    assert reason == "CACHE_NOT_FOUND", "a read grant is no handle"
    assert await client.release(created.handle)


async def test_malformed_messages(client: Client) -> None:
    for method in ("CreateCache", "Generate"):
        call = client.channel.stream_stream(f"/paceline.v1.VerifierService/{method}")()
        await call.write(b"\xff\xff\xff")
        error = await failure(call)
        assert (error.code(), reason_of(error)) == (INVALID, "MALFORMED_MESSAGE")


async def test_a_full_verifier_returns_a_retry_delay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WAIT_SECONDS", 0.0)
    # A text of 512 tokens: 2 layers x 2 kinds x 2 heads x 16 elements of 4 bytes each.
    one = 512 * 2 * 2 * 2 * 16 * 4
    async with serving(model, tmp_path / "v.sock", kv_bytes=2 * one + 1) as client:
        caches = [await client.create([1] * 500, max_new_tokens=12) for _ in range(2)]
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=[1] * 500, max_new_tokens=12)
        error = await failure(client.stub.CreateCache(request))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL")
        retry = details_of(error, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() > 0
        await client.release(caches[0].handle)
        caches[0] = await client.create([1] * 500, max_new_tokens=12)
        for cache in caches:
            await client.release(cache.handle)
        # The whole context never fits with its hidden states: the text goes on without them.
        whole = await client.create([1] * 500, max_new_tokens=0, drafter=await client.reader(0, 1))
        await client.release(whole.handle)


@dataclass
class Costs:
    """Step times by batch tokens, and the time lost before each step."""

    seconds: tuple[float, ...]

    def of(self, tokens: int, idle: float = 0.0) -> list[float]:
        return [idle + each for each in self.seconds[tokens - 1 :]]


@st.composite
def trees(draw: st.DrawFn, most: int = 4) -> TokenTree:
    size = draw(st.integers(0, most))
    tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    told = draw(st.booleans())
    chances = draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)) if told else []
    return rank(TokenTree(tuple(tokens), tuple(parents), tuple(chances)), max_depth=size)[0]


several = st.lists(trees(), min_size=1, max_size=3)


def costs_for(steps: list[float]) -> Costs:
    """A rising curve out of any steps."""
    return Costs(tuple(accumulate(step + 1e-3 for step in steps)))


curves = st.lists(st.floats(0, 1), min_size=24, max_size=24).map(costs_for)


def admitted(
    survivals: Sequence[Sequence[float]], costs: Costs, idle: float = 0.0, *, causal: bool = False
) -> list[int]:
    """Nodes that are admitted in a step of one anchor a tree."""
    anchors = len(survivals)
    return admit(survivals, anchors, costs.of(anchors, idle), causal=causal)


@given(several, curves, st.booleans())
def test_what_is_admitted_is_a_tree(drafted: list[TokenTree], costs: Costs, causal: bool) -> None:
    got = admitted([tree.survivals for tree in drafted], costs, causal=causal)
    for tree, count in zip(drafted, got, strict=True):
        cut = tree.first(count)
        cut.check()
        assert len(cut) == count
        assert list(cut.survivals) == list(tree.survivals[:count])


@given(several, curves, st.floats(0, 2))
def test_no_choice_of_trees_does_better(
    drafted: list[TokenTree], costs: Costs, idle: float
) -> None:
    def rate(nodes: int, expected: float) -> float:
        return (len(drafted) + expected) / costs.of(len(drafted) + nodes, idle)[0]

    best = 0.0
    for choice in product(*(range(1 << len(tree)) for tree in drafted)):
        nodes, expected = 0, 0.0
        for tree, bits in zip(drafted, choice, strict=True):
            chosen = [node for node in range(len(tree)) if bits >> node & 1]
            if any(tree.parents[node] not in (-1, *chosen) for node in chosen):
                break
            nodes += len(chosen)
            expected += sum(tree.survivals[node] for node in chosen)
        else:
            best = max(best, rate(nodes, expected))
    survivals = [tree.survivals for tree in drafted]
    got = admitted(survivals, costs, idle)
    gained = sum(sum(s[:count]) for s, count in zip(survivals, got, strict=True))
    assert rate(sum(got), gained) == pytest.approx(best)


@given(several, curves, st.floats(0, 2))
def test_nodes_below_the_min_survival_are_never_admitted(
    drafted: list[TokenTree], costs: Costs, idle: float
) -> None:
    least = min_survival(len(drafted), costs.of(len(drafted), idle)[:13])  # 3 trees of 4 nodes
    likely = [[each for each in tree.survivals if each >= least] for tree in drafted]
    unlikely = [[each for each in tree.survivals if each < least] for tree in drafted]
    assert not any(admitted(unlikely, costs, idle))
    if not any(likely):
        assert not any(admitted([tree.survivals for tree in drafted], costs, idle))


def test_nodes_as_likely_as_the_min_survival_gain_what_they_cost() -> None:
    """A step for 4 sequences takes 10 ms, 12 with one node and 13 with two or three."""
    seconds = [0.010, 0.012, 0.013, 0.013, 0.020]
    assert min_survival(4, seconds) == pytest.approx(4 * 0.1)
    assert admit([[0.41] * 3, [], [], []], 4, seconds) == [3, 0, 0, 0]
    assert admit([[0.39] * 4, [], [], []], 4, seconds) == [0, 0, 0, 0]


@given(several, curves)
def test_it_admits_more_when_time_is_lost_anyway(drafted: list[TokenTree], costs: Costs) -> None:
    """Monotone: the more a step loses before it begins, the more nodes are worth their time."""
    survivals = [tree.survivals for tree in drafted]
    counts = [sum(admitted(survivals, costs, idle)) for idle in (0.0, 0.1, 1.0, 10.0, 1e6)]
    assert counts == sorted(counts)


@given(several, curves)
def test_early_stopping_admits_no_more_than_the_full_search(
    drafted: list[TokenTree], costs: Costs
) -> None:
    full, early = (
        admitted([tree.survivals for tree in drafted], costs, causal=causal)
        for causal in (False, True)
    )
    assert sum(early) <= sum(full)


@given(several, curves, st.data())
def test_early_stopping_looks_at_nothing_behind_its_cut(
    drafted: list[TokenTree], costs: Costs, data: st.DataObject
) -> None:
    """Nodes that were not admitted, but for the first of them, may be anything less likely."""
    survivals = [tree.survivals for tree in drafted]
    got = admitted(survivals, costs, causal=True)
    left = [v for s, n in zip(survivals, got, strict=True) for v in s[n:]]
    border = max(left, default=0.0)
    changed = []
    for s, n in zip(survivals, got, strict=True):
        scale = data.draw(st.floats(0, 1))
        changed.append([v if i < n or v == border else v * scale for i, v in enumerate(s)])
    assert admitted(changed, costs, causal=True) == got
