"""Recording of texts on disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from calls import until
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter import LoadError
from paceline.drafter.recordings import MIN_BYTES, Recording, TextRecorder, read_recordings
from paceline.v1 import drafter_pb2, sampling_pb2

from .conftest import Drafting, drafting

TEXT = Recording((1, 2, 3), (4, 5), 0.5, 7, "f" * 64)
ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9).map(tuple)


@contextlib.asynccontextmanager
async def recording(folder: Path, limit: int = MIN_BYTES) -> AsyncIterator[TextRecorder]:
    recorder = TextRecorder(folder, limit)
    try:
        yield recorder
    finally:
        await recorder.close()


async def written(recorder: TextRecorder, texts: int) -> None:
    """Return when so many texts are recorded or lost."""
    await until(lambda: recorder.recorded + recorder.lost >= texts)


def used_bytes(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.iterdir())


async def generate(service: Drafting) -> None:
    """One short text, [1, 2, 3] and then [4, 5]."""
    sampling = sampling_pb2.SamplingParams(temperature=0.5, seed=7)
    text = await service.open([1, 2, 3], sampling=sampling)
    await text.round([4])
    await text.round([5])
    await text.end()


async def records_texts(service: Drafting) -> bool:
    request = drafter_pb2.ListDraftersRequest()
    return bool((await service.registry.ListDrafters(request)).records_texts)


async def test_texts_are_recorded_in_private_files(tmp_path: Path) -> None:
    folder, facts = tmp_path / "texts", {"target_fingerprint": "f" * 64}
    async with drafting("ngram", record=folder, target=facts) as service:
        assert await records_texts(service)
        await generate(service)
        nothing_new = await service.open([1, 2])
        await nothing_new.end()
    assert read_recordings(folder) == [TEXT]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


async def test_by_default_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with drafting("ngram") as service:
        assert not await records_texts(service)
        await generate(service)
    assert not os.listdir(tmp_path)


async def test_a_full_disk_ends_the_recording_but_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with drafting("ngram", record=tmp_path) as service:
        monkeypatch.setattr("paceline.drafter.recordings.os.write", full)
        for _ in range(3):
            await generate(service)
        while await records_texts(service):
            await generate(service)
        await generate(service)
        assert not await records_texts(service)
    assert [r.message for r in caplog.records].count(
        "a write failed: texts are no longer recorded"
    ) == 1


async def test_the_oldest_texts_are_deleted_at_the_limit(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        for number in range(400):
            recorder.add(lambda n=number: Recording((n,), tuple(range(1000, 2000))))  # type: ignore[misc]
            await written(recorder, number + 1)
            assert used_bytes(tmp_path) <= MIN_BYTES
    kept = [text.prompt[0] for text in read_recordings(tmp_path)]
    assert kept == list(range(400 - len(kept), 400))
    assert len(kept) * 5000 > MIN_BYTES // 2
    async with recording(tmp_path) as later:  # keeps the files
        later.add(lambda: TEXT)
        await written(later, 1)
        assert used_bytes(tmp_path) <= MIN_BYTES
    assert read_recordings(tmp_path)[-1] == TEXT


async def test_lost_texts_are_counted(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        recorder.add(lambda: Recording((1,), tuple(range(40_000))))  # over an eighth of the limit
        recorder.add(lambda: Recording((1,), ()))  # no text at all
        for _ in range(1000):  # without a turn of the loop in between
            recorder.add(lambda: TEXT)
        await written(recorder, 1002)
        assert recorder.recording
        assert recorder.recorded == len(read_recordings(tmp_path)) == 62


async def test_a_folder_has_one_recorder(tmp_path: Path) -> None:
    async with recording(tmp_path):
        with pytest.raises(OSError, match="another process records"):
            TextRecorder(tmp_path, MIN_BYTES)
    with pytest.raises(ValueError, match=str(MIN_BYTES)):
        TextRecorder(tmp_path, MIN_BYTES - 1)


@settings(max_examples=40)
@given(texts=st.lists(st.builds(Recording, ids, ids), min_size=1, max_size=4), data=st.data())
def test_a_truncated_file_loses_at_most_its_last_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[Recording], data: st.DataObject
) -> None:
    whole = "".join(text.to_json() + "\n" for text in texts).encode()
    last = len(texts[-1].to_json()) + 1
    cut = data.draw(st.integers(len(whole) - last, len(whole)))
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_bytes(whole[:cut])
    if cut >= len(whole) - 1:
        assert read_recordings(file) == texts
    elif texts[1:]:
        assert read_recordings(file) == texts[:-1]
    else:
        with pytest.raises(LoadError, match="no texts"):
            read_recordings(file)


def test_a_malformed_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{TEXT.to_json()}\n{{\n{TEXT.to_json()}\n")
    with pytest.raises(LoadError, match=r"a\.jsonl line 2"):
        read_recordings(tmp_path)


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
        read_recordings(path)
    assert error.value.reason == "UNREADABLE_RECORDINGS"
    with pytest.raises(LoadError):
        read_recordings(tmp_path / "none")
