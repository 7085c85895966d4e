"""The load check: versions draft along recorded texts before they are listed."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from paceline.drafter import LoadError, build_service

from .conftest import drafting, failure
from .fakes import FakeDrafter
from .test_registry_servicer import listed, load
from .test_replay import write_records

TEXTS = [([1, 2, 3], list(range(4, 40))), ([9], [8, 7, 6, 5, 8, 7, 6, 5, 8, 7, 6, 5])]


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    return write_records(tmp_path / "texts.jsonl", *TEXTS)


async def test_the_result_is_listed(recordings: Path, tmp_path: Path) -> None:
    async with drafting("ngram", recordings=recordings, roots=[tmp_path]) as service:
        info = await load(
            service, "x", "replay", folder=str(recordings), options={"p": "1", "max_nodes": "4"}
        )
        assert info.check.texts == 2
        # Five tokens per round; the first of each text is its anchor, which leaves 35 and 11.
        assert info.check.rounds == 7 + 3
        assert info.check.accepted_length == pytest.approx((7 * 4 + 4 + 4 + 1) / 10)


@pytest.mark.parametrize("method", ["failing", "failing-thread", "malformed", "huge"])
async def test_a_failing_version_is_not_loaded(recordings: Path, method: str) -> None:
    async with drafting("ngram", recordings=recordings) as service:
        stream = await service.attach([1])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await load(service, "x", method, activate=True)
        assert failure(error) == (grpc.StatusCode.INVALID_ARGUMENT, "CHECK_FAILED")
        assert [each[0] for each in await listed(service)] == ["ngram"]
        await stream.round([2])
        await stream.end()


async def test_a_failing_version_is_freed(recordings: Path) -> None:
    FakeDrafter.loaded.clear()
    async with drafting("ngram", recordings=recordings) as service:
        with pytest.raises(grpc.aio.AioRpcError, match="another tokenizer"):
            await load(service, "x", "fake", options={"vocab": "7"})
        await load(service, "x", "fake")
    assert [drafter.closed for drafter in FakeDrafter.loaded] == [1, 1]


async def test_methods_that_read_kv_are_not_checked(recordings: Path) -> None:
    async with drafting(recordings=recordings) as service:
        info = await load(service, "x", "fake", options={"kv": "0"})
        assert not info.HasField("check")


async def test_a_failing_drafter_of_the_command_line_fails_the_start(recordings: Path) -> None:
    with pytest.raises(LoadError, match="failed on the recorded texts"):
        async with drafting("x=failing", recordings=recordings):
            pytest.fail("it started")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"prompt": [1]}', '{"prompt": [], "tokens": [1]}', '{"prompt": [1], "tokens": []}',
     '{"prompt": [-1], "tokens": [1]}', '{"prompt": ["a"], "tokens": [1]}', "\xff",
     '{"prompt": "x", "tokens": [1]}', '{"prompt": [1], "tokens": [5000000000]}'],
)  # fmt: skip
def test_invalid_recordings_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LoadError) as error:
        build_service([], recordings=path)
    assert error.value.reason == "UNREADABLE_RECORDINGS"
    with pytest.raises(LoadError):
        build_service([], recordings=tmp_path / "none")
