"""Running generations move between versions, and versions on trial come and go by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.drafter import session
from paceline.drafter.methods.replay import write_records
from paceline.v1 import drafter_pb2

from .conftest import VOCAB, Drafting, drafting, failure, until
from .fakes import FakeDrafter
from .test_registry_servicer import listed, load, unload

PROMPT = [5, 6, 7]
TEXT = [(7 * i) % VOCAB for i in range(1, 120)]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """What `replay` knows of the text."""
    path = tmp_path / "record.jsonl"
    write_records(path, [(PROMPT, TEXT)])
    return path


async def generate(service: Drafting, **fields: Any) -> list[str]:
    """A whole generation of TEXT as a client runs it; the versions that drew its trees."""
    stream = await service.attach([*PROMPT, TEXT[0]], prompt_length=len(PROMPT), **fields)
    at, news, versions = 1, [], []
    while at < len(TEXT):
        tree = await stream.round(news, max_depth=len(TEXT) - at)
        versions.append(tree.version)
        agreed = 0
        for token, expected in zip(tree.tree.tokens, TEXT[at:], strict=False):
            if token != expected:
                break
            agreed += 1
        news = TEXT[at : at + agreed + 1]
        at += len(news)
    await stream.round(news, node_budget=0)
    await stream.end()
    return versions


async def trial(service: Drafting, name: str, version: str, **fields: Any) -> None:
    request = drafter_pb2.ActivateDrafterRequest(
        name=name,
        version=version,
        traffic_share=fields.pop("share", 0.5),
        trial=drafter_pb2.TrialSettings(**fields),
    )
    await service.registry.ActivateDrafter(request)


async def trial_of(service: Drafting) -> drafter_pb2.DrafterTrial:
    (found,) = (await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())).trials
    return found


async def test_a_stream_takes_its_whole_text_along() -> None:
    FakeDrafter.loaded.clear()
    async with drafting("x=fake") as service:
        stream = await service.attach([1, 2])
        await stream.round([3, 4])
        await load(service, "x", "inline-fake", activate=True)
        assert (await stream.round([5])).version == "1", "activating moves nobody"
        await unload(service, "x", "1")
        tree = await stream.round([6, 7])
        assert (tree.version, list(tree.tree.tokens)) == ("2", [7])
        assert FakeDrafter.loaded[1].sequences[0].text == [1, 2, 3, 4, 5, 6, 7]
        await stream.end()
        assert [(v[1], v[3]) for v in await listed(service)] == [("2", 0)]
        old = FakeDrafter.loaded[0]
        await until(lambda: bool(old.closed))  # on its worker, after the last stream has left
        assert old.closed == 1


@pytest.mark.parametrize(
    ("asked", "second"),
    [
        ({"version": "1"}, {}),
        ({}, {"tokenizer": "b"}),
        ({}, {"target": "b"}),
        ({}, {"hidden": "1"}),
        ({}, {"kv": "0"}),
        ({}, {"vocab": "3"}),
    ],
    ids=["pinned", "tokenizer", "target", "hidden states", "kv", "vocabulary"],
)
async def test_a_stream_stays_where_nothing_else_fits(
    asked: dict[str, str], second: dict[str, str]
) -> None:
    """The old version lives until the stream ends, and not longer."""
    async with drafting("x=fake") as service:
        fields = {"tokenizer_digest": "a", **asked}
        stream = await service.attach([1, 9], **fields)
        await load(service, "x", "fake", activate=True, options=second)
        assert await unload(service, "x", "1") is False
        for token in (4, 5):
            assert (await stream.round([token])).version == "1"
        await stream.end()
        assert [version[1] for version in await listed(service)] == ["2"]


async def test_the_last_version_of_a_name_serves_its_streams_to_their_end() -> None:
    async with drafting("x=fake") as service:
        stream = await service.attach([1])
        assert await unload(service, "x") is False
        assert (await stream.round([2])).version == "1"
        await load(service, "x", "fake")
        assert (await stream.round([3])).version == "2"
        await stream.end()


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts take no time, whatever else the machine does."""
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("timeless")
async def test_a_better_version_is_promoted(record: Path) -> None:
    specs = f"x=replay:{record},p=0.3"
    async with drafting(specs, roots=[record.parent]) as service:
        better = {"p": "0.9"}
        await load(service, "x", "replay", folder=str(record), options=better)
        await trial(service, "x", "2")
        stays = await service.attach([1])
        assert stays.attached.version in ("1", "2")
        for _ in range(400):  # versions are drawn by chance
            await generate(service)
            if (await trial_of(service)).state != drafter_pb2.TRIAL_STATE_RUNNING:
                break
        found = await trial_of(service)
        assert found.state == drafter_pb2.TRIAL_STATE_PROMOTED, found
        assert found.candidate_figures.generations >= 8
        assert found.candidate_figures.accepted_length > found.baseline_figures.accepted_length
        assert (await stays.round([2])).version == "2"
        assert [(v[1], v[2], v[4]) for v in await listed(service)] == [("2", 1.0, False)]
        await stays.end()


