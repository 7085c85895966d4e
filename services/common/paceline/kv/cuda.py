"""Memory of a GPU that processes share, and the calls of the CUDA driver that this needs.

Calls libcuda, which every machine with an NVIDIA GPU has under one name, whatever CUDA runtime
PyTorch came with.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


_T = TypeVar("_T")


class DriverError(Exception):
    """A call of the driver failed."""


class CudaDriver:
    """libcuda, in the primary contexts that PyTorch uses.

    Devices are ordinals of this process. All methods raise DriverError.

    Safety contract: a process that opened memory closes it before the exporter frees it; the driver
    keeps the memory alive until then only while the exporter's process lives.
    """

    def __init__(self) -> None:
        """Load libcuda.

        Raises:
            DriverError: There is no driver, or no device.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"there is no CUDA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))

    def devices(self) -> int:
        """Returns the number of devices that this process sees."""
        return self._read(ctypes.c_int(), "cuDeviceGetCount").value

    def uuid(self, device: int) -> bytes:
        """Returns the 16 bytes that identify a device; ordinals differ between processes."""
        found = (ctypes.c_ubyte * UUID_BYTES)()
        return bytes(self._read(found, "cuDeviceGetUuid_v2", self._handle(device)))

    def allocate(self, device: int, byte_size: int) -> int:
        """Returns the address of new memory."""
        with self._context(device):
            size = ctypes.c_size_t(byte_size)
            return self._read(ctypes.c_uint64(), "cuMemAlloc_v2", size).value

    def free(self, device: int, address: int) -> None:
        """Free an allocation."""
        with self._context(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, device: int, address: int) -> bytes:
        """Returns a handle, 64 bytes, by which other processes may open an allocation."""
        found = (ctypes.c_ubyte * HANDLE_BYTES)()
        with self._context(device):
            return bytes(self._read(found, "cuIpcGetMemHandle", ctypes.c_uint64(address)))

    def open(self, device: int, handle: bytes) -> int:
        """Returns the address in this process of an allocation of another process."""
        with self._context(device):
            arguments = (_IpcHandle(handle), _LAZY_PEER_ACCESS)
            return self._read(ctypes.c_uint64(), "cuIpcOpenMemHandle_v2", *arguments).value

    def size(self, device: int, address: int) -> int:
        """Returns the size in bytes of the whole allocation that begins at an address."""
        base, found = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            arguments = (ctypes.byref(base), ctypes.byref(found), ctypes.c_uint64(address))
            self._call("cuMemGetAddressRange_v2", *arguments)
        return found.value

    def close(self, device: int, address: int) -> None:
        """Close memory that :meth:`open` opened."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def reach(self, device: int, other: int) -> bool:
        """Let a device read the memory of another one; returns False if it cannot."""
        if device == other:
            return True
        handles = (self._handle(device), self._handle(other))
        if not self._read(ctypes.c_int(), "cuDeviceCanAccessPeer", *handles).value:
            return False
        theirs = self._primary_context(other)
        with self._context(device):
            status = self._library.cuCtxEnablePeerAccess(theirs, ctypes.c_uint(0))
        return status in (0, _PEER_ACCESS_ALREADY_ENABLED)

    def view(self, device: int, address: int, byte_size: int) -> Tensor:
        """Returns memory as uint8 ``[byte_size]``; the memory must outlive the tensor."""
        return torch.as_tensor(_ArrayInterface(address, byte_size), device=f"cuda:{device}")

    def _handle(self, device: int) -> ctypes.c_int:
        return self._read(ctypes.c_int(), "cuDeviceGet", ctypes.c_int(device))

    @lru_cache(maxsize=64)  # noqa: B019 - a process has one driver and keeps it
    def _primary_context(self, device: int) -> ctypes.c_void_p:
        return self._read(ctypes.c_void_p(), "cuDevicePrimaryCtxRetain", self._handle(device))

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._primary_context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _read(self, result: _T, name: str, *arguments: Any) -> _T:
        """Call a function whose first argument is where it writes its result; returns that."""
        self._call(name, ctypes.byref(result), *arguments)  # type: ignore[arg-type]
        return result

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            message = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {message} ({status})")


class _IpcHandle(ctypes.Structure):
    """The driver takes a handle by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]

    def __init__(self, handle: bytes) -> None:
        super().__init__((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))


class _ArrayInterface:
    """Memory that PyTorch did not allocate, as PyTorch accepts it."""

    def __init__(self, address: int, byte_size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@lru_cache(maxsize=1)
def cuda_driver() -> CudaDriver:
    """Returns the machine's driver.

    Raises:
        DriverError: There is no driver, or no device.
    """
    return CudaDriver()


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
        handle: CUDA IPC handle by which other processes open it, 64 bytes; empty where the driver
            exports no memory, as on WSL2 and some virtual GPUs.
    """

    def __init__(self, driver: CudaDriver, device: int, byte_size: int) -> None:
        """Allocate.

        Raises:
            DriverError: The device has too little memory.
        """
        self._driver = driver
        self._device = device
        self._address = driver.allocate(device, byte_size)
        try:
            self.device_uuid = driver.uuid(device)
            try:
                self.handle = driver.export(device, self._address)
            except DriverError as error:
                self.handle = b""
                _log.warning("KV on this GPU cannot be mapped, drafters follow it: %s", error)
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
