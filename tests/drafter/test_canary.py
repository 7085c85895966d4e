"""Comparison of a canary with its baseline: statistics, outcomes, and streams of a service."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.drafter import session
from paceline.drafter.registry.canary import Canary, CanarySettings
from paceline.drafter.registry.comparison import student_quantile
from paceline.drafter.statistics import DraftStatistics
from paceline.v1 import drafter_pb2

from .conftest import VOCAB, Drafting, drafting, failure
from .test_registry_servicer import listed, load, unload
from .test_replay import write_records

RUNNING, PROMOTED = drafter_pb2.CANARY_STATE_RUNNING, drafter_pb2.CANARY_STATE_PROMOTED
ROLLED_BACK, CANCELLED = (
    drafter_pb2.CANARY_STATE_ROLLED_BACK,
    drafter_pb2.CANARY_STATE_CANCELLED,
)


@pytest.mark.parametrize(
    ("error", "freedom", "quantile"),
    [
        (0.025, 7, 2.3646),
        (0.005, 8, 3.3554),
        (0.0005, 10, 4.5869),
        (0.01, 30, 2.4573),
        (0.01, 120, 2.3578),
        (0.025, 10**6, 1.9600),
        (0.5, 5, 0.0),
    ],
)
def test_quantiles_equal_published_tables(error: float, freedom: int, quantile: float) -> None:
    assert student_quantile(error, freedom) == pytest.approx(quantile, rel=5e-4, abs=1e-9)


LENGTH, SECONDS = 2.0, 0.005


def outcomes(length: float, draft_seconds: float) -> Counter[str]:
    """Outcomes of 200 canaries with these means; the baseline has LENGTH and SECONDS."""
    draws = random.Random(7)

    def generation(length: float, draft_seconds: float) -> DraftStatistics:
        rounds = draws.randint(5, 60)
        difficulty = draws.uniform(0.5, 1.5)
        accepted = sum(draws.expovariate(1 / (length * difficulty)) for _ in range(rounds))
        seconds = sum(draws.expovariate(1 / draft_seconds) for _ in range(rounds))
        return DraftStatistics(rounds, round(accepted), seconds)

    found: Counter[str] = Counter()
    for _ in range(200):
        canary = Canary("new", "old", CanarySettings(0.9, 0.2, 0.5, 64))
        while canary.running:
            for _ in range(3):
                canary.add("old", generation(LENGTH, SECONDS))
            canary.add("new", generation(length, draft_seconds))
        promoted = canary.state == PROMOTED
        found["promoted" if promoted else canary.reason.partition(":")[0]] += 1
    return found


@pytest.mark.parametrize(
    ("length", "draft_seconds", "reason"),
    [
        (LENGTH * 0.8, SECONDS, "accepted length too low"),
        (LENGTH, SECONDS * 1.5 + 1e-4, "draft time too high"),
    ],
)
def test_exactly_at_a_margin_both_outcomes_are_rare(
    length: float, draft_seconds: float, reason: str
) -> None:
    """At the margin either outcome is an error, allowed for a tenth at a confidence of 0.9."""
    found = outcomes(length, draft_seconds)
    assert found["promoted"] <= 20
    assert found[reason] <= 20


def test_clear_cases_are_decided() -> None:
    assert outcomes(LENGTH, SECONDS)["promoted"] >= 150
    assert outcomes(LENGTH * 2, SECONDS / 2)["promoted"] >= 199
    assert outcomes(LENGTH / 4, SECONDS)["accepted length too low"] >= 199
    assert outcomes(LENGTH, SECONDS * 4)["draft time too high"] >= 199


def test_two_versions_that_draft_nothing_are_equal() -> None:
    canary = Canary("new", "old", CanarySettings())
    for _ in range(8):
        for version in ("old", "new"):
            canary.add(version, DraftStatistics(10, 0, 0.0))
    assert canary.state == PROMOTED


def test_other_versions_and_empty_generations_do_not_count() -> None:
    canary = Canary("new", "old", CanarySettings(max_generations=8))
    for _ in range(100):
        canary.add("third", DraftStatistics(10, 5, 0.1))
        canary.add("new", DraftStatistics())
    assert canary.running
    for _ in range(8):
        canary.add("new", DraftStatistics(10, 5, 0.1))
    assert canary.state == ROLLED_BACK
    assert "undecided" in canary.reason


PROMPT = [5, 6, 7]
TEXT = [(7 * i) % VOCAB for i in range(1, 120)]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The text, for the method `replay`."""
    return write_records(tmp_path / "record.jsonl", (PROMPT, TEXT))


