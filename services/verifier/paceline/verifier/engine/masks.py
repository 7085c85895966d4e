"""Dear masks of grammars, computed beside the engine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from queue import PriorityQueue

from paceline.verifier.engine.job import EngineJob, StepFailed

_log = logging.getLogger(__name__)

_NICE = 10  # of the thread, so that steps of the engine go first


class MaskThread:
    """Computes the masks that jobs wait for one after the other, cheap grammars' first."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """``submit`` runs a command on the engine's thread. The thread starts with the first mask,
        and ends with the process."""
        self._submit = submit
        self._waiting: PriorityQueue[
            tuple[float, int, EngineJob, Callable[[Exception | None], None]]
        ] = PriorityQueue()
        self._number = count()
        self._thread: threading.Thread | None = None

    def add(self, job: EngineJob, then: Callable[[Exception | None], None]) -> None:
        """Compute the mask of the next token of a job, then run ``then`` on the engine's thread,
        with an error if there was one. The next mask waits for that, since ``then`` may use the
        same grammar."""
        guide = job.sequence.guide
        if guide is None:
            return
        self._waiting.put((guide.seconds, next(self._number), job, then))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-masks", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            self._compute(*self._waiting.get()[2:])

    def _compute(self, job: EngineJob, then: Callable[[Exception | None], None]) -> None:
        ran = threading.Event()
        error: Exception | None = None
        try:
            if (guide := job.sequence.guide) is not None and not job.done and not job.cancelled:
                guide.prepare()
        except Exception as raised:
            _log.exception("a mask could not be computed")
            error = StepFailed(f"no token could be chosen: {raised}")
        del guide  # the memory of a text that ends meanwhile is freed on the engine's thread

        def run() -> None:
            try:
                then(error)
            finally:
                ran.set()

        self._submit(run)
        ran.wait()
