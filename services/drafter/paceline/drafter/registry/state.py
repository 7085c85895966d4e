"""The registry on disk, so that a restart takes up where it was."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.drafter.registry.trial import TrialSettings
from paceline.drafter.spec import DrafterSpec

logger = logging.getLogger("paceline.drafter")

FORMAT = 1
FILE_NAME = "registry.json"
_LONGEST_FILE = 16 << 20


@dataclass(frozen=True)
class SavedTrial:
    """A trial without a verdict. Its samples are not kept: they are gathered again."""

    name: str
    candidate: str
    baseline: str
    settings: TrialSettings
    looks: int
    """Looks taken, so that a restart does not give the errors of the first ones again."""


@dataclass(frozen=True)
class RegistryState:
    """What a registry holds.

    Raises:
        ValueError: Its parts contradict each other.
    """

    given: list[DrafterSpec]
    """What the service was told to load when this state began."""

    loaded: list[tuple[DrafterSpec, float]] = field(default_factory=list)
    """Versions and their shares, in the order of names and of loading."""

    numbers: dict[str, int] = field(default_factory=dict)
    """The newest number given to a version of each name."""

    trials: list[SavedTrial] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions = {(spec.name, spec.version) for spec, _ in self.loaded}
        if len(versions) != len(self.loaded):
            raise ValueError("a version is there twice")
        if not all(spec.version and 0.0 <= share <= 1.0 for spec, share in self.loaded):
            raise ValueError("a version has no name, or a share outside [0, 1]")
        for trial in self.trials:
            if trial.candidate == trial.baseline:
                raise ValueError(f"a trial of {trial.name!r} compares a version with itself")
            if not {(trial.name, trial.candidate), (trial.name, trial.baseline)} <= versions:
                raise ValueError(f"a trial of {trial.name!r} names a version that is not there")


class StateFile:
    """``registry.json`` in a folder of the service's own. Written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be, for this user alone.

        Raises:
            OSError: It cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / FILE_NAME

    def read(self) -> RegistryState | None:
        """What was written last; None if there is nothing, or nothing that can be believed.

        A file that cannot be believed is set aside as ``registry.json.bad``: drafters cost speed at
        most, so the service starts all the same.
        """
        try:
            with self._path.open("rb") as file:
                return _decode(file.read(_LONGEST_FILE))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, LoadError) as error:
            bad = self._path.with_name(FILE_NAME + ".bad")
            logger.error(
                "the registry's state cannot be read; starting without, and setting it aside",
                extra={"file": str(self._path), "aside": str(bad), "fault": str(error)},
            )
            os.replace(self._path, bad)
            return None

    def write(self, state: RegistryState) -> None:
        """Replace the file; durable when this returns.

        Raises:
            OSError: The disk did not take it; the old file stands.
        """
        draft = self._path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(_encode(state), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _encode(state: RegistryState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "given": [_encode_spec(spec) for spec in state.given],
        "loaded": [{**_encode_spec(spec), "share": share} for spec, share in state.loaded],
        "numbers": state.numbers,
        "trials": [asdict(trial) for trial in state.trials],
    }


def _decode(raw: bytes) -> RegistryState:
    value = json.loads(raw)
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    return RegistryState(
        given=[_decode_spec(each) for each in value["given"]],
        loaded=[(_decode_spec(each), float(each["share"])) for each in value["loaded"]],
        numbers={str(name): int(number) for name, number in value["numbers"].items()},
        trials=[
            SavedTrial(
                name=str(each["name"]),
                candidate=str(each["candidate"]),
                baseline=str(each["baseline"]),
                settings=TrialSettings(**each["settings"]),
                looks=int(each["looks"]),
            )
            for each in value["trials"]
        ],
    )


def _encode_spec(spec: DrafterSpec) -> dict[str, Any]:
    return {**asdict(spec), "folder": None if spec.folder is None else str(spec.folder)}


def _decode_spec(value: dict[str, Any]) -> DrafterSpec:
    return DrafterSpec(
        name=str(value["name"]),
        method=str(value["method"]),
        folder=None if value["folder"] is None else Path(value["folder"]),
        options={str(key): str(option) for key, option in value["options"].items()},
        version=str(value["version"]),
    )
