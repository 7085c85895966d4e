"""Versions come and go while text streams, and lose their share by failures."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import refusal, until
from fakes.drafter import FakeDrafter, SlowLoad, write_records
from fakes.exchange import Refused

from paceline.drafter.registry import MIN_FAILURES, RECENT_ROUNDS, Version
from paceline.drafter.spec import DrafterSpec
from paceline.v1 import drafter_pb2

from .conftest import VOCAB, Drafting, activate, drafting, listed, load, unload

CODE = grpc.StatusCode


async def test_versions_come_and_go_while_text_streams() -> None:
    SlowLoad.go_on.clear()
    FakeDrafter.loaded.clear()
    async with drafting("x=fake") as service:
        old = await service.open([1])
        loading = asyncio.create_task(load(service, "x", "slow-load", activate=True))
        for token in range(2, 20):
            await old.round([token])
        assert not loading.done()
        loaded = (CODE.FAILED_PRECONDITION, "ALREADY_LOADED")
        assert await refusal(load(service, "x", "fake", version="2")) == loaded
        SlowLoad.go_on.set()
        assert (await loading).version == "2"
        new = await service.open([1])
        assert new.opened.version == "2"
        await old.round([30])
        assert old.opened.version == "1"
        assert await listed(service) == [("x", "1", 0.0, 1, False), ("x", "2", 1.0, 1, False)]
        assert await unload(service, "x", "1") is False
        assert await listed(service) == [("x", "1", 0.0, 1, True), ("x", "2", 1.0, 1, False)]
        with pytest.raises(Refused, match="DRAFTER_REPLACED"):
            await old.round([31])
        await until(lambda: FakeDrafter.loaded[0].closed == 1)
        assert await listed(service) == [("x", "2", 1.0, 1, False)]
        await new.end()
        assert await unload(service, "x") is True
        assert await listed(service) == []
    assert [drafter.closed for drafter in FakeDrafter.loaded] == [1, 1]


async def test_a_forced_unload_sends_sequences_to_another_version() -> None:
    FakeDrafter.loaded.clear()
    async with drafting("x=fake", "y=fake") as service:
        await load(service, "x", "fake")
        idle, other = await service.open([1]), await service.open([1], drafter="y")
        busy = await service.open([1])
        drafter = FakeDrafter.loaded[0]
        drafter.hold.clear()
        waiting = asyncio.create_task(busy.round([5]))
        await asyncio.to_thread(drafter.holding.wait)
        assert await unload(service, "x", "1", force=True) is False
        drafter.hold.set()
        assert list((await waiting).tree.tokens) == [5]
        for text in (busy, idle):
            with pytest.raises(Refused, match="DRAFTER_UNLOADED"):
                await text.read()
        again = await service.open([1, 5])
        assert again.opened.version == "2"
        assert list((await again.round([6])).tree.tokens) == [6]
        assert list((await other.round([7])).tree.tokens) == [7]
        assert await listed(service) == [("x", "2", 1.0, 1, False), ("y", "1", 1.0, 1, False)]
        await again.end()
        await other.end()


async def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    ngram = {"name": "x", "method": "ngram"}
    cases: list[tuple[dict[str, Any], str]] = [
        (ngram | {"name": "none"}, "INVALID_NAME"),
        (ngram | {"name": "a b"}, "INVALID_NAME"),
        (ngram | {"method": "magic"}, "UNKNOWN_METHOD"),
        (ngram | {"method": ""}, "UNKNOWN_METHOD"),
        (ngram | {"options": {"speed": "9"}}, "UNKNOWN_OPTION"),
        (ngram | {"options": {"max_n": "x"}}, "INVALID_OPTION"),
        (ngram | {"options": {"a": "x" * 5000}}, "INVALID_OPTION"),
        (ngram | {"options": dict.fromkeys(map(str, range(65)), "")}, "INVALID_OPTION"),
        (ngram | {"folder": str(tmp_path)}, "FOLDER_NOT_WANTED"),
        ({"name": "x", "method": "lm"}, "FOLDER_MISSING"),
    ]
    for folder, reason in {
        "a\0b": "FOLDER_MISSING",
        "x" * 5000: "FOLDER_NOT_ALLOWED",
        "/etc": "FOLDER_NOT_ALLOWED",
        f"{tmp_path}/link": "FOLDER_NOT_ALLOWED",
        f"{tmp_path}/../..": "FOLDER_NOT_ALLOWED",
        f"{tmp_path}/gone": "FOLDER_MISSING",
        f"{tmp_path}": "NO_CONFIG",
    }.items():
        cases.append(({"name": "x", "method": "lm", "folder": folder}, reason))
    async with drafting("ngram", roots=[tmp_path]) as service:
        for fields, reason in cases:
            assert await refusal(load(service, **fields)) == (CODE.INVALID_ARGUMENT, reason)
        assert [name for name, *_ in await listed(service)] == ["ngram"]


async def test_a_sequence_stays_at_the_version_that_its_client_requested() -> None:
    """The old version is freed when the sequence ends."""
    async with drafting("x=fake") as service:
        text = await service.open([1, 9], version="1")
        await load(service, "x", "fake", activate=True)
        assert await unload(service, "x", "1") is False
        for token in (4, 5):
            await text.round([token])
        await text.end()
        assert [version[1] for version in await listed(service)] == ["2"]


async def test_sequences_of_the_last_version_stay_until_another_is_loaded() -> None:
    async with drafting("x=fake") as service:
        text = await service.open([1])
        assert await unload(service, "x") is False
        await text.round([2])
        await load(service, "x", "fake")
        with pytest.raises(Refused, match="DRAFTER_REPLACED"):
            await text.round([3])


PROMPT = [5, 6, 7]
TEXT = [(7 * i) % VOCAB for i in range(1, 120)]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The text, for the method `replay`."""
    return write_records(tmp_path / "record.jsonl", (PROMPT, TEXT))


async def generate(service: Drafting, version: str = "") -> list[str]:
    """Generate TEXT as a verifier does. Returns the versions that drafted its trees."""
    fields = {"prompt_length": len(PROMPT), "version": version}
    text = await service.open([*PROMPT, TEXT[0]], **fields)
    length, emitted, versions = 1, [], []
    while length < len(TEXT):
        try:
            tree = await text.round(emitted, max_depth=len(TEXT) - length)
        except Refused as refused:
            if refused.reason != "DRAFTER_REPLACED":
                raise
            text, emitted = await service.open([*PROMPT, *TEXT[:length]], **fields), []
            continue
        versions.append(text.opened.version)
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
            assert info.accepted_length == pytest.approx((len(TEXT) - 1) / rounds, abs=0.1)
        worse, better = (await infos(service)).values()
        assert better.accepted_length > worse.accepted_length
        assert (await load(service, "x", "fake")).rounds == 0
