"""A driver whose GPUs are pieces of main memory: libcuda_stub.c in the place of libcuda."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from paceline.cuda.memory import CudaDriver, ExportedMemory, MappedMemory, close_unused
from paceline.device import Device

SOURCE = Path(__file__).with_name("libcuda_stub.c")
KINDS = ("handles", "reserved", "mapped", "allocated", "opened", "contexts")
NO_FILES = "cuMemCreate"  # refused: memory has handles of CUDA IPC
NO_HANDLES = "cuIpcGetMemHandle"


@lru_cache(maxsize=1)
def library() -> str:
    """Compile the stub, once for all processes; skips the test without a compiler."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc")
    name = f"libcuda_stub_{os.getuid()}_{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    built = Path(tempfile.gettempdir()) / name
    if not built.exists():
        own = f"{built}.{os.getpid()}"
        subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", own, SOURCE], check=True)
        os.replace(own, built)
    return str(built)


class StubDriver(CudaDriver):
    """See :class:`CudaDriver`. One at a time in a process."""

    _dl_device = 1  # the CPU

    def __init__(self, refused: str = "") -> None:
        """Make one; calls by the name ``refused`` fail."""
        ctypes.CDLL(library()).stub_reset()
        super().__init__(library())
        self.refuse(refused)

    def refuse(self, name: str) -> None:
        """Let calls of this name fail; none: empty."""
        self.refused = name
        (ctypes.c_char * 64).in_dll(self._library, "stub_refused").value = name.encode()

    def number(self, name: str) -> ctypes.c_long:
        """A number of the stub, by its name there."""
        return ctypes.c_long.in_dll(self._library, name)

    def link(self, reader: int, other: int) -> None:
        self._library.stub_link(reader, other)

    def live(self) -> dict[str, int]:
        """What is not freed, by kind."""
        found = {kind: self._library.stub_live(number) for number, kind in enumerate(KINDS)}
        return {kind: count for kind, count in found.items() if count}

    def forget(self) -> None:
        """Free what failing calls left."""
        self._library.stub_forget()


class StubDevice(Device):
    """A GPU that is a piece of main memory."""

    def __init__(self, driver: StubDriver, number: int = 0) -> None:
        super().__init__()
        self.driver, self.number = driver, number

    def export_memory(self, byte_size: int) -> ExportedMemory:
        return ExportedMemory(self.driver, self.number, byte_size)

    def map_memory(self, *where: Any) -> MappedMemory:
        return MappedMemory(self.driver, self.number, *where)

    def close_unused(self) -> None:
        close_unused()