@pytest.mark.usefixtures("timeless")
async def test_a_worse_version_is_rolled_back(record: Path) -> None:
    async with drafting(f"x=replay:{record},p=0.9", roots=[record.parent]) as service:
        await load(service, "x", "replay", folder=str(record), options={"p": "0.3"})
        await trial(service, "x", "2", share=0.25)
        for _ in range(400):
            await generate(service)
            if (await trial_of(service)).state != drafter_pb2.TRIAL_STATE_RUNNING:
                break
        found = await trial_of(service)
        assert found.state == drafter_pb2.TRIAL_STATE_ROLLED_BACK, found
        assert found.reason.startswith("accepts too little")
        assert [(v[1], v[2], v[4]) for v in await listed(service)] == [("1", 1.0, False)]


@pytest.mark.parametrize("method", ["failing", "failing-thread", "malformed", "huge"])
async def test_a_failing_version_on_trial_costs_no_stream(record: Path, method: str) -> None:
    async with drafting(f"x=replay:{record}", roots=[record.parent]) as service:
        await load(service, "x", method)
        await trial(service, "x", "2", share=0.9)
        texts = [asyncio.create_task(generate(service)) for _ in range(6)]
        versions = [set(each) for each in await asyncio.gather(*texts)]
        assert {"1", "2"} in versions, "one was drafted for by both"
        found = await trial_of(service)
        assert found.state == drafter_pb2.TRIAL_STATE_ROLLED_BACK
        assert found.reason.startswith("it failed")
        assert [(v[1], v[2]) for v in await listed(service)] == [("1", 1.0)]


async def test_shares_changed_by_hand_end_a_trial() -> None:
    async with drafting("x=fake") as service:
        for act in ("activate", "unload", "load"):
            info = await load(service, "x", "fake")
            await trial(service, "x", info.version)
            if act == "activate":
                request = drafter_pb2.ActivateDrafterRequest(name="x", version=info.version)
                await service.registry.ActivateDrafter(request)
            elif act == "unload":
                await unload(service, "x", info.version)
            else:
                await load(service, "x", "fake", activate=True)
            assert (await trial_of(service)).state == drafter_pb2.TRIAL_STATE_CANCELLED


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"share": 1.0}, "INVALID_SHARE"),
        ({"confidence": 0.2}, "INVALID_TRIAL"),
        ({"confidence": 1.0}, "INVALID_TRIAL"),
        ({"confidence": float("nan")}, "INVALID_TRIAL"),
        ({"length_margin": -0.1}, "INVALID_TRIAL"),
        ({"time_margin": float("inf")}, "INVALID_TRIAL"),
        ({"max_generations": 1}, "INVALID_TRIAL"),
        ({"max_generations": 2**32 - 1}, "INVALID_TRIAL"),
    ],
)
async def test_wrong_trials_are_refused(fields: dict[str, Any], reason: str) -> None:
    async with drafting("x=fake") as service:
        await load(service, "x", "fake")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await trial(service, "x", "2", **fields)
        assert failure(error) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert [(v[1], v[2]) for v in await listed(service)] == [("1", 1.0), ("2", 0.0)]
