"""Named drafters and their versions: loading, shares of new generations, failures, release.

Sequences of a version that was unloaded, or taken out because it fails, are refused at their next
round if another version has a share; the verifier opens them again there. A sequence stays if its
client requested this version.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.drafter.generation import DraftStatistics
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import Drafter, LoadError, Resources
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.kv.policies import STREAMING
from paceline.service import ServiceError
from paceline.service.runtime import trim
from paceline.service.tasks import in_thread
from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import Attributes
from paceline.v1 import drafter_pb2

logger = logging.getLogger("paceline.drafter")

MAX_VERSIONS = 256

# A version fails if more than half of its last rounds failed, and at least this many.
RECENT_ROUNDS, MIN_FAILURES = 20, 3

_MAX_REASON_CHARS = 300

_OUT_OF_MEMORY = "OUT_OF_MEMORY"  # reason of a LoadError


class Loader:
    """Loads one drafter at a time, from allowed folders only.

    Each load has a daemon thread: a service that stops does not wait for it.
    """

    def __init__(self, roots: Roots, resources: Resources) -> None:
        self._roots = roots
        self._resources = resources
        self._loading = asyncio.Lock()

    async def load(self, spec: DrafterSpec) -> Drafter:
        """Load the drafter that a spec describes. Raises ``LoadError``: the method, a folder or an
        option is wrong."""
        async with self._loading:
            return await in_thread(partial(self._load, spec))

    def is_short_of_memory(self, spec: DrafterSpec) -> bool:
        """Return whether the files of a drafter for the CPU are larger than the free memory."""
        if spec.folder is None:
            return False
        try:
            folder = self._roots.check(spec.folder)
            files = [folder] if folder.is_file() else [*folder.iterdir()]
            return sum(file.stat().st_size for file in files) > self._resources.device.free_memory()
        except (LoadError, OSError):  # the load has the better message
            return False

    def _load(self, spec: DrafterSpec) -> Drafter:
        folder = self._roots.check(spec.folder) if spec.folder else None
        folders = method_class(spec.method).path_options
        options = {
            name: str(self._roots.check(Path(text))) if name in folders and text else text
            for name, text in spec.options.items()
        }
        try:
            drafter = method_class(spec.method).load(folder, options, self._resources)
        except LoadError as error:
            raise LoadError(error.reason, f"drafter {spec.name!r}: {error}") from error
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is the latter
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            why = f"drafter {spec.name!r} does not fit into memory: {error}; unload another version"
            why += self._resources.device.out_of_memory_hint
            raise LoadError(_OUT_OF_MEMORY, why) from error
        trim()  # what was used to load it
        return drafter


@dataclass(eq=False)
class Version:
    """A loaded version. Only the registry changes it, on its event loop, but for its rounds."""

    spec: DrafterSpec
    drafter: Drafter
    version: str
    # Share of new generations of its name, in [0, 1]; the shares of a name sum to 1.
    share: float = 0.0
    # Its share before the last activation under its name; 0: it had none.
    previous_share: float = 0.0
    # Whether it had a share before an activation; without one now, it may be freed for others.
    replaced: bool = False
    credit: float = 0.0  # generations it is owed by its share (smooth weighted round-robin)
    draining: bool = False  # it was unloaded and takes no new streams
    failing: str = ""  # why it was taken out (`take_out`); empty: it was not, or has a share again
    # Attached streams, each by the callback that ends it.
    streams: set[Callable[[], None]] = field(default_factory=set)
    # Statistics of its rounds. Only the drafting thread changes it; any thread may read it.
    statistics: DraftStatistics = field(default_factory=DraftStatistics)
    # Whether each of its last rounds failed. Drafting thread.
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))

    def add_round(self, *, failed: bool) -> bool:
        """Add a round's outcome. Returns whether the version fails too often. Drafting thread."""
        self.recent.append(failed)
        failures = sum(self.recent)
        return failed and failures >= MIN_FAILURES and 2 * failures > len(self.recent)

    @property
    def attributes(self) -> Attributes:
        """Attributes of spans of its work."""
        return {
            Attribute.DRAFTER_NAME: self.spec.name,
            Attribute.DRAFTER_VERSION: self.version,
            Attribute.DRAFTER_METHOD: self.spec.method,
        }

    def info(self) -> drafter_pb2.DrafterInfo:
        """Return the version as listed."""
        drafter, statistics = self.drafter, self.statistics
        needs, policy = drafter.needs, drafter.needs.kv_options.kv_policy
        scored = needs.kv_layers if needs.kv_budget and policy != STREAMING else ()
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
            hidden_state_layers=needs.hidden_state_layers,
            hidden_state_window=needs.hidden_state_window,
            scored_layers=scored,
            kv_policy=policy if scored else "",
            reads_kv=bool(needs.kv_layers),
            draining=self.draining,
            failing=self.failing,
            options=self.spec.options,
            previous_share=self.previous_share,
            rounds=statistics.rounds,
            accepted_length=statistics.accepted_length,
            draft_us=statistics.draft_us,
        )


