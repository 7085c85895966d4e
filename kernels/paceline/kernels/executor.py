"""Runs programs: on the CPU by one native call, elsewhere one operation at a time."""

from __future__ import annotations

from paceline.kernels._native import library
from paceline.kernels._native_program import NativeProgram, supported
from paceline.kernels._torch_program import run_one_by_one
from paceline.kernels.program import Pass, PassResult, Program


class Executor:
    """Runs a program. Runs of several threads do not disturb each other."""

    def __init__(self, program: Program) -> None:
        """Prepare a program for all devices that its weights may be on."""
        native = library()
        self._program = program
        self._native = (
            NativeProgram(native, program) if native is not None and supported(program) else None
        )

    def run(self, call: Pass) -> PassResult:
        """Run the operations; keys and values are written to the caches.

        One native call runs them all, if there are compiled kernels for the program and no cache
        is in pages.

        Raises:
            IndexError: A token or a selected row does not exist.
            ValueError: The caches do not fit the plan.
            MemoryError: Memory ran out.
        """
        caches = (*call.caches, *(context.cache for context in call.contexts))
        if self._native is None or any(cache.table is None for cache in caches):
            return run_one_by_one(self._program, call)
        return self._native.run(call)
