"""An allocation that is shared: the side that owns it, and the side that maps it."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from paceline.cudaipc.driver import HANDLE_BYTES, UUID_BYTES, Driver, DriverError


class NotMappable(Exception):
    """Memory of another process cannot be read on this device; the message says why."""


class ExportedMemory:
    """One allocation, exported once when it is made.

    Safety contract: only the owner writes. ``close()`` gives it back for good, so nothing of this
    process may use a tensor over it any more; processes that have it mapped keep it until they
    unmap it or end. When this process dies, their mappings become unusable: reads fail with a CUDA
    error that ends the reader's context. So a reader looks whether the owner lives before it reads.

    Attributes:
        bytes: All of it, uint8.
        device_uuid: Of the device, 16 bytes.
        handle: What other processes open it by, 64 bytes.
    """

    def __init__(self, driver: Driver, device: int, byte_size: int) -> None:
        """Allocate.

        Raises:
            DriverError: There is no memory, or it cannot be exported.
        """
        self._driver = driver
        self._device = device
        self._address = driver.allocate(device, byte_size)
        try:
            self.device_uuid = driver.uuid(device)
            self.handle = driver.export(device, self._address)
            self.bytes: Tensor = driver.view(device, self._address, byte_size)
        except BaseException:
            driver.free(device, self._address)
            raise

    def close(self) -> None:
        """Give it back. Closing twice is safe."""
        if self._address:
            del self.bytes
            self._driver.free(self._device, self._address)
            self._address = 0


@dataclass
class _Opened:
    """An allocation that is open in this process: the driver opens each only once."""

    address: int
    users: int


_OPENED: dict[tuple[int, bytes], _Opened] = {}
_LOCK = Lock()


class MappedMemory:
    """An allocation of another process, to be read on one device of this one.

    All users of one allocation share one mapping; the last one to close it unmaps it.

    Attributes:
        bytes: What was asked for, uint8, on the owner's device.
    """

    def __init__(
        self,
        driver: Driver,
        reader: int,
        device_uuid: bytes,
        handle: bytes,
        byte_offset: int,
        byte_size: int,
    ) -> None:
        """Map.

        Args:
            driver: The GPU's driver.
            reader: Device that will read it.
            device_uuid: Device that it is on.
            handle: As its owner exported it.
            byte_offset: Where the wanted part begins.
            byte_size: Its size.

        Raises:
            NotMappable: This process does not see that device, the reader cannot reach it, or the
                driver refuses the handle.
        """
        if len(device_uuid) != UUID_BYTES or len(handle) != HANDLE_BYTES:
            raise NotMappable(
                f"a device UUID of {len(device_uuid)} and a handle of {len(handle)} bytes, "
                f"expected {UUID_BYTES} and {HANDLE_BYTES}"
            )
        self._driver = driver
        self._closed = True
        try:
            self._device = _find(driver, device_uuid)
            if not driver.reach(reader, self._device):
                raise NotMappable(
                    f"GPU {reader} has no peer access to the verifier's GPU {device_uuid.hex()}; "
                    "run the drafter on the verifier's GPU, or on one linked to it"
                )
            self._key = (self._device, handle)
            address = self._open()
            there = driver.size(self._device, address)
            if byte_offset + byte_size > there:
                raise NotMappable(
                    f"the verifier described bytes {byte_offset} to {byte_offset + byte_size} of "
                    f"an allocation of {there}"
                )
            self.bytes: Tensor = driver.view(self._device, address + byte_offset, byte_size)
        except DriverError as error:
            self.close()
            raise NotMappable(
                f"the verifier's GPU memory cannot be opened ({error}); processes in containers "
                "need a common PID and IPC namespace"
            ) from error
        except NotMappable:
            self.close()
            raise

    def _open(self) -> int:
        """The allocation's address, opened if nobody here had it open."""
        with _LOCK:
            opened = _OPENED.get(self._key)
            if opened is None:
                opened = _Opened(self._driver.open(self._device, self._key[1]), 0)
                _OPENED[self._key] = opened
            opened.users += 1
            self._closed = False
            return opened.address

    def close(self) -> None:
        """Unmap it, if nobody else in this process uses it. Closing twice is safe."""
        if self._closed:
            return
        self._closed = True
        self.__dict__.pop("bytes", None)  # not there if it could not be viewed
        with _LOCK:
            opened = _OPENED[self._key]
            opened.users -= 1
            if not opened.users:
                del _OPENED[self._key]
                self._driver.close(self._device, opened.address)


def _find(driver: Driver, device_uuid: bytes) -> int:
    for device in range(driver.devices()):
        if driver.uuid(device) == device_uuid:
            return device
    raise NotMappable(
        f"this process does not see the verifier's GPU {device_uuid.hex()}; give both services "
        "the same devices"
    )
