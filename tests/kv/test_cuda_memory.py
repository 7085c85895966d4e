"""Exported and mapped CUDA memory, by the calls of libcuda; tests/gpu has those of a real one."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from open_files import MEMORY, open_files
from stub_driver import NO_FILES, NO_HANDLES, StubDriver

from paceline.cuda import memory as cuda
from paceline.cuda.memory import (
    CudaDriver,
    DriverError,
    ExportedMemory,
    MappedMemory,
    NotMappable,
    close_unused,
)

SIZE = 100_000
FILES = MEMORY + "gpu"  # the name that the stub gives


@pytest.fixture(params=["", NO_FILES], ids=["file", "ipc"])
def driver(request: pytest.FixtureRequest) -> Iterator[StubDriver]:
    """Of GPUs that pass descriptors, or handles of CUDA IPC; nothing may be left of its memory."""
    before = open_files(FILES)
    made = StubDriver(request.param)
    yield made
    close_unused()
    assert made.live() == {}
    assert not cuda._OPENED
    assert open_files(FILES) == before


def map_of(driver: StubDriver, owned: ExportedMemory, **change: Any) -> MappedMemory:
    arguments = {
        "reader": 0, "device_uuid": owned.device_uuid, "handle": owned.handle, "byte_offset": 16,
        "byte_size": 100, "file": owned.file,
    } | change  # fmt: skip
    return MappedMemory(driver, **arguments)


def test_both_sides_see_the_same_bytes(driver: StubDriver) -> None:
    owned = ExportedMemory(driver, 0, SIZE)
    mapped = map_of(driver, owned)
    owned.bytes[16:20] = 7
    assert mapped.bytes[:5].tolist() == [7, 7, 7, 7, 0]
    for each in (mapped, mapped, owned, owned):
        each.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_uuid": b"C" * 16}, "does not see"),
        ({"device_uuid": b"C"}, "expected 16 and"),
        ({"handle": b""}, "expected 16 and"),
        ({"handle": bytes(64), "file": -1}, "cannot be opened.*namespace"),
        ({"handle": bytes(16), "file": 9999}, "cannot be opened"),
        ({"reader": 1}, "no peer access"),
        ({"byte_size": 1 << 20}, "of an allocation of 100000|cuMemMap"),
    ],
)
def test_memory_that_cannot_be_mapped(
    driver: StubDriver, change: dict[str, Any], message: str
) -> None:
    owned = ExportedMemory(driver, 0, SIZE)
    with pytest.raises(NotMappable, match=message):
        map_of(driver, owned, **change)
    owned.close()


def test_memory_that_cannot_be_exported_is_the_owners_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StubDriver(NO_HANDLES)
    monkeypatch.setattr(CudaDriver, "create", refuse)
    owned = ExportedMemory(driver, 0, 1000)
    assert (owned.handle, owned.file) == (b"", -1)
    assert "drafters follow it: cuIpcGetMemHandle: not supported (801)" in caplog.text
    owned.bytes[:] = 7
    owned.close()
    assert driver.live() == {}


def refuse(*arguments: Any) -> Any:
    raise DriverError("not supported")


def test_an_error_of_any_call_leaves_nothing_behind(driver: StubDriver) -> None:
    """Only memory that a failing call was to free stays; closing raises nothing."""

    def use() -> None:
        owned = ExportedMemory(driver, 0, SIZE)
        try:
            mapped = map_of(driver, owned)
            owned.bytes[16] = 9
            assert mapped.bytes[0] == 9
            mapped.close()
        finally:
            close_unused()
            owned.close()

    use()
    calls, failing = driver.number("stub_calls"), driver.number("stub_failing")
    before = calls.value
    use()
    count = calls.value - before
    assert count > 20
    failed, kept = 0, 0
    for number in range(count):
        failing.value = calls.value + number
        live, opened = driver.live(), open_files(FILES)
        try:
            use()
        except (DriverError, NotMappable):
            failed += 1
            assert driver.live() == live, number
            assert open_files(FILES) == opened, number
        kept += driver.live() != live
        failing.value = -1
        assert not cuda._OPENED
    assert failed > count // 3
    assert kept <= 8  # calls that free, and those that lead to them
    driver.forget()


@pytest.mark.parametrize("missing", ["cuMemCreate", "cuMemMap"])
def test_an_old_driver_has_handles_only(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StubDriver()

    class Old:
        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            return getattr(real, name)

    real = driver._library
    monkeypatch.setattr(driver, "_library", Old())
    owned = ExportedMemory(driver, 0, SIZE)
    assert len(owned.handle) == 64
    owned.close()
    assert real.stub_live(0) == 0
    assert driver.live() == {}


OWNER = """
import socket, sys, time
from stub_driver import StubDriver
from paceline.cuda.memory import ExportedMemory
owned = ExportedMemory(StubDriver(sys.argv[2]), 0, 100_000)
owned.bytes[16:20] = 7
with socket.socket(fileno=int(sys.argv[1])) as own:
    socket.send_fds(own, [owned.handle], [owned.file] if owned.file >= 0 else [])
    time.sleep(600)
"""


def test_an_owner_that_is_killed(driver: StubDriver) -> None:
    """By a descriptor the memory lives on; by a handle of CUDA IPC nobody can open it any more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(theirs.fileno()), driver.refused],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parent,
        )
        try:
            handle, passed, _, _ = socket.recv_fds(ours, 64, 1, socket.MSG_CMSG_CLOEXEC)
            about = (driver, 0, b"A" * 16, handle, 16, 100, *passed)
            mapped = MappedMemory(*about)
            assert mapped.bytes[:5].tolist() == [7, 7, 7, 7, 0]
        finally:
            owner.kill()
            owner.wait()
        if passed:
            assert mapped.bytes[:5].tolist() == [7, 7, 7, 7, 0]
        mapped.close()
        close_unused()
        if passed:
            later = MappedMemory(*about)
            assert later.bytes[:5].tolist() == [7, 7, 7, 7, 0]
            later.close()
        else:
            with pytest.raises(NotMappable, match="cannot be opened"):
                MappedMemory(*about)
    for file in passed:
        os.close(file)