async def generate(service: Drafting) -> list[str]:
    """Generate TEXT as a client does. Returns the versions that drafted its trees."""
    stream = await service.attach([*PROMPT, TEXT[0]], prompt_length=len(PROMPT))
    length, emitted, versions = 1, [], []
    while length < len(TEXT):
        tree = await stream.round(emitted, max_depth=len(TEXT) - length)
        versions.append(tree.version)
        accepted = 0
        for token, expected in zip(tree.tree.tokens, TEXT[length:], strict=False):
            if token != expected:
                break
            accepted += 1
        emitted = TEXT[length : length + accepted + 1]
        length += len(emitted)
    await stream.round(emitted, node_budget=0)
    await stream.end()
    return versions


async def start_canary(service: Drafting, name: str, version: str, **fields: Any) -> None:
    request = drafter_pb2.ActivateDrafterRequest(
        name=name,
        version=version,
        traffic_share=fields.pop("share", 0.5),
        canary=drafter_pb2.CanarySettings(**fields),
    )
    await service.registry.ActivateDrafter(request)


async def canary_of(service: Drafting) -> drafter_pb2.DrafterCanary:
    (found,) = (await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())).canaries
    return found


async def generate_until_decided(service: Drafting) -> drafter_pb2.DrafterCanary:
    for _ in range(400):  # versions are drawn at random
        await generate(service)
        if (found := await canary_of(service)).state != RUNNING:
            return found
    pytest.fail("undecided after 400 generations")


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts take no time, however busy the machine is."""
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("timeless")
async def test_a_better_version_is_promoted(record: Path) -> None:
    async with drafting(f"x=replay:{record},p=0.3", roots=[record.parent]) as service:
        await load(service, "x", "replay", folder=str(record), options={"p": "0.9"})
        await start_canary(service, "x", "2")
        open_stream = await service.attach([1])
        found = await generate_until_decided(service)
        assert found.state == PROMOTED, found
        assert found.canary_statistics.generations >= 8
        assert found.canary_statistics.accepted_length > found.baseline_statistics.accepted_length
        assert (await open_stream.round([2])).version == "2"
        assert [(v[1], v[2], v[4]) for v in await listed(service)] == [("2", 1.0, False)]
        await open_stream.end()


@pytest.mark.usefixtures("timeless")
async def test_a_worse_version_is_rolled_back(record: Path) -> None:
    async with drafting(f"x=replay:{record},p=0.9", roots=[record.parent]) as service:
        await load(service, "x", "replay", folder=str(record), options={"p": "0.3"})
        await start_canary(service, "x", "2", share=0.25)
        found = await generate_until_decided(service)
        assert found.state == ROLLED_BACK, found
        assert found.reason.startswith("accepted length too low")
        assert [(v[1], v[2], v[4]) for v in await listed(service)] == [("1", 1.0, False)]


@pytest.mark.parametrize("method", ["failing", "failing-thread", "malformed", "huge"])
async def test_a_failing_canary_ends_no_stream(record: Path, method: str) -> None:
    async with drafting(f"x=replay:{record}", roots=[record.parent]) as service:
        await load(service, "x", method)
        await start_canary(service, "x", "2", share=0.9)
        texts = [asyncio.create_task(generate(service)) for _ in range(6)]
        versions = [set(each) for each in await asyncio.gather(*texts)]
        assert {"1", "2"} in versions, "no generation moved"
        found = await canary_of(service)
        assert found.state == ROLLED_BACK
        assert found.reason.startswith("it failed")
        assert [(v[1], v[2]) for v in await listed(service)] == [("1", 1.0)]


async def test_changing_shares_cancels_a_canary() -> None:
    async with drafting("x=fake") as service:
        for action in ("activate", "unload", "load"):
            info = await load(service, "x", "fake")
            await start_canary(service, "x", info.version)
            if action == "activate":
                request = drafter_pb2.ActivateDrafterRequest(name="x", version=info.version)
                response = await service.registry.ActivateDrafter(request)
                assert response.drafter.traffic_share == 1.0
            elif action == "unload":
                await unload(service, "x", info.version)
            else:
                await load(service, "x", "fake", activate=True)
            assert (await canary_of(service)).state == CANCELLED


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"share": 1.0}, "INVALID_SHARE"),
        ({"confidence": 0.2}, "INVALID_CANARY"),
        ({"confidence": 1.0}, "INVALID_CANARY"),
        ({"confidence": float("nan")}, "INVALID_CANARY"),
        ({"length_margin": -0.1}, "INVALID_CANARY"),
        ({"time_margin": float("inf")}, "INVALID_CANARY"),
        ({"max_generations": 1}, "INVALID_CANARY"),
        ({"max_generations": 2**32 - 1}, "INVALID_CANARY"),
    ],
)
async def test_invalid_settings_are_refused(fields: dict[str, Any], reason: str) -> None:
    async with drafting("x=fake") as service:
        await load(service, "x", "fake")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await start_canary(service, "x", "2", **fields)
        assert failure(error) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert [(v[1], v[2]) for v in await listed(service)] == [("1", 1.0), ("2", 0.0)]
