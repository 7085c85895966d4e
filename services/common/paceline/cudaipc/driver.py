"""The few calls of the CUDA driver that sharing memory takes.

The driver's own library is called, since every machine with a GPU has it under one name, whatever
runtime PyTorch came with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704
_OUT_OF_MEMORY = 2


class DriverError(Exception):
    """A call of the driver failed.

    Attributes:
        out_of_memory: For want of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class Driver(Protocol):
    """What is asked of a GPU's driver. Devices are ordinals of this process. All raise DriverError.

    Safety contract: memory that was opened must be closed by who opened it before the exporter
    frees it; the driver keeps it alive until then only while the exporter's process lives.
    """

    def devices(self) -> int:
        """Devices that this process sees."""
        ...

    def uuid(self, device: int) -> bytes:
        """What tells a device from all others, 16 bytes; ordinals differ between processes."""
        ...

    def allocate(self, device: int, byte_size: int) -> int:
        """Address of new memory."""
        ...

    def free(self, device: int, address: int) -> None:
        """Give it back."""
        ...

    def export(self, device: int, address: int) -> bytes:
        """A handle, 64 bytes, by which other processes may open an allocation."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Address here of an allocation of another process on a device."""
        ...

    def size(self, device: int, address: int) -> int:
        """Bytes of the whole allocation that begins at an address."""
        ...

    def close(self, device: int, address: int) -> None:
        """Undo ``open``."""
        ...

    def reach(self, device: int, other: int) -> bool:
        """Let a device read the memory of another one; False if it cannot."""
        ...

    def view(self, device: int, address: int, byte_size: int) -> Tensor:
        """That memory as uint8 ``[byte_size]``; it must outlive the tensor."""
        ...


class CudaDriver:
    """The driver behind libcuda (see :class:`Driver`), in the contexts that PyTorch uses."""

    def __init__(self) -> None:
        """Load it.

        Raises:
            DriverError: There is no driver, or no device.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"there is no CUDA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))

    def devices(self) -> int:
        """See :class:`Driver`."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, device: int) -> bytes:
        """See :class:`Driver`."""
        found = (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._handle(device))
        return bytes(found)

    def allocate(self, device: int, byte_size: int) -> int:
        """See :class:`Driver`."""
        address = ctypes.c_uint64()
        with self._context(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(byte_size))
        return address.value

    def free(self, device: int, address: int) -> None:
        """See :class:`Driver`."""
        with self._context(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, device: int, address: int) -> bytes:
        """See :class:`Driver`."""
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        with self._context(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """See :class:`Driver`."""
        address = ctypes.c_uint64()
        by_value = _IpcHandle(handle)
        with self._context(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, _LAZY_PEER_ACCESS)
        return address.value

    def size(self, device: int, address: int) -> int:
        """See :class:`Driver`."""
        base, found = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(found),
                ctypes.c_uint64(address),
            )
        return found.value

    def close(self, device: int, address: int) -> None:
        """See :class:`Driver`."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def reach(self, device: int, other: int) -> bool:
        """See :class:`Driver`."""
        if device == other:
            return True
        able = ctypes.c_int()
        self._call(
            "cuDeviceCanAccessPeer", ctypes.byref(able), self._handle(device), self._handle(other)
        )
        if not able.value:
            return False
        theirs = self._primary_context(other)
        with self._context(device):
            status = self._library.cuCtxEnablePeerAccess(theirs, ctypes.c_uint(0))
        return status in (0, _PEER_ACCESS_ALREADY_ENABLED)

    def view(self, device: int, address: int, byte_size: int) -> Tensor:
        """See :class:`Driver`."""
        return torch.as_tensor(_ArrayInterface(address, byte_size), device=f"cuda:{device}")

    def _handle(self, device: int) -> ctypes.c_int:
        found = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
        return found

    @lru_cache(maxsize=64)  # noqa: B019 - there is one driver, for ever
    def _primary_context(self, device: int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
        return context

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._primary_context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {said} ({status})", out_of_memory=status == _OUT_OF_MEMORY)


class _IpcHandle(ctypes.Structure):
    """The driver takes a handle by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]

    def __init__(self, handle: bytes) -> None:
        super().__init__((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))


class _ArrayInterface:
    """How PyTorch takes over memory that it did not allocate."""

    def __init__(self, address: int, byte_size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@lru_cache(maxsize=1)
def cuda_driver() -> Driver:
    """The machine's driver.

    Raises:
        DriverError: There is none, or no device.
    """
    return CudaDriver()
