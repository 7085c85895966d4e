"""What is loaded survives a restart; what cannot be believed does no harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.drafter.registry.state import FILE_NAME, RegistryState, StateFile
from paceline.drafter.spec import DrafterSpec
from paceline.v1 import drafter_pb2

from .conftest import drafting
from .test_registry_servicer import listed, load, unload
from .test_swap import trial, trial_of


async def test_a_restart_takes_up_what_was_there(tmp_path: Path) -> None:
    options = {"state_dir": tmp_path / "state"}
    async with drafting("b=fake", "a=fake", **options) as service:
        await load(service, "a", "inline-fake", version="next", options={"vocab": "99"})
        await load(service, "gone", "fake")
        await load(service, "b", "fake", activate=True)
        await unload(service, "gone")
        await trial(service, "a", "next", share=0.25, confidence=0.9)
        before = await listed(service)
        assert [each[:3] for each in before] == [
            ("a", "1", 0.75), ("a", "next", 0.25), ("b", "1", 0.0), ("b", "2", 1.0)
        ]  # fmt: skip
        settings = (await trial_of(service)).settings
    async with drafting("b=fake", "a=fake", **options) as service:
        assert await listed(service) == before
        found = await trial_of(service)
        assert (found.candidate, found.baseline) == ("next", "1")
        assert found.state == drafter_pb2.TRIAL_STATE_RUNNING
        assert found.settings == settings
        assert (await service.attach([1])).attached.drafter == "b", "the default is the same"
        await unload(service, "b", "2")
        assert (await load(service, "b", "fake")).version == "3", "a number is given once"


async def test_told_otherwise_it_begins_anew(tmp_path: Path) -> None:
    options = {"state_dir": tmp_path}
    async with drafting("a=fake", **options) as service:
        await load(service, "c", "fake")
    async with drafting("a=fake", "b=fake", **options) as service:
        assert [each[0] for each in await listed(service)] == ["a", "b"]
    async with drafting("a=fake", "b=fake", **options) as service:
        assert [each[0] for each in await listed(service)] == ["a", "b"]


async def test_what_cannot_be_loaded_any_more_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    options = {"state_dir": tmp_path / "state", "roots": [tmp_path]}
    async with drafting("a=fake", **options) as service:
        await load(service, "a", "fake", folder=str(folder), activate=True)
    folder.rmdir()
    async with drafting("a=fake", **options) as service:
        assert [each[:3] for each in await listed(service)] == [("a", "1", 1.0)]


GOOD: dict[str, Any] = {
    "format": 1,
    "given": [],
    "loaded": [
        {"name": "a", "method": "fake", "folder": None, "options": {}, "version": "1", "share": 1.0}
    ],
    "numbers": {"a": 1},
    "trials": [],
}
SETTINGS = {"confidence": 0.9, "length_margin": 0, "time_margin": 0, "max_generations": 8}
TRIAL = {"name": "a", "candidate": "1", "baseline": "1", "looks": 0, "settings": SETTINGS}


def with_version(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "loaded": [{**GOOD["loaded"][0], **fields}]}


@pytest.mark.parametrize(
    "value",
    [
        None, [], 7, {}, {**GOOD, "format": 2}, {**GOOD, "loaded": 7},
        with_version(name="../x"), with_version(share=2.0), with_version(share="much"),
        with_version(version=""), with_version(options=[1]), with_version(folder=3),
        {**GOOD, "loaded": GOOD["loaded"] * 2}, {**GOOD, "numbers": {"a": "x"}},
        {**GOOD, "trials": [{**TRIAL, "baseline": "9"}]}, {**GOOD, "trials": [TRIAL]},
        {**GOOD, "trials": [{**TRIAL, "settings": {"confidence": 7}}]},
        {**GOOD, "trials": [{**TRIAL, "settings": {"speed": 7}}]},
    ],
)  # fmt: skip
async def test_a_file_that_cannot_be_believed_is_set_aside(tmp_path: Path, value: Any) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(value))
    async with drafting("b=fake", state_dir=tmp_path) as service:
        assert [each[0] for each in await listed(service)] == ["b"]
    assert json.loads((tmp_path / f"{FILE_NAME}.bad").read_text()) == value


async def test_good_ones_and_half_ones(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(GOOD))
    async with drafting(state_dir=tmp_path) as service:
        assert [each[0] for each in await listed(service)] == ["a"]
    text = (tmp_path / FILE_NAME).read_text()
    (tmp_path / FILE_NAME).write_text(text[: len(text) // 2])
    async with drafting(state_dir=tmp_path) as service:
        assert await listed(service) == []


async def test_a_full_disk_is_told_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drafting("a=fake", state_dir=tmp_path) as service:
        await load(service, "0", "fake")
        before = (tmp_path / FILE_NAME).read_text()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("paceline.drafter.registry.state.os.fsync", full)
            with pytest.raises(Exception, match="would be lost in a restart"):
                await load(service, "b", "fake")
        assert (tmp_path / FILE_NAME).read_text() == before
        assert [each[0] for each in await listed(service)] == ["0", "a", "b"]
        await load(service, "c", "fake")
    assert os.listdir(tmp_path) == [FILE_NAME], "no draft is left"


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert file.read() is None
    state = RegistryState(given=[DrafterSpec("a", "fake", Path("/x"), {"k": "v"})])
    file.write(state)
    assert file.read() == state
