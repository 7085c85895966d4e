"""Loads drafters on a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.drafter.calibration import FILE, Calibration
from paceline.drafter.methods import CALIBRATION, LOOKUP, method_class, path_options
from paceline.drafter.methods.base import Drafter, LoadError, Resources
from paceline.drafter.methods.lookup import LookupDrafter, LookupOptions
from paceline.drafter.methods.options import parse_options
from paceline.drafter.spec import DrafterSpec, Roots


class Loader:
    """Loads one drafter at a time, from allowed folders only."""

    def __init__(self, roots: Roots, resources: Resources) -> None:
        self._roots = roots
        self._resources = resources
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter-load")

    async def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter that a spec describes, with its calibration if it has one.

        The calibration is the file of the option ``calibration``, or the one in its folder.

        Raises:
            LoadError: The method, a folder or an option is wrong.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, spec)

    async def close(self) -> None:
        """Finish the running load and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

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
        return LookupDrafter(drafter) if wanted else drafter
