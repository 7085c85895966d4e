"""The registry is restored after a restart; an invalid state file is set aside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.drafter.spec import DrafterSpec
from paceline.drafter.state import FILE_NAME, RegistryState, StateFile

from .conftest import drafting
from .test_registry_servicer import activate, listed, load, unload


async def test_a_restart_restores_versions_and_shares(tmp_path: Path) -> None:
    options = {"state_dir": tmp_path / "state"}
    async with drafting("b=fake", "a=fake", **options) as service:
        await load(service, "a", "fake", version="next", options={"vocab": "99"})
        await load(service, "gone", "fake")
        await load(service, "b", "fake", activate=True)
        await unload(service, "gone")
        await activate(service, "a", "next", 0.25)
        before = await listed(service)
        assert [each[:3] for each in before] == [
            ("a", "1", 0.75), ("a", "next", 0.25), ("b", "1", 0.0), ("b", "2", 1.0)
        ]  # fmt: skip
    async with drafting("b=fake", "a=fake", **options) as service:
        assert await listed(service) == before
        assert (await service.open([1])).opened.drafter == "b", "the default is the same"
        await unload(service, "b", "2")
        assert (await load(service, "b", "fake")).version == "3", "a number is given once"


async def test_a_start_with_other_drafters_ignores_the_state(tmp_path: Path) -> None:
    options = {"state_dir": tmp_path}
    async with drafting("a=fake", **options) as service:
        await load(service, "c", "fake")
    async with drafting("a=fake", "b=fake", **options) as service:
        assert [each[0] for each in await listed(service)] == ["a", "b"]
    async with drafting("a=fake", "b=fake", **options) as service:
        assert [each[0] for each in await listed(service)] == ["a", "b"]


async def test_versions_that_cannot_be_loaded_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    options = {"state_dir": tmp_path / "state", "roots": [tmp_path]}
    async with drafting("a=fake", **options) as service:
        await load(service, "a", "fake", folder=str(folder), activate=True)
    folder.rmdir()
    async with drafting("a=fake", **options) as service:
        assert [each[:3] for each in await listed(service)] == [("a", "1", 1.0)]


VERSION = {"name": "a", "method": "fake", "folder": None, "options": {}, "version": "1"}
GOOD: dict[str, Any] = {
    "format": 2,
    "configured": [],
    "loaded": [[VERSION, 1.0], [{**VERSION, "version": "2"}, 0.0]],
    "numbers": {"a": 1},
}


def with_version(share: Any = 1.0, **fields: Any) -> dict[str, Any]:
    return {**GOOD, "loaded": [[{**VERSION, **fields}, share]]}


@pytest.mark.parametrize(
    "value",
    [
        None, [], 7, {}, {**GOOD, "format": 1}, {**GOOD, "loaded": 7},
        with_version(name="../x"), with_version(share=2.0), with_version(share="much"),
        with_version(version=""), with_version(options=[1]), with_version(folder=3),
        {**GOOD, "loaded": GOOD["loaded"] * 2}, {**GOOD, "numbers": {"a": "x"}},
    ],
)  # fmt: skip
async def test_an_invalid_file_is_set_aside(tmp_path: Path, value: Any) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(value))
    async with drafting("b=fake", state_dir=tmp_path) as service:
        assert [each[0] for each in await listed(service)] == ["b"]
    assert json.loads((tmp_path / f"{FILE_NAME}.bad").read_text()) == value


async def test_a_valid_file_is_restored_and_a_truncated_one_is_not(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(GOOD))
    async with drafting(state_dir=tmp_path) as service:
        assert [each[1] for each in await listed(service)] == ["1", "2"]
    text = (tmp_path / FILE_NAME).read_text()
    (tmp_path / FILE_NAME).write_text(text[: len(text) // 2])
    async with drafting(state_dir=tmp_path) as service:
        assert await listed(service) == []


async def test_a_full_disk_is_reported_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drafting("a=fake", state_dir=tmp_path) as service:
        await load(service, "0", "fake")
        before = (tmp_path / FILE_NAME).read_text()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("paceline.drafter.state.os.fsync", full)
            with pytest.raises(Exception, match="would be lost in a restart"):
                await load(service, "b", "fake")
        assert (tmp_path / FILE_NAME).read_text() == before
        assert [each[0] for each in await listed(service)] == ["0", "a", "b"]
        await load(service, "c", "fake")
    assert os.listdir(tmp_path) == [FILE_NAME], "a temporary file is left"


def test_the_folder_is_private(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert file.read() is None
    state = RegistryState(configured=[DrafterSpec("a", "fake", Path("/x"), {"k": "v"})])
    file.write(state)
    assert file.read() == state
