"""Named drafters and their versions: which one a new generation gets, and when one may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from paceline.drafter.methods import folder_options, method_class
from paceline.drafter.methods.base import Drafter, LoadError, Resources
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2


@dataclass(eq=False)
class Version:
    """One loaded version of a named drafter. Changed only by the registry, on its event loop."""

    spec: DrafterSpec
    drafter: Drafter
    version: str
    share: float = 0.0
    """Share of new generations of its name, in [0, 1]; over the versions of a name it sums to 1."""

    credit: float = 0.0
    """Share not yet given out, in generations."""

    draining: bool = False
    evictions: set[Callable[[], None]] = field(default_factory=set)
    """One for each attached stream: ends it."""

    def info(self) -> drafter_pb2.DrafterInfo:
        """The version as listed."""
        fit = self.drafter.fit
        return drafter_pb2.DrafterInfo(
            name=self.spec.name,
            version=self.version,
            method=self.spec.method,
            folder=str(self.spec.folder or ""),
            traffic_share=self.share,
            active_streams=len(self.evictions),
            target_fingerprint=fit.target_fingerprint,
            tokenizer_digest=fit.tokenizer_digest,
            weight_bytes=self.drafter.weight_bytes,
            draining=self.draining,
        )


class Registry:
    """All loaded versions. Belongs to one event loop; loading runs in a thread of its own.

    Who may free: a drafter's weights are freed by the registry alone, through ``dispose``, once its
    version was unloaded and its last stream detached. Until then whoever is attached may use it.
    """

    def __init__(
        self, roots: Roots, resources: Resources, dispose: Callable[[Drafter], None]
    ) -> None:
        """Make an empty registry.

        Args:
            roots: Folders that versions may be loaded from.
            resources: What loaded drafters may use.
            dispose: Closes a drafter that nobody uses any more, where its sequences were closed.
        """
        self._roots = roots
        self._resources = resources
        self._dispose = dispose
        self._drafters: dict[str, list[Version]] = {}
        self._numbers: dict[str, int] = {}
        self._loading: set[tuple[str, str]] = set()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="drafter-load")

    @property
    def default_name(self) -> str:
        """What an empty name stands for: the drafter loaded first. Empty if there is none."""
        return next(iter(self._drafters), "")

    def versions(self) -> list[Version]:
        """All versions, sorted by name, then load time."""
        return list(chain.from_iterable(self._drafters[name] for name in sorted(self._drafters)))

    async def load(self, spec: DrafterSpec, *, activate: bool = False) -> Version:
        """Load a version while everything else goes on. The first of a name becomes active.

        Raises:
            LoadError: The method, the folder or an option is wrong.
            ServiceError: ALREADY_LOADED, if the name has this version.
        """
        version = spec.version or self._next_number(spec.name)
        key = (spec.name, version)
        if key in self._loading or any(v.version == version for v in self._versions(spec.name)):
            raise ServiceError.failed_precondition(
                "ALREADY_LOADED",
                f"drafter {spec.name!r} has a version {version!r} already; unload it, choose "
                "another version, or leave the version out to have it numbered",
            )
        self._loading.add(key)
        try:
            drafter = await asyncio.get_running_loop().run_in_executor(
                self._loader, self._load_now, spec
            )
        finally:
            self._loading.discard(key)
        loaded = Version(spec=spec, drafter=drafter, version=version)
        self._drafters.setdefault(spec.name, []).append(loaded)
        if activate or not any(v.share for v in self._drafters[spec.name]):
            self._set_shares(spec.name, {loaded: 1.0})
        return loaded

    def activate(self, name: str, version: str, share: float) -> Version:
        """Give a version a share of new generations.

        Args:
            name: Drafter name.
            version: Version to activate.
            share: In (0, 1]. Below 1 the rest stays with the other active version: the one that had
                the largest share; all others get none.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, INVALID_SHARE, DRAINING, or NO_OTHER_VERSION.
        """
        if not 0.0 < share <= 1.0:
            raise ServiceError.invalid_argument(
                "INVALID_SHARE", f"traffic share is {share}, expected above 0 and at most 1"
            )
        chosen = self._find(name, version)
        if chosen.draining:
            raise ServiceError.failed_precondition(
                "DRAINING", f"version {version!r} of drafter {name!r} is being unloaded"
            )
        if share == 1.0:
            self._set_shares(chosen.spec.name, {chosen: 1.0})
            return chosen
        others = [v for v in self._versions(chosen.spec.name) if v is not chosen and v.share]
        if not others:
            raise ServiceError.failed_precondition(
                "NO_OTHER_VERSION",
                f"drafter {name!r} has no other active version to take the remaining share of "
                f"{1 - share:g}; activate another version fully first",
            )
        rest = max(others, key=lambda v: v.share)
        self._set_shares(chosen.spec.name, {chosen: share, rest: 1.0 - share})
        return chosen

    def unload(self, name: str, version: str = "", *, force: bool = False) -> bool:
        """Remove a version, or all versions of a name.

        A removed version takes no new streams. Its shares go to what is left of the name.

        Args:
            name: Drafter name.
            version: Empty: all of them.
            force: End its streams instead of waiting for them.

        Returns:
            Whether everything asked for is gone already; otherwise it goes with its last stream.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND.
        """
        found = [self._find(name, version)] if version else list(self._versions(name))
        if not found:
            raise self._not_found(name)
        for each in found:
            each.draining = True
            each.share = 0.0
        self._share_out(name)
        waiting = [each for each in found if each.evictions]
        for each in found:
            self._remove_if_unused(each)
        if force:
            for evict in [evict for each in waiting for evict in each.evictions]:
                evict()
        return not waiting

    def choose(self, name: str, version: str = "") -> Version:
        """The version a new generation gets: the one asked for, or one by its share.

        Shares are kept exactly, not by chance: of any n generations in a row a version gets its
        share of n, give or take one.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, or UNAVAILABLE with DRAINING.
        """
        name = name or self.default_name
        if version:
            chosen = self._find(name, version)
            if chosen.draining:
                raise _draining(name, version)
            return chosen
        versions = self._versions(name)
        if not versions:
            raise self._not_found(name)
        active = [v for v in versions if v.share]
        if not active:
            raise _draining(name, "")
        for each in active:
            each.credit += each.share
        chosen = max(active, key=lambda v: v.credit)
        chosen.credit -= 1.0
        return chosen

    def attach(self, version: Version, evict: Callable[[], None]) -> None:
        """Count a stream. Until :meth:`detach` the drafter is not freed.

        Args:
            version: As :meth:`choose` gave it, in the same step of the event loop.
            evict: Ends the stream; called at most once, by a forced unload.
        """
        version.evictions.add(evict)

    def detach(self, version: Version, evict: Callable[[], None]) -> None:
        """The stream ended and its sequence is closed, or will be before anything posted later."""
        version.evictions.discard(evict)
        self._remove_if_unused(version)

    async def close(self) -> None:
        """Stop loading and free every drafter. Nothing may be attached any more."""
        await asyncio.to_thread(self._loader.shutdown, wait=True, cancel_futures=True)
        for each in self.versions():
            self._dispose(each.drafter)
        self._drafters.clear()

    def _load_now(self, spec: DrafterSpec) -> Drafter:
        folder = self._roots.check(spec.folder) if spec.folder else None
        folders = folder_options(spec.method)
        options = {
            name: str(self._roots.check(Path(text))) if name in folders and text else text
            for name, text in spec.options.items()
        }
        try:
            return method_class(spec.method).load(folder, options, self._resources)
        except LoadError as error:
            raise LoadError(error.reason, f"drafter {spec.name!r}: {error}") from error

    def _versions(self, name: str) -> list[Version]:
        return self._drafters.get(name, [])

    def _find(self, name: str, version: str) -> Version:
        for each in self._versions(name):
            if each.version == version:
                return each
        raise self._not_found(name, version)

    def _not_found(self, name: str, version: str = "") -> ServiceError:
        known = ", ".join(f"{v.spec.name} {v.version}" for v in self.versions()) or "none"
        asked = f"{name[:80]!r}" + (f" version {version[:80]!r}" if version else "")
        return ServiceError.not_found(
            "DRAFTER_NOT_FOUND", f"there is no drafter {asked}; loaded are: {known}"
        )

    def _next_number(self, name: str) -> str:
        taken = {v.version for v in self._versions(name)}
        taken |= {version for loading, version in self._loading if loading == name}
        number = self._numbers.get(name, 0) + 1
        while str(number) in taken:
            number += 1
        self._numbers[name] = number
        return str(number)

    def _set_shares(self, name: str, shares: dict[Version, float]) -> None:
        for each in self._versions(name):
            each.share = shares.get(each, 0.0)
            each.credit = 0.0

    def _share_out(self, name: str) -> None:
        """Bring the shares of what is left back to a sum of 1; the newest takes over from none."""
        left = [v for v in self._versions(name) if not v.draining]
        total = sum(v.share for v in left)
        if total:
            self._set_shares(name, {v: v.share / total for v in left})
        elif left:
            self._set_shares(name, {left[-1]: 1.0})

    def _remove_if_unused(self, version: Version) -> None:
        versions = self._versions(version.spec.name)
        if not version.draining or version.evictions or version not in versions:
            return
        versions.remove(version)
        if not versions:
            del self._drafters[version.spec.name]
        self._dispose(version.drafter)


def _draining(name: str, version: str) -> ServiceError:
    which = f"version {version!r} of drafter {name!r}" if version else f"drafter {name!r}"
    return ServiceError.unavailable(
        "DRAFTER_DRAINING", f"{which} is being unloaded and takes no new streams; try another"
    )
