"""CUDA memory shared between processes: the exporting side and the mapping side."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from paceline.kv.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaDriver, DriverError


class NotMappable(Exception):
    """Memory of another process cannot be read on this device; the message gives the reason."""


class ExportedMemory:
    """One allocation, exported once when it is made.

    Safety contract: only the owner writes. After ``close()`` nothing in this process may use a
    tensor over it; processes that have it mapped keep it until they unmap it or end. When this
    process dies, their mappings become unusable: reads fail with a CUDA error that ends the
    reader's context. So a reader checks that the owner is alive before it reads.

    Attributes:
        bytes: The memory, uint8 ``[byte_size]``.
        device_uuid: UUID of the device, 16 bytes.
        handle: CUDA IPC handle by which other processes open it, 64 bytes.
    """

    def __init__(self, driver: CudaDriver, device: int, byte_size: int) -> None:
        """Allocate.

        Raises:
            DriverError: The device has too little memory, or the memory cannot be exported.
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
        """Free the memory. Closing twice is safe."""
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
    """A part of another process's allocation, to be read on one device of this process.

    All users of one allocation share one mapping; the last one to close it unmaps it.

    Attributes:
        bytes: The mapped part, uint8 ``[byte_size]``, on the owner's device.
    """

    def __init__(
        self,
        driver: CudaDriver,
        reader: int,
        device_uuid: bytes,
        handle: bytes,
        byte_offset: int,
        byte_size: int,
    ) -> None:
        """Map.

        Args:
            driver: The GPU's driver.
            reader: Ordinal of the device that will read it.
            device_uuid: UUID of the device that it is on.
            handle: CUDA IPC handle, as its owner exported it.
            byte_offset: Start of the part. Unit: bytes.
            byte_size: Size of the part. Unit: bytes.

        Raises:
            NotMappable: This process does not see that device, the reader has no access to it, or
                the driver refuses the handle.
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
            size = driver.size(self._device, address)
            if byte_offset + byte_size > size:
                raise NotMappable(
                    f"the verifier described bytes {byte_offset} to {byte_offset + byte_size} of "
                    f"an allocation of {size}"
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
        """Returns the allocation's address; opens it if this process has not."""
        with _LOCK:
            opened = _OPENED.get(self._key)
            if opened is None:
                opened = _Opened(self._driver.open(self._device, self._key[1]), 0)
                _OPENED[self._key] = opened
            opened.users += 1
            self._closed = False
            return opened.address

    def close(self) -> None:
        """Unmap it, unless others in this process use it. Closing twice is safe."""
        if self._closed:
            return
        self._closed = True
        self.__dict__.pop("bytes", None)  # not set if it could not be viewed
        with _LOCK:
            opened = _OPENED[self._key]
            opened.users -= 1
            if not opened.users:
                del _OPENED[self._key]
                self._driver.close(self._device, opened.address)


def _find(driver: CudaDriver, device_uuid: bytes) -> int:
    for device in range(driver.devices()):
        if driver.uuid(device) == device_uuid:
            return device
    raise NotMappable(
        f"this process does not see the verifier's GPU {device_uuid.hex()}; give both services "
        "the same devices"
    )
