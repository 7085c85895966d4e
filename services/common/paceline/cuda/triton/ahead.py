"""Kernels are compiled side by side, before the passes that launch them.

A pass launches some ten kernels, each of which compiles for tenths of a second at its first launch,
one after the other. Triton releases the interpreter's lock while it compiles, so that threads are
enough to compile all of them in the time of the longest.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import KernelInterface

_log = logging.getLogger(__name__)
MAX_THREADS = 16  # threads that compile at most: more kernels than a few are never missing at once

# Kernels that `compile_ahead` has asked for, with their functions; None: launches launch.
_submitted: ContextVar[dict[FutureKernel, Any] | None] = ContextVar("submitted", default=None)


class Kernel(KernelInterface[Any]):  # type: ignore[misc]  # Triton has no types
    """A function of ``triton.jit`` that the host launches, unless :func:`compile_ahead` only
    compiles it."""

    def __init__(self, function: Any) -> None:
        self.function = function  # what Triton compiles

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Launch; see ``KernelInterface``."""
        submitted = _submitted.get()
        if submitted is None:
            return self.function.run(*args, grid=grid, warmup=warmup, **options)
        compiled = self.function.run(*args, grid=grid, warmup=True, **options)
        if isinstance(compiled, FutureKernel):  # else it was compiled before
            submitted[compiled] = self.function
        return compiled


def compile_ahead(
    passes: Iterable[Callable[[], object]], progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile the kernels of some passes, on as many threads as there are CPUs.

    Each pass runs once, on this thread, and its launches launch nothing. PyTorch's operations run,
    on memory that no kernel has written: a pass must not use results of kernels as indices.

    A kernel that cannot be compiled, or a pass that fails, is logged: the launch that needs it
    compiles it again, and raises what there is to raise. ``progress`` is called with the number of
    kernels compiled so far, and of all.
    """
    submitted: dict[FutureKernel, Any] = {}
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with (
        _no_collections(),
        ThreadPoolExecutor(threads, "compile") as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        token = _submitted.set(submitted)
        try:
            for run in passes:
                try:
                    run()
                except Exception:  # of operations, the device: the pass itself raises it again
                    _log.warning("the kernels of a pass are compiled when it runs", exc_info=True)
        finally:
            _submitted.reset(token)
        compiled = as_completed([kernel.future for kernel in submitted])
        for count, _ in enumerate(compiled, 1):
            if progress is not None:
                progress(count, len(submitted))
    for kernel, function in submitted.items():
        if (error := kernel.future.exception()) is not None:
            _log.warning("%s could not be compiled ahead: %s", function.__name__, error)
            _forget(kernel, function)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage. A collection amid ``ast.parse`` may let another thread parse, and CPython
    3.11, which counts the depth of both together, then raises ``SystemError``."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _forget(kernel: FutureKernel, function: Any) -> None:
    """Let the next launch compile a kernel again: a lack of memory, for example, may be over."""
    for kernels, *_ in function.device_caches.values():
        for key in [key for key, known in kernels.items() if known is kernel]:
            del kernels[key]
