"""The registry on disk, so that a restart restores it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.drafter.spec import DrafterSpec

logger = logging.getLogger("paceline.drafter")

FORMAT = 2
FILE_NAME = "registry.json"
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class RegistryState:
    """What a registry holds; draining versions are no part of it.

    Raises:
        ValueError: The parts are inconsistent.
    """

    configured: list[DrafterSpec]
    """Drafters that the service was started with when this state was first written."""

    loaded: list[tuple[DrafterSpec, float]] = field(default_factory=list)
    """Versions and their shares, by name and load order."""

    numbers: dict[str, int] = field(default_factory=dict)
    """The highest version number assigned under each name."""

    previous: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares before the last activation, by name and version."""

    def __post_init__(self) -> None:
        versions = {(spec.name, spec.version) for spec, _ in self.loaded}
        if len(versions) != len(self.loaded):
            raise ValueError("a version is listed twice")
        if not all(spec.version and 0.0 <= share <= 1.0 for spec, share in self.loaded):
            raise ValueError("a version has no name, or a share outside [0, 1]")


class StateFile:
    """``registry.json`` in a folder of the service's own, replaced atomically.

    :meth:`save`, :meth:`saved` and :meth:`close` are for one event loop; writes happen in order on
    a thread.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder if it is missing, for this user only.

        Raises:
            OSError: It cannot be created.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / FILE_NAME
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter-state")
        self._last: asyncio.Future[None] | None = None

    def save(self, state: RegistryState) -> None:
        """Write a state in the background. A failure is logged, and raised by :meth:`saved`."""
        loop = asyncio.get_running_loop()
        self._last = loop.run_in_executor(self._thread, self.write, state)
        self._last.add_done_callback(_log_failure)

    async def saved(self) -> None:
        """Return when the newest state is on disk.

        Raises:
            OSError: It could not be written.
        """
        if self._last is not None:
            await asyncio.shield(self._last)

    async def close(self) -> None:
        """Finish all writes and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    def read(self) -> RegistryState | None:
        """The state written last; None if there is none or it is invalid.

        An invalid file is renamed to ``registry.json.bad``, and the service starts without it.
        """
        try:
            with self._path.open("rb") as file:
                return _decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, LoadError) as error:
            bad = self._path.with_name(FILE_NAME + ".bad")
            logger.error(
                "the registry's state is invalid; starting without it and renaming the file",
                extra={"file": str(self._path), "renamed": str(bad), "fault": str(error)},
            )
            os.replace(self._path, bad)
            return None

    def write(self, state: RegistryState) -> None:
        """Replace the file; it is durable on return.

        Raises:
            OSError: It could not be written; the old file is unchanged.
        """
        new = self._path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            with new.open("w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, **asdict(state)}, file, indent=1, default=str)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        finally:
            new.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _decode(raw: bytes) -> RegistryState:
    value = json.loads(raw)
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    return RegistryState(
        configured=[_decode_spec(each) for each in value["configured"]],
        loaded=[(_decode_spec(spec), float(share)) for spec, share in value["loaded"]],
        numbers={name: int(number) for name, number in value["numbers"].items()},
        previous={
            name: {version: float(share) for version, share in of.items()}
            for name, of in value.get("previous", {}).items()
        },
    )


def _decode_spec(value: dict[str, Any]) -> DrafterSpec:
    folder = value["folder"]
    return DrafterSpec(**{**value, "folder": None if folder is None else Path(folder)})


def _log_failure(writing: asyncio.Future[None]) -> None:
    if not writing.cancelled() and (error := writing.exception()) is not None:
        logger.error("the registry's state was not saved", extra={"fault": str(error)})
