"""Loads a drafter from a folder that is allowed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from paceline.drafter.calibration import FILE, Calibration
from paceline.drafter.methods import CALIBRATION, LOOKUP, method_class, path_options
from paceline.drafter.methods.base import Drafter, LoadError, Resources, parse_options
from paceline.drafter.methods.lookup import LookupDrafter, LookupOptions
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.drafter.worker import settle
from paceline.service.runtime import available_memory, trim

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""Reason of a LoadError."""


class Loader:
    """Loads one drafter at a time, from allowed folders only.

    Each load has a daemon thread: a service that stops does not wait for it.
    """

    def __init__(self, roots: Roots, resources: Resources) -> None:
        self._roots = roots
        self._resources = resources
        self._loading = asyncio.Lock()

    async def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter that a spec describes, with its calibration if it has one.

        The calibration is the file of the option ``calibration``, or the one in its folder. Raises
        ``LoadError``: the method, a folder or an option is wrong.
        """
        async with self._loading:
            done: Future[Drafter] = Future()
            work = partial(settle, done, partial(self._load, spec))
            threading.Thread(target=work, name="load", daemon=True).start()
            return await asyncio.wrap_future(done)

    def is_short_of_memory(self, spec: DrafterSpec) -> bool:
        """Whether the files of a drafter for the CPU are larger than the free memory."""
        if self._resources.device != "cpu" or spec.folder is None:
            return False
        try:
            folder = self._roots.check(spec.folder)
            files = [folder] if folder.is_file() else [*folder.iterdir()]
            return sum(file.stat().st_size for file in files) > available_memory()
        except (LoadError, OSError):  # the load has the better message
            return False

    def _load(self, spec: DrafterSpec) -> Drafter:
        folder = self._roots.check(spec.folder) if spec.folder else None
        folders = path_options(spec.method)
        options = {
            name: str(self._roots.check(Path(text))) if name in folders and text else text
            for name, text in spec.options.items()
        }
        calibration = options.pop(CALIBRATION, "")
        lookup = {LOOKUP: options.pop(LOOKUP)} if LOOKUP in options else {}
        if not calibration and folder is not None and (folder / FILE).is_file():
            calibration = str(folder / FILE)
        try:
            wanted = parse_options(LookupOptions, lookup).lookup
            drafter = method_class(spec.method).load(folder, options, self._resources)
            if calibration:
                drafter.calibration = Calibration.read(Path(calibration), spec.method)
        except LoadError as error:
            raise LoadError(error.reason, f"drafter {spec.name!r}: {error}") from error
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is the latter
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            why = f"drafter {spec.name!r} does not fit into memory: {error}; unload another version"
            raise LoadError(OUT_OF_MEMORY, why) from error
        trim()  # what was used to load it
        return LookupDrafter(drafter) if wanted else drafter
