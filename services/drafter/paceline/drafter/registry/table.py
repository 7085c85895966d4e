"""Loaded versions by name, and their shares of new generations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from paceline.drafter.methods.base import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2


@dataclass(eq=False)
class Version:
    """A loaded version. Only the registry changes it, on its event loop."""

    spec: DrafterSpec
    drafter: Drafter
    version: str
    check: drafter_pb2.DrafterCheck | None = None
    """Result of the load check; None: it was not checked."""

    share: float = 0.0
    """Share of new generations of its name, in [0, 1]; the shares of a name sum to 1."""

    credit: float = 0.0
    """Generations it is owed by its share (smooth weighted round-robin)."""

    canary: bool = False
    """It is a running canary, which may be promoted or rolled back at any time."""

    draining: bool = False
    """It was unloaded and takes no new streams."""

    streams: set[Callable[[], None]] = field(default_factory=set)
    """Attached streams, each by the callback that ends it."""

    def info(self) -> drafter_pb2.DrafterInfo:
        """The version as listed."""
        drafter = self.drafter
        return drafter_pb2.DrafterInfo(
            name=self.spec.name,
            version=self.version,
            method=self.spec.method,
            folder=str(self.spec.folder or ""),
            traffic_share=self.share,
            active_streams=len(self.streams),
            target_fingerprint=drafter.fit.target_fingerprint,
            tokenizer_digest=drafter.fit.tokenizer_digest,
            weight_bytes=drafter.weight_bytes,
            hidden_state_layers=drafter.needs.hidden_state_layers,
            hidden_state_window=drafter.needs.hidden_state_window,
            draining=self.draining,
            check=self.check,
        )


class VersionTable:
    """Versions by name, in load order. Use it on one event loop."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """The highest version number assigned under each name."""
        self._versions: dict[str, list[Version]] = {}

    @property
    def default_name(self) -> str:
        """The name that was loaded first; empty if there is none."""
        return next(iter(self._versions), "")

    def __iter__(self) -> chain[Version]:
        """All versions, by name and load order."""
        return chain.from_iterable(self._versions.values())

    def of(self, name: str) -> list[Version]:
        """The versions of a name, draining ones included."""
        return self._versions.get(name, [])

    def active(self, name: str) -> list[Version]:
        """The versions of a name that have a share of new generations."""
        return [version for version in self.of(name) if version.share]

    def add(self, version: Version) -> None:
        """Add a version; the first of a name becomes active."""
        self._versions.setdefault(version.spec.name, []).append(version)
        if not self.active(version.spec.name):
            self.set_shares(version.spec.name, {version: 1.0})

    def remove(self, version: Version) -> bool:
        """Remove a version. Returns whether it was there."""
        versions = self.of(version.spec.name)
        if version not in versions:
            return False
        versions.remove(version)
        if not versions:
            del self._versions[version.spec.name]
        return True

    def find(self, name: str, version: str) -> Version:
        """A version by name and version.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND.
        """
        for each in self.of(name):
            if each.version == version:
                return each
        raise self.not_found(name, version)

    def choose(self, name: str, version: str = "") -> Version:
        """The version for a new generation: the requested one, or one by share.

        By default this is smooth weighted round-robin: of any n consecutive generations a version
        gets its share of n, plus or minus one. While a canary runs, versions are drawn at random
        instead, so that a periodic pattern in the requests cannot bias the comparison.

        Args:
            name: Empty: the default name.
            version: Empty: one by share.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, or UNAVAILABLE with DRAFTER_DRAINING.
        """
        name = name or self.default_name
        if version:
            chosen = self.find(name, version)
            if chosen.draining:
                raise _draining(f"version {version!r} of drafter {name!r}")
            return chosen
        if not self.of(name):
            raise self.not_found(name)
        active = self.active(name)
        if not active:
            raise _draining(f"drafter {name!r}")
        if any(each.canary for each in active):
            return random.choices(active, [each.share for each in active])[0]
        for each in active:
            each.credit += each.share
        chosen = max(active, key=lambda v: v.credit)
        chosen.credit -= 1.0
        return chosen

    def set_shares(self, name: str, shares: dict[Version, float]) -> None:
        """Set the shares of some versions of a name, and those of all others to 0."""
        for each in self.of(name):
            each.share = shares.get(each, 0.0)
            each.credit = 0.0

    def normalize_shares(self, name: str) -> None:
        """Scale the shares of a name to a sum of 1; if all are 0, the newest version gets 1."""
        loaded = [v for v in self.of(name) if not v.draining]
        total = sum(v.share for v in loaded)
        if total:
            self.set_shares(name, {v: v.share / total for v in loaded})
        elif loaded:
            self.set_shares(name, {loaded[-1]: 1.0})

    def next_number(self, name: str, reserved: set[str]) -> str:
        """A version number that was never assigned before and is not ``reserved``."""
        taken = reserved | {v.version for v in self.of(name)}
        number = self.numbers.get(name, 0) + 1
        while str(number) in taken:
            number += 1
        self.numbers[name] = number
        return str(number)

    def not_found(self, name: str, version: str = "") -> ServiceError:
        """The error for a name or version that is not loaded."""
        loaded = ", ".join(f"{v.spec.name} {v.version}" for v in self) or "none"
        missing = f"{name[:80]!r}" + (f" version {version[:80]!r}" if version else "")
        return ServiceError.not_found(
            "DRAFTER_NOT_FOUND", f"there is no drafter {missing}; loaded are: {loaded}"
        )


def _draining(which: str) -> ServiceError:
    return ServiceError.unavailable(
        "DRAFTER_DRAINING", f"{which} is being unloaded and takes no new streams; try another"
    )