async def _nothing() -> None:
    """What there is to wait for where ``dispose`` closes drafters itself."""


class Registry:
    """All loaded versions, by name and load order. Use it on one event loop.

    Only the registry frees a drafter's weights, through ``dispose``, once its version was unloaded
    and its last stream was detached.
    """

    def __init__(
        self,
        loader: Loader,
        dispose: Callable[[Drafter], None],
        disposed: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """Create an empty registry.

        Drafters whose sequences are closed are given to ``dispose``; ``disposed`` returns when they
        are closed.
        """
        self._loader = loader
        self._dispose = dispose
        self._disposed = disposed
        self._versions: dict[str, list[Version]] = {}
        self._numbers: dict[str, int] = {}  # the highest version number assigned under each name
        self._loading: set[tuple[str, str]] = set()
        # Called after the versions or their shares changed.
        self.on_change: Callable[[], None] = lambda: None

    @property
    def default_name(self) -> str:
        """The drafter used for an empty name: the one loaded first. Empty if there is none."""
        return next(iter(self._versions), "")

    def versions(self) -> list[Version]:
        """Return all versions, sorted by name, then load order."""
        return [version for _, versions in sorted(self._versions.items()) for version in versions]

    async def load(self, spec: DrafterSpec, *, activate: bool = False) -> Version:
        """Load a version on a thread. The first version of a name becomes active. Raises
        ``LoadError`` if the method, the folder or an option is wrong, and ``ServiceError``:
        ALREADY_LOADED, if the name has this version; TOO_MANY_VERSIONS."""
        loaded = await self._load(spec)
        if activate:
            self._promote(spec.name, {loaded: 1.0})
        else:
            self.on_change()
        return loaded

    def activate(self, name: str, version: str, share: float) -> Version:
        """Give a version a share of new generations.

        With a share below 1, the rest stays with the other active version that had the largest
        share; all others get none. Raises ``ServiceError``: DRAFTER_NOT_FOUND, INVALID_SHARE,
        DRAINING, or NO_OTHER_VERSION.
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
        rest = self.replacement(chosen)
        if share < 1.0 and rest is None:
            raise ServiceError.failed_precondition(
                "NO_OTHER_VERSION",
                f"drafter {name!r} has no other active version to take the remaining share of "
                f"{1 - share:g}; activate another version fully first",
            )
        shares = {chosen: share}
        if rest is not None and share < 1.0:
            shares[rest] = 1.0 - share
        self._promote(name, shares)
        return chosen

    def rollback(self, name: str) -> list[Version]:
        """Restore the shares from before the last activation; a second call undoes the first.
        Returns the versions that have a share again. Raises ``ServiceError``: DRAFTER_NOT_FOUND,
        or NO_PREVIOUS_VERSION."""
        if not self._of(name):
            raise self._not_found(name)
        shares = {v: v.previous_share for v in self._of(name) if not v.draining and not v.failing}
        if not any(shares.values()):
            raise ServiceError.failed_precondition(
                "NO_PREVIOUS_VERSION",
                f"drafter {name!r} has no version that an activation replaced and that can be used;"
                " load one again and activate it",
            )
        total = sum(shares.values())
        self._promote(name, {version: share / total for version, share in shares.items()})
        return self._active(name)

    def unload(self, name: str, version: str = "", *, force: bool = False) -> bool:
        """Remove a version, or all versions of a name: it takes no new streams, and its share goes
        to the others of the name. With ``force`` its streams are ended. Returns whether all are
        freed; otherwise each is freed with its last stream. Raises ``ServiceError``:
        DRAFTER_NOT_FOUND."""
        leaving = [self._find(name, version)] if version else list(self._of(name))
        if not leaving:
            raise self._not_found(name)
        for loaded in leaving:
            loaded.draining, loaded.share = True, 0.0
        self._normalize_shares(name)
        waiting = [loaded for loaded in leaving if loaded.streams]
        for loaded in leaving:
            self._remove_if_unused(loaded)
        if force:
            for end in [end for loaded in waiting for end in loaded.streams]:
                end()
        self.on_change()
        return not waiting

    def take_out(self, version: Version, error: str) -> None:
        """Move the share of a version that fails to the other active versions, if there are any.

        It may have lost its share already.
        """
        if not version.share or self.replacement(version) is None:
            return
        version.failing, version.share = error[:_MAX_REASON_CHARS], 0.0
        self._normalize_shares(version.spec.name)
        logger.error(
            "drafter taken out: it fails too often",
            extra={"drafter": version.spec.name, "version": version.version, "fault": error},
        )
        self.on_change()

    def choose(self, name: str, version: str = "") -> Version:
        """Return the version for a new generation: the requested one, or one by share.

        This is smooth weighted round-robin: of any n consecutive generations a version gets its
        share of n, plus or minus one. An empty name is the default one. Raises ``ServiceError``:
        DRAFTER_NOT_FOUND, or UNAVAILABLE with DRAFTER_DRAINING.
        """
        name = name or self.default_name
        if version:
            chosen = self._find(name, version)
            if chosen.draining:
                raise _draining(f"version {version!r} of drafter {name!r}")
            return chosen
        if not self._of(name):
            raise self._not_found(name)
        active = self._active(name)
        if not active:
            raise _draining(f"drafter {name!r}")
        for candidate in active:
            candidate.credit += candidate.share
        chosen = max(active, key=lambda v: v.credit)
        chosen.credit -= 1.0
        return chosen

    def attach(self, version: Version, end: Callable[[], None]) -> None:
        """Add a stream. The drafter is not freed before :meth:`detach`.

        ``end`` ends the stream; a forced unload calls it, once at most. The version is from
        :meth:`choose`, without an await in between.
        """
        version.streams.add(end)

    def detach(self, version: Version, end: Callable[[], None]) -> None:
        """Remove a stream whose sequence is closed, or queued to be closed before ``dispose``."""
        version.streams.discard(end)
        self._remove_if_unused(version)

    def close(self) -> None:
        """Free every drafter. No stream may be attached."""
        for version in self.versions():
            self._dispose(version.drafter)
        self._versions.clear()

    async def _load(self, spec: DrafterSpec) -> Version:
        name = spec.name
        loading = {version for other, version in self._loading if other == name}
        taken = loading | {v.version for v in self._of(name)}
        version = spec.version or self._next_number(name, taken)
        if version in taken:
            raise ServiceError.failed_precondition(
                "ALREADY_LOADED",
                f"drafter {name!r} has a version {version!r} already; unload it, choose "
                "another version, or leave the version out to have it numbered",
            )
        full = len(self.versions()) + len(self._loading) >= MAX_VERSIONS
        if full and not await self._free_replaced():
            raise ServiceError.resource_exhausted(
                "TOO_MANY_VERSIONS",
                f"{MAX_VERSIONS} versions are loaded, which is the limit; unload one first",
            )
        self._loading.add((name, version))
        try:
            drafter = await self._load_drafter(spec)
        finally:
            self._loading.discard((name, version))
        if not spec.version:  # only now: a failed load uses no number
            self._numbers[name] = max(int(version), self._numbers.get(name, 0))
        loaded = Version(spec, drafter, version)
        self._versions.setdefault(name, []).append(loaded)
        if not self._active(name):
            self._set_shares(name, {loaded: 1.0})
        return loaded

    async def _load_drafter(self, spec: DrafterSpec) -> Drafter:
        """Load a drafter; versions that were replaced are freed while memory is short. Raises
        ``LoadError``: see :meth:`load`."""
        while self._loader.is_short_of_memory(spec) and await self._free_replaced():
            pass
        while True:
            try:
                return await self._loader.load(spec)
            except LoadError as error:
                if error.reason != _OUT_OF_MEMORY or not await self._free_replaced():
                    raise

    async def _free_replaced(self) -> bool:
        """Unload a version that an activation replaced and that is not in use, if there is one.

        Those that :meth:`rollback` would restore come last.
        """
        for version in sorted(self.versions(), key=lambda version: version.previous_share > 0):
            if version.replaced and not (version.share or version.streams or version.draining):
                logger.warning(
                    "a replaced version is unloaded to make room for another",
                    extra={"drafter": version.spec.name, "version": version.version},
                )
                self.unload(version.spec.name, version.version)
                await self._disposed()
                return True
        return False

    def _of(self, name: str) -> list[Version]:
        """Return the versions of a name, draining ones too."""
        return self._versions.get(name, [])

    def _active(self, name: str) -> list[Version]:
        """Return the versions of a name that have a share of new generations."""
        return [version for version in tuple(self._of(name)) if version.share]

    def replacement(self, version: Version) -> Version | None:
        """Return the other active version of its name with the largest share. Any thread."""
        others = [other for other in self._active(version.spec.name) if other is not version]
        return max(others, key=lambda v: v.share, default=None)

    def _find(self, name: str, version: str) -> Version:
        """Return a version. Raises ``ServiceError`` DRAFTER_NOT_FOUND if there is none."""
        for loaded in self._of(name):
            if loaded.version == version:
                return loaded
        raise self._not_found(name, version)

    def _remove_if_unused(self, version: Version) -> None:
        versions = self._of(version.spec.name)
        if version.draining and not version.streams and version in versions:
            versions.remove(version)
            if not versions:
                del self._versions[version.spec.name]
            self._dispose(version.drafter)
            self.on_change()

    def _promote(self, name: str, shares: dict[Version, float]) -> None:
        """Change the shares of a name, and remember those from before."""
        before = {version: version.share for version in self._of(name)}
        self._set_shares(name, shares)
        if before != {version: version.share for version in self._of(name)}:
            for version, share in before.items():
                version.previous_share = share
                version.replaced |= share > 0
        for version in self._active(name):
            version.recent.clear()
        self.on_change()

    def _set_shares(self, name: str, shares: dict[Version, float]) -> None:
        """Set the shares of some versions of a name, and the shares of its other versions to 0."""
        for version in self._of(name):
            version.share = shares.get(version, 0.0)
            version.credit = 0.0
            if version.share:
                version.failing = ""

    def _normalize_shares(self, name: str) -> None:
        """Scale the shares of a name to a sum of 1; if all are 0, the newest version gets 1."""
        loaded = [v for v in self._of(name) if not v.draining]
        total = sum(v.share for v in loaded)
        if total:
            self._set_shares(name, {v: v.share / total for v in loaded})
        elif loaded:
            self._set_shares(name, {loaded[-1]: 1.0})

    def _next_number(self, name: str, taken: set[str]) -> str:
        """Return a number that no loaded version has had and that is not ``taken``."""
        number = self._numbers.get(name, 0) + 1
        while str(number) in taken:
            number += 1
        return str(number)

    def _not_found(self, name: str, version: str = "") -> ServiceError:
        """Return the error for a name or version that is not loaded."""
        loaded = ", ".join(
            f"{v.spec.name} {v.version}" for versions in self._versions.values() for v in versions
        )
        missing = f"{name[:80]!r}" + (f" version {version[:80]!r}" if version else "")
        return ServiceError.not_found(
            "DRAFTER_NOT_FOUND", f"there is no drafter {missing}; loaded are: {loaded or 'none'}"
        )


def _draining(which: str) -> ServiceError:
    return ServiceError.unavailable(
        "DRAFTER_DRAINING", f"{which} is being unloaded and takes no new streams; try another"
    )
