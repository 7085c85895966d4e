"""Memory of a GPU that processes share, and the calls of the CUDA driver that this needs.

The owner passes a file descriptor of the memory, or, where the driver has none, the handle of CUDA
IPC. Calls libcuda, which every machine with an NVIDIA GPU has under one name, whatever CUDA runtime
PyTorch came with. The package cuda-bindings is no substitute: it refuses a driver without
cuGetProcAddress_v2, as those before CUDA 12 are and the one that tests compile.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.device import DriverError, NotMappable

_log = logging.getLogger(__name__)
HANDLE_BYTES = 64  # size of a handle of CUDA IPC
NAME_BYTES = 16  # size of the name of memory that is passed as a file descriptor
UUID_BYTES = 16

# Of cuda.h, by their names there.
_LAZY_PEER_ACCESS = 1
_ALLOCATION_TYPE_PINNED = 1
_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_READ, _ACCESS_READWRITE = 1, 3
_NO_FLAGS = ctypes.c_ulonglong(0)

# Of dlpack.h.
_DL_CUDA = 2
_DL_UINT = 1
_DL_CAPSULE = b"dltensor"
_T = TypeVar("_T")

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))

_OPENED: dict[tuple[int, bytes], _OpenAllocation] = {}
_LOCK = Lock()


@dataclass(frozen=True)
class Allocation:
    """Memory of a GPU in this process."""

    address: int  # where it begins
    byte_size: int  # its size
    free: Callable[[], None]  # frees or unmaps it; raises nothing


class CudaDriver:
    """libcuda, in the primary contexts that PyTorch uses.

    Devices are ordinals of this process. All methods raise DriverError, and leave nothing behind
    then. What frees memory does not raise: an error is logged.

    Safety contract: memory that was opened by a handle of CUDA IPC is closed before its owner frees
    it; the driver keeps it until then only while the owner lives. Memory that was mapped by a file
    descriptor exists as long as a process has it mapped, or a descriptor of it.
    """

    _dl_device = _DL_CUDA

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """Load libcuda. Raises ``DriverError``: there is no driver, or no device."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"there is no CUDA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))

    def devices(self) -> int:
        """Return the number of devices that this process sees."""
        return self._read(ctypes.c_int(), "cuDeviceGetCount").value

    def uuid(self, device: int) -> bytes:
        """Return the 16 bytes that identify a device; ordinals differ between processes."""
        uuid = (ctypes.c_ubyte * UUID_BYTES)()
        return bytes(self._read(uuid, "cuDeviceGetUuid_v2", self._handle(device)))

    def create(self, device: int, byte_size: int) -> tuple[Allocation, int]:
        """Return new memory and its file descriptor, which the caller closes."""
        about = _shareable(device)
        with self._context(device), ExitStack() as failed:
            size = ctypes.c_size_t(self._whole(device, byte_size))
            memory = self._read(
                ctypes.c_uint64(), "cuMemCreate", size, ctypes.byref(about), _NO_FLAGS
            )
            with self._released("cuMemRelease", memory):
                kind = ctypes.c_int(_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                file = self._read(
                    ctypes.c_int(), "cuMemExportToShareableHandle", memory, kind, _NO_FLAGS
                ).value
                failed.callback(os.close, file)
                os.set_inheritable(file, False)
                allocation = self._map(device, memory, size, (_ACCESS_READWRITE,))
            failed.pop_all()
        return allocation, file

    def map(self, reader: int, device: int, file: int, byte_size: int) -> Allocation:
        """Return memory of another process on a device, by a descriptor that stays open.

        The device ``reader`` can access it, for reading only where the driver knows such a mapping.
        """
        with self._context(reader):
            size = ctypes.c_size_t(self._whole(device, byte_size))
            memory = self._read(
                ctypes.c_uint64(),
                "cuMemImportFromShareableHandle",
                ctypes.c_void_p(file),
                ctypes.c_int(_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            )
            with self._released("cuMemRelease", memory):
                return self._map(reader, memory, size, (_ACCESS_READ, _ACCESS_READWRITE))

    def allocate(self, device: int, byte_size: int) -> Allocation:
        """Return new memory, for :meth:`export`."""
        with self._context(device):
            size = ctypes.c_size_t(byte_size)
            address = self._read(ctypes.c_uint64(), "cuMemAlloc_v2", size)
        return self._allocation(device, address, byte_size, "cuMemFree_v2")

    def export(self, device: int, allocation: Allocation) -> bytes:
        """Return the handle of CUDA IPC, 64 bytes, by which other processes may open memory."""
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        with self._context(device):
            return bytes(
                self._read(handle, "cuIpcGetMemHandle", ctypes.c_uint64(allocation.address))
            )

    def open(self, reader: int, handle: bytes) -> Allocation:
        """Return memory of another process by its handle of CUDA IPC, once in each process.

        The device ``reader`` can access it.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(reader), ExitStack() as failed:
            arguments = (_IpcHandle(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
            address = self._read(ctypes.c_uint64(), "cuIpcOpenMemHandle_v2", *arguments)
            failed.callback(self._release, "cuIpcCloseMemHandle", address)
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            failed.pop_all()
        return self._allocation(reader, address, size.value, "cuIpcCloseMemHandle")

    def reach(self, device: int, other: int) -> bool:
        """Return whether a device can read the memory of another one."""
        if device == other:
            return True
        handles = (self._handle(device), self._handle(other))
        return bool(self._read(ctypes.c_int(), "cuDeviceCanAccessPeer", *handles).value)

    def view(self, device: int, address: int, byte_size: int) -> Tensor:
        """Return memory as uint8 ``[byte_size]`` on a device that can access it.

        Kernels over the tensor run on that device, wherever the memory is. The memory must outlive
        the tensor.
        """
        capsule = _dl_capsule(self._dl_device, device, address, byte_size)
        return from_dlpack(capsule)

    def _handle(self, device: int) -> ctypes.c_int:
        return self._read(ctypes.c_int(), "cuDeviceGet", ctypes.c_int(device))

    @lru_cache(maxsize=64)  # noqa: B019 - a process has one driver and keeps it
    def _primary_context(self, device: int) -> ctypes.c_void_p:
        return self._read(ctypes.c_void_p(), "cuDevicePrimaryCtxRetain", self._handle(device))

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._primary_context(device))
        with self._released("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())):
            yield

    def _whole(self, device: int, byte_size: int) -> int:
        """Return a size rounded up to what is created and mapped at once."""
        about = _shareable(device)
        unit = self._read(
            ctypes.c_size_t(), "cuMemGetAllocationGranularity", ctypes.byref(about), ctypes.c_int(0)
        ).value
        return -(-byte_size // unit) * unit

    def _map(
        self, device: int, memory: ctypes.c_uint64, size: ctypes.c_size_t, access: tuple[int, ...]
    ) -> Allocation:
        """Map created or imported memory for a device, with the first kind of access there is."""
        zero, nowhere = ctypes.c_size_t(0), ctypes.c_uint64(0)
        with ExitStack() as failed:
            address = self._read(
                ctypes.c_uint64(), "cuMemAddressReserve", size, zero, nowhere, _NO_FLAGS
            )
            failed.callback(self._release, "cuMemAddressFree", address, size)
            self._call("cuMemMap", address, size, zero, memory, _NO_FLAGS)
            failed.callback(self._release, "cuMemUnmap", address, size)
            for kind in access:
                wanted = _AccessDesc(_Location(_LOCATION_TYPE_DEVICE, device), kind)
                try:
                    self._call(
                        "cuMemSetAccess", address, size, ctypes.byref(wanted), ctypes.c_size_t(1)
                    )
                    break
                except DriverError:
                    if kind == access[-1]:
                        raise
            return Allocation(address.value, size.value, failed.pop_all().close)

    def _allocation(
        self, device: int, address: ctypes.c_uint64, byte_size: int, free: str
    ) -> Allocation:
        """Return memory that one call frees."""

        def release() -> None:
            try:
                with self._context(device):
                    self._call(free, address)
            except DriverError as error:
                _log.warning("GPU memory was not freed: %s", error)

        return Allocation(address.value, byte_size, release)

    @contextmanager
    def _released(self, name: str, *arguments: Any) -> Iterator[None]:
        try:
            yield
        finally:
            self._release(name, *arguments)

    def _release(self, name: str, *arguments: Any) -> None:
        try:
            self._call(name, *arguments)
        except DriverError as error:
            _log.warning("GPU memory was not freed: %s", error)

    def _read(self, result: _T, name: str, *arguments: Any) -> _T:
        """Call a function whose first argument is where it writes its result; returns that."""
        self._call(name, ctypes.byref(result), *arguments)  # type: ignore[arg-type]
        return result

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name}: this driver is too old for it")
        if status := function(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            message = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {message} ({status})")


class _IpcHandle(ctypes.Structure):
    """The driver takes a handle by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]

    def __init__(self, handle: bytes) -> None:
        super().__init__((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32_handle", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


def _shareable(device: int) -> _AllocationProp:
    """Return the properties of memory that has a file descriptor."""
    return _AllocationProp(
        _ALLOCATION_TYPE_PINNED,
        _HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        _Location(_LOCATION_TYPE_DEVICE, device),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _DlTensor(ctypes.Structure):
    """DLManagedTensor, and the shape that it points to."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64), ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("size", ctypes.c_int64),
    ]  # fmt: skip


def _dl_capsule(device_type: int, device: int, address: int, byte_size: int) -> object:
    """Return memory that PyTorch did not allocate, as uint8 ``[byte_size]``.

    By DLPack, since the CUDA array interface has no device: PyTorch would take the one that the
    memory is on.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    managed = libc.malloc(ctypes.c_size_t(ctypes.sizeof(_DlTensor)))
    shape = managed + _DlTensor.size.offset
    free = ctypes.cast(libc.free, ctypes.c_void_p).value  # called when the tensor is gone
    described = _DlTensor(
        address, device_type, device, 1, _DL_UINT, 8, 1, shape, None, 0, None, free, byte_size
    )
    ctypes.memmove(managed, ctypes.byref(described), ctypes.sizeof(_DlTensor))
    return _new_capsule(managed, _DL_CAPSULE, None)


@lru_cache(maxsize=1)
def cuda_driver() -> CudaDriver:
    """Return the machine's driver. Raises ``DriverError``: there is no driver, or no device."""
    return CudaDriver()


class ExportedMemory:
    """One allocation, exported once when it is made.

    Safety contract: only the owner writes. After ``close()`` nothing in this process may use a
    tensor over it; processes that have it mapped keep it until they unmap it or end. So they do
    when this process dies, if they got a descriptor. By a handle of CUDA IPC their mappings become
    unusable then: reads fail with a CUDA error that ends the reader's context. So a reader checks
    that the owner is alive before it reads.
    """

    def __init__(self, driver: CudaDriver, device: int, byte_size: int) -> None:
        """Allocate. Raises ``DriverError``: the device has too little memory."""
        self.device_uuid = driver.uuid(device)  # UUID of the device, 16 bytes
        self.file = -1  # descriptor by which other processes map it; -1 if there is none any more
        try:
            self._allocation, self.file = driver.create(device, byte_size)
            # A random name of 16 bytes, if there is a descriptor; else the handle of CUDA IPC, 64
            # bytes, or nothing where the driver exports no memory, as on WSL2 and some vGPUs.
            self.handle = secrets.token_bytes(NAME_BYTES)
        except DriverError as error:
            _log.info("KV on this GPU has no file descriptor: %s", error)
            self._allocation = driver.allocate(device, byte_size)
            try:
                self.handle = driver.export(device, self._allocation)
            except DriverError as refused:
                self.handle = b""
                _log.warning("KV on this GPU cannot be mapped, drafters follow it: %s", refused)
        self._closed = False
        self.bytes: Tensor = torch.empty(0)  # the memory, uint8 ``[byte_size]``
        try:
            self.bytes = driver.view(device, self._allocation.address, byte_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory. Closing twice is safe."""
        if self._closed:
            return
        self._closed = True
        del self.bytes
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self._allocation.free()


@dataclass
class _OpenAllocation:
    """An allocation that is open in this process: the driver opens each only once."""

    allocation: Allocation
    users: int


class MappedMemory:
    """A part of another process's allocation, to be read on one device of this process.

    All users of one allocation share one mapping, which stays for later ones until
    :func:`close_unused`.
    """

    def __init__(
        self,
        driver: CudaDriver,
        reader: int,
        device_uuid: bytes,
        handle: bytes,
        byte_offset: int,
        byte_size: int,
        file: int = -1,
    ) -> None:
        """Map for the device of the ordinal ``reader``, by the names of :class:`ExportedMemory`;
        ``file`` is the memory's descriptor, which stays open, if the handle is its name.

        Raises ``NotMappable`` if this process does not see that device, the reader has no access to
        it, or the driver refuses the handle.
        """
        expected = HANDLE_BYTES if file < 0 else NAME_BYTES
        if len(device_uuid) != UUID_BYTES or len(handle) != expected:
            raise NotMappable(
                f"a device UUID of {len(device_uuid)} and a handle of {len(handle)} bytes, "
                f"expected {UUID_BYTES} and {expected}"
            )
        end = byte_offset + byte_size
        self._closed = True
        try:
            device = _find(driver, device_uuid)
            if not driver.reach(reader, device):
                raise NotMappable(
                    f"GPU {reader} has no peer access to the verifier's GPU {device_uuid.hex()}; "
                    "run the drafter on the verifier's GPU, or on one linked to it"
                )
            self._key = (reader, handle)
            allocation = self._open(
                lambda: (
                    driver.open(reader, handle)
                    if file < 0
                    else driver.map(reader, device, file, end)
                )
            )
            if end > allocation.byte_size:
                raise NotMappable(
                    f"the verifier described bytes {byte_offset} to {end} of an allocation of "
                    f"{allocation.byte_size}"
                )
            # The mapped part, uint8 `[byte_size]`, on the device that reads it: no kernel and no
            # context of this process is on the owner's.
            self.bytes: Tensor = driver.view(reader, allocation.address + byte_offset, byte_size)
        except DriverError as error:
            self.close()
            hint = "; processes in containers need a common PID and IPC namespace" * (file < 0)
            raise NotMappable(
                f"the verifier's GPU memory cannot be opened ({error}){hint}"
            ) from error
        except NotMappable:
            self.close()
            raise

    def _open(self, open_allocation: Callable[[], Allocation]) -> Allocation:
        """Return the allocation; opens it if this process has not."""
        with _LOCK:
            opened = _OPENED.get(self._key)
            if opened is None:
                opened = _OPENED[self._key] = _OpenAllocation(open_allocation(), 0)
            opened.users += 1
            self._closed = False
            return opened.allocation

    def close(self) -> None:
        """End this use of it. Closing twice is safe."""
        if self._closed:
            return
        self._closed = True
        self.__dict__.pop("bytes", None)  # not set if it could not be viewed
        with _LOCK:
            _OPENED[self._key].users -= 1


def close_unused() -> None:
    """Unmap the allocations that nobody in this process uses; their owners may free them then."""
    with _LOCK:
        for key in [key for key, opened in _OPENED.items() if not opened.users]:
            _OPENED.pop(key).allocation.free()


def _find(driver: CudaDriver, device_uuid: bytes) -> int:
    for device in range(driver.devices()):
        if driver.uuid(device) == device_uuid:
            return device
    raise NotMappable(
        f"this process does not see the verifier's GPU {device_uuid.hex()}; give both services "
        "the same devices"
    )
