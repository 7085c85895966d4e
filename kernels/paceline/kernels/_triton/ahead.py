"""Kernels that were compiled before there was a GPU, such as while an image was built."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import KernelInterface


class ShippedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache, with the read-only one in ``PACELINE_KERNELS`` behind it.

    Set ``TRITON_CACHE_MANAGER=paceline.kernels._triton.ahead:ShippedCache`` to use it.
    """

    cache_dir: str

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a compiled kernel; None: it is in neither cache."""
        found: dict[str, str] | None = super().get_group(filename)
        if found is None:
            own, self.cache_dir = self.cache_dir, os.path.join(_SHIPPED, self.key)
            found = super().get_group(filename)
            self.cache_dir = own
        return found


_SHIPPED = os.environ.get("PACELINE_KERNELS", "")


class _Driver:
    """Names a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> None:
    """From here on, for good, a launch in this process compiles for a GPU and runs nothing.

    Tensors of the device "meta" stand for those of the GPU: they have alignment and no memory.

    Args:
        capability: Compute capability, such as 90 for sm_90.
    """
    triton.runtime.driver.set_active(_Driver(capability))
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
