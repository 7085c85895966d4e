"""Exported and mapped CUDA memory."""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver import FakeDriver

from paceline.kv import cuda
from paceline.kv.cuda import DriverError, ExportedMemory, MappedMemory, NotMappable


def map_of(driver: FakeDriver, owned: ExportedMemory, **change: Any) -> MappedMemory:
    arguments = {
        "reader": 0,
        "device_uuid": owned.device_uuid,
        "handle": owned.handle,
        "byte_offset": 16,
        "byte_size": 100,
    } | change
    return MappedMemory(driver, **arguments)


def test_both_sides_see_the_same_bytes() -> None:
    driver = FakeDriver()
    owned = ExportedMemory(driver, 0, 1000)
    mapped = map_of(driver, owned)
    owned.bytes[16:20] = 7
    assert mapped.bytes[:5].tolist() == [7, 7, 7, 7, 0]
    mapped.close()
    mapped.close()
    owned.close()
    owned.close()
    assert not driver.opened
    assert not driver.memory


def test_one_process_opens_an_allocation_once() -> None:
    driver = FakeDriver()
    owned = ExportedMemory(driver, 0, 1000)
    first, second = map_of(driver, owned), map_of(driver, owned, byte_offset=0)
    first.close()
    assert len(driver.opened) == 1
    assert second.bytes.numel() == 100
    second.close()
    assert not driver.opened
    map_of(driver, owned).close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_uuid": b"C" * 16}, "does not see"),
        ({"device_uuid": b"C"}, "expected 16 and 64"),
        ({"handle": b""}, "expected 16 and 64"),
        ({"handle": bytes(64)}, "cannot be opened.*namespace"),
        ({"reader": 1}, "no peer access"),
        ({"byte_size": 985}, "of an allocation of 1000"),
    ],
)
def test_memory_that_cannot_be_mapped(change: dict[str, Any], message: str) -> None:
    driver = FakeDriver()
    owned = ExportedMemory(driver, 0, 1000)
    with pytest.raises(NotMappable, match=message):
        map_of(driver, owned, **change)
    assert not driver.opened
    assert not cuda._OPENED


def test_memory_that_cannot_be_exported_is_the_owners_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()

    def refuse(device: int, address: int) -> bytes:
        raise DriverError("not supported")

    monkeypatch.setattr(driver, "export", refuse)
    owned = ExportedMemory(driver, 0, 1000)
    assert owned.handle == b""
    assert "drafters follow it: not supported" in caplog.text
    owned.bytes[:] = 7
    owned.close()
    assert not driver.memory
