"""A version that fails too often loses its share; statistics of each version."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from paceline.drafter.registry import MIN_FAILURES, RECENT_ROUNDS, Version
from paceline.drafter.spec import DrafterSpec
from paceline.v1 import drafter_pb2

from .conftest import VOCAB, Drafting, drafting
from .fake_verifier import Refused
from .fakes import FakeDrafter, write_records
from .test_registry_servicer import activate, load

PROMPT = [5, 6, 7]
TEXT = [(7 * i) % VOCAB for i in range(1, 120)]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The text, for the method `replay`."""
    return write_records(tmp_path / "record.jsonl", (PROMPT, TEXT))


async def generate(service: Drafting, version: str = "") -> list[str]:
    """Generate TEXT as a verifier does. Returns the versions that drafted its trees."""
    text = await service.open([*PROMPT, TEXT[0]], prompt_length=len(PROMPT), version=version)
    length, emitted, versions = 1, [], []
    while length < len(TEXT):
        tree = await text.round(emitted, max_depth=len(TEXT) - length)
        versions.append(tree.version)
        accepted = 0
        for token, expected in zip(tree.tree.tokens, TEXT[length:], strict=False):
            if token != expected:
                break
            accepted += 1
        emitted = TEXT[length : length + accepted + 1]
        length += len(emitted)
    await text.round(emitted, node_budget=0)
    await text.end()
    return versions


async def infos(service: Drafting) -> dict[str, drafter_pb2.DrafterInfo]:
    listed = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
    return {info.version: info for info in listed.drafters}


@pytest.mark.parametrize(
    ("outcomes", "fails"),
    [
        ("F" * (MIN_FAILURES - 1), False),
        ("F" * MIN_FAILURES, True),
        (".F" * RECENT_ROUNDS, False),
        ("." * 1000 + "F" * (RECENT_ROUNDS // 2), False),
        ("." * 1000 + "F" * (RECENT_ROUNDS // 2 + 1), True),
        ("F" * MIN_FAILURES + ".", False),
    ],
)
def test_a_version_fails_by_its_recent_rounds(outcomes: str, fails: bool) -> None:
    version = Version(DrafterSpec("x", "fake"), FakeDrafter(), "1")
    assert [version.add_round(failed=each == "F") for each in outcomes][-1] is fails


@pytest.mark.parametrize("method", ["raising", "malformed", "huge"])
async def test_a_failing_version_is_taken_out_and_ends_no_sequence(
    record: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="paceline.drafter")
    async with drafting(f"x=replay:{record}", roots=[record.parent]) as service:
        await load(service, "x", method)
        await activate(service, "x", "2", 0.9)
        texts = [asyncio.create_task(generate(service)) for _ in range(6)]
        versions = [set(each) for each in await asyncio.gather(*texts)]
        found = await infos(service)
        assert {"1", "2"} in versions, "no generation moved"
        assert (found["1"].traffic_share, found["2"].traffic_share) == (1.0, 0.0)
        assert found["2"].failing
        assert not found["1"].failing
        assert "taken out" in caplog.text
        await activate(service, "x", "2", 0.5)
        assert (await infos(service))["2"].failing == ""


async def test_without_another_version_failures_refuse_the_sequence() -> None:
    async with drafting("x=raising") as service:
        for _ in range(RECENT_ROUNDS):
            with pytest.raises(Refused, match="DRAFT_FAILED"):
                await (await service.open([1])).round([2])
        (info,) = (await infos(service)).values()
        assert (info.traffic_share, info.failing) == (1.0, "")
        await load(service, "x", "fake")
        with pytest.raises(Refused, match="DRAFT_FAILED"):
            await (await service.open([1], version="1")).round([2])


async def test_accepted_length_and_draft_time_of_each_version(record: Path) -> None:
    async with drafting(f"x=replay:{record},p=0.3", roots=[record.parent]) as service:
        await load(service, "x", "replay", folder=str(record), options={"p": "0.9"})
        await activate(service, "x", "2", 0.5)
        for version in ("1", "2"):
            rounds = len(await generate(service, version))
            info = (await infos(service))[version]
            assert info.rounds == rounds
            assert info.accepted_length == pytest.approx((len(TEXT) - 1) / rounds - 1, abs=0.1)
        worse, better = (await infos(service)).values()
        assert better.accepted_length > worse.accepted_length
        assert (await load(service, "x", "fake")).rounds == 0
