"""The versions of each name and their shares of new generations."""

from __future__ import annotations

import random
from itertools import chain

from paceline.drafter.registry.version import Version
from paceline.service import ServiceError


class VersionTable:
    """Names to versions, in the order they were loaded. Belongs to one event loop."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """The newest number given to a version of each name."""
        self._versions: dict[str, list[Version]] = {}

    @property
    def default_name(self) -> str:
        """The name that came first; empty if there is none."""
        return next(iter(self._versions), "")

    def __iter__(self) -> chain[Version]:
        """All versions in the order of names and of loading."""
        return chain.from_iterable(self._versions.values())

    def of(self, name: str) -> list[Version]:
        """The versions of a name, draining ones too."""
        return self._versions.get(name, [])

    def active(self, name: str) -> list[Version]:
        """Those that new generations get."""
        return [version for version in self.of(name) if version.share]

    def add(self, version: Version) -> None:
        """List a version."""
        self._versions.setdefault(version.spec.name, []).append(version)

    def remove(self, version: Version) -> bool:
        """Take a version off the list; whether it was there."""
        versions = self.of(version.spec.name)
        if version not in versions:
            return False
        versions.remove(version)
        if not versions:
            del self._versions[version.spec.name]
        return True

    def find(self, name: str, version: str) -> Version:
        """A version.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND.
        """
        for each in self.of(name):
            if each.version == version:
                return each
        raise self.not_found(name, version)

    def choose(self, name: str, version: str = "") -> Version:
        """The version a new generation gets: the one asked for, or one by its share.

        Shares are kept exactly: of any n generations in a row a version gets its share of n, give
        or take one. In a trial they are drawn by chance, so that nothing that comes in turns, such
        as two kinds of requests, falls to one version alone and is taken for its merit.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, or UNAVAILABLE with DRAFTER_DRAINING.
        """
        name = name or self.default_name
        if version:
            chosen = self.find(name, version)
            if chosen.draining:
                raise _draining(name, version)
            return chosen
        if not self.of(name):
            raise self.not_found(name)
        active = self.active(name)
        if not active:
            raise _draining(name, "")
        if any(each.on_trial for each in active):
            return random.choices(active, [each.share for each in active])[0]
        for each in active:
            each.credit += each.share
        chosen = max(active, key=lambda v: v.credit)
        chosen.credit -= 1.0
        return chosen

    def set_shares(self, name: str, shares: dict[Version, float]) -> None:
        """Give versions these shares, and all others of the name none."""
        for each in self.of(name):
            each.share = shares.get(each, 0.0)
            each.credit = 0.0

    def share_out(self, name: str) -> None:
        """Bring the shares of what is left back to a sum of 1; the newest takes over from none."""
        left = [v for v in self.of(name) if not v.draining]
        total = sum(v.share for v in left)
        if total:
            self.set_shares(name, {v: v.share / total for v in left})
        elif left:
            self.set_shares(name, {left[-1]: 1.0})

    def next_number(self, name: str, taken: set[str]) -> str:
        """A version number that was never given before, and is not ``taken``."""
        taken = taken | {v.version for v in self.of(name)}
        number = self.numbers.get(name, 0) + 1
        while str(number) in taken:
            number += 1
        self.numbers[name] = number
        return str(number)

    def not_found(self, name: str, version: str = "") -> ServiceError:
        """The error for a name or version that is not there."""
        known = ", ".join(f"{v.spec.name} {v.version}" for v in self) or "none"
        asked = f"{name[:80]!r}" + (f" version {version[:80]!r}" if version else "")
        return ServiceError.not_found(
            "DRAFTER_NOT_FOUND", f"there is no drafter {asked}; loaded are: {known}"
        )


def _draining(name: str, version: str) -> ServiceError:
    which = f"version {version!r} of drafter {name!r}" if version else f"drafter {name!r}"
    return ServiceError.unavailable(
        "DRAFTER_DRAINING", f"{which} is being unloaded and takes no new streams; try another"
    )
