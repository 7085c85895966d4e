"""Loading, routing, canaries and release of drafter versions.

Streams of an unloaded version move to another version between two rounds, with their whole text. A
stream stays if its client requested this version or if the other one does not fit its target.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from paceline.drafter.methods.base import Drafter
from paceline.drafter.registry.canary import Canary, CanarySettings
from paceline.drafter.registry.loader import Loader
from paceline.drafter.registry.state import RegistryState, StateFile
from paceline.drafter.registry.table import Version, VersionTable
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.statistics import DraftStatistics
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2

logger = logging.getLogger("paceline.drafter")

MAX_VERSIONS = 256

Check = Callable[[DrafterSpec, Drafter], Awaitable[drafter_pb2.DrafterCheck | None]]
"""Checks a loaded drafter before it is listed. Raises LoadError if it fails."""


class Registry:
    """All loaded versions. Use it on one event loop.

    Only the registry frees a drafter's weights, through ``dispose``, once its version was unloaded
    and its last stream was detached.
    """

    def __init__(
        self,
        loader: Loader,
        dispose: Callable[[Drafter], None],
        *,
        check: Check | None = None,
        state: StateFile | None = None,
    ) -> None:
        """Create an empty registry.

        Args:
            loader: Loads drafters; closed with the registry.
            dispose: Closes a drafter whose sequences are closed.
            check: Checks every version before it is listed.
            state: Where the registry is saved; closed with the registry.
        """
        self._loader = loader
        self._dispose = dispose
        self._check = check
        self._state = state
        self._configured: list[DrafterSpec] = []
        self._table = VersionTable()
        self._loading: set[tuple[str, str]] = set()
        self._canaries: dict[str, Canary] = {}

    @property
    def default_name(self) -> str:
        """The drafter used for an empty name: the one loaded first. Empty if there is none."""
        return self._table.default_name

    def versions(self) -> list[Version]:
        """All versions, sorted by name, then load order."""
        return sorted(self._table, key=lambda version: version.spec.name)

    def canaries(self) -> list[drafter_pb2.DrafterCanary]:
        """The newest canary of each name, sorted by name."""
        return [canary.info(name) for name, canary in sorted(self._canaries.items())]

    async def start(self, configured: list[DrafterSpec]) -> None:
        """Load the drafters of the command line, or restore the saved state.

        The state is restored if it was first written by a start with the same ``configured``.
        Versions of it that can no longer be loaded are skipped.

        Raises:
            LoadError: A drafter of ``configured`` cannot be loaded.
        """
        self._configured = configured
        state = self._state.read() if self._state is not None else None
        if state is not None and state.configured == configured:
            await self._restore(state)
        else:
            if state is not None:
                logger.warning("started with other drafters than before: the saved state is lost")
            for spec in configured:
                await self._load(spec)
        self._save()

    async def load(self, spec: DrafterSpec, *, activate: bool = False) -> Version:
        """Load a version on a thread. The first version of a name becomes active.

        Raises:
            LoadError: The method, the folder or an option is wrong, or the check failed.
            ServiceError: ALREADY_LOADED, if the name has this version; TOO_MANY_VERSIONS.
        """
        loaded = await self._load(spec)
        if activate:
            self._cancel_canary(spec.name, "another version was activated")
            self._table.set_shares(spec.name, {loaded: 1.0})
        self._save()
        return loaded

    def activate(
        self, name: str, version: str, share: float, canary: CanarySettings | None = None
    ) -> Version:
        """Give a version a share of new generations.

        Args:
            name: Drafter name.
            version: Version to activate.
            share: In (0, 1]. Below 1, the rest stays with the other active version that had the
                largest share; all others get none.
            canary: Run the version as a canary against the other one; needs a share below 1.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, INVALID_SHARE, DRAINING, or NO_OTHER_VERSION.
        """
        if not 0.0 < share <= 1.0 or (canary is not None and share == 1.0):
            raise ServiceError.invalid_argument(
                "INVALID_SHARE",
                f"traffic share is {share}, expected above 0 and at most 1, of a canary below 1",
            )
        chosen = self._table.find(name, version)
        if chosen.draining:
            raise ServiceError.failed_precondition(
                "DRAINING", f"version {version!r} of drafter {name!r} is being unloaded"
            )
        others = [v for v in self._table.active(name) if v is not chosen]
        if share < 1.0 and not others:
            raise ServiceError.failed_precondition(
                "NO_OTHER_VERSION",
                f"drafter {name!r} has no other active version to take the remaining share of "
                f"{1 - share:g}; activate another version fully first",
            )
        self._cancel_canary(name, "the shares were changed")
        if share == 1.0:
            self._table.set_shares(name, {chosen: 1.0})
        else:
            rest = max(others, key=lambda v: v.share)
            self._table.set_shares(name, {chosen: share, rest: 1.0 - share})
            if canary is not None:
                self._canaries[name] = Canary(chosen.version, rest.version, canary)
                chosen.canary = True
        self._save()
        return chosen

    def unload(self, name: str, version: str = "", *, force: bool = False) -> bool:
        """Remove a version, or all versions of a name.

        A removed version takes no new streams. Its share goes to the other versions of the name,
        and its streams move to :meth:`successor` at their next round.

        Args:
            name: Drafter name.
            version: Empty: all of them.
            force: End its streams instead of waiting for them.

        Returns:
            Whether all of them are freed; otherwise each is freed with its last stream.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND.
        """
        found = [self._table.find(name, version)] if version else list(self._table.of(name))
        if not found:
            raise self._table.not_found(name)
        canary = self._canaries.get(name)
        if canary is not None and {v.version for v in found} & {canary.canary, canary.baseline}:
            self._cancel_canary(name, "one of its versions was unloaded")
        for each in found:
            each.draining, each.share = True, 0.0
        self._table.normalize_shares(name)
        waiting = [each for each in found if each.streams]
        for each in found:
            self._remove_if_unused(each)
        if force:
            for end in [end for each in waiting for end in each.streams]:
                end()
        self._save()
        return not waiting

    def choose(self, name: str, version: str = "") -> Version:
        """The version for a new generation; see :meth:`VersionTable.choose`."""
        return self._table.choose(name, version)

    def successor(self, version: Version) -> Version | None:
        """The version that a stream of an unloaded version moves to; None: it stays."""
        if not version.draining:
            return None
        active = self._table.active(version.spec.name)
        return max(active, key=lambda v: v.share, default=None)

    def attach(self, version: Version, end: Callable[[], None]) -> None:
        """Add a stream. The drafter is not freed before :meth:`detach`.

        Args:
            version: From :meth:`choose` or :meth:`successor`, without an await in between.
            end: Ends the stream; called at most once, by a forced unload.
        """
        version.streams.add(end)

    def detach(
        self, version: Version, end: Callable[[], None], statistics: DraftStatistics
    ) -> None:
        """Remove a stream whose sequence is closed, or queued to be closed before ``dispose``.

        Args:
            version: As attached.
            end: As attached.
            statistics: Of the version for this generation; a canary counts them.
        """
        version.streams.discard(end)
        name = version.spec.name
        canary = self._canaries.get(name)
        if canary is not None and canary.add(version.version, statistics):
            if canary.running:
                self._save()
            else:
                self._conclude(name, canary)
        self._remove_if_unused(version)

    def report_failure(self, version: Version, error: str) -> None:
        """Roll a canary back after it raised or returned an invalid tree."""
        canary = self._canaries.get(version.spec.name)
        if canary is not None and canary.running and version.canary:
            canary.end(drafter_pb2.CANARY_STATE_ROLLED_BACK, f"it failed: {error}")
            self._conclude(version.spec.name, canary)

    async def saved(self) -> None:
        """Return when all changes so far are on disk.

        Raises:
            ServiceError: STATE_NOT_SAVED, if they could not be written.
        """
        try:
            if self._state is not None:
                await self._state.saved()
        except OSError as error:
            raise ServiceError.internal(
                "STATE_NOT_SAVED",
                f"the change is in effect but would be lost in a restart: {error}",
            ) from error

    async def close(self) -> None:
        """Stop loading and free every drafter. No stream may be attached."""
        await self._loader.close()
        if self._state is not None:
            await self._state.close()
        for each in self.versions():
            self._dispose(each.drafter)
            self._table.remove(each)

    async def _load(self, spec: DrafterSpec) -> Version:
        loading = {version for name, version in self._loading if name == spec.name}
        version = spec.version or self._table.next_number(spec.name, loading)
        if version in loading or any(v.version == version for v in self._table.of(spec.name)):
            raise ServiceError.failed_precondition(
                "ALREADY_LOADED",
                f"drafter {spec.name!r} has a version {version!r} already; unload it, choose "
                "another version, or leave the version out to have it numbered",
            )
        if len(self.versions()) + len(self._loading) >= MAX_VERSIONS:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_VERSIONS",
                f"{MAX_VERSIONS} versions are loaded, which is the limit; unload one first",
            )
        self._loading.add((spec.name, version))
        try:
            drafter = await self._loader.load(spec)
            try:
                checked = await self._check(spec, drafter) if self._check is not None else None
            except BaseException:
                self._dispose(drafter)
                raise
        finally:
            self._loading.discard((spec.name, version))
        loaded = Version(spec, drafter, version, checked)
        self._table.add(loaded)
        return loaded

    async def _restore(self, state: RegistryState) -> None:
        self._table.numbers = dict(state.numbers)
        shares: dict[str, dict[Version, float]] = {}
        for spec, share in state.loaded:
            try:
                version = await self._load(spec)
            except Exception as error:  # the others are still of use
                logger.error(
                    "a drafter of the saved state was skipped",
                    extra={"drafter": spec.name, "version": spec.version, "fault": str(error)},
                )
            else:
                shares.setdefault(spec.name, {})[version] = share
        for name, restored in shares.items():
            self._table.set_shares(name, restored)
            self._table.normalize_shares(name)
        for name, canary in state.canaries.items():
            active = {v.version: v for v in self._table.active(name)}
            if {canary.canary, canary.baseline} <= set(active):
                self._canaries[name] = canary
                active[canary.canary].canary = True

    def _save(self) -> None:
        if self._state is not None:
            self._state.save(RegistryState.of(self._configured, self._table, self._canaries))

    def _conclude(self, name: str, canary: Canary) -> None:
        """Keep the promoted version, or the baseline, and unload the other."""
        promoted = canary.state == drafter_pb2.CANARY_STATE_PROMOTED
        kept, unloaded = canary.canary, canary.baseline
        if not promoted:
            kept, unloaded = unloaded, kept
        logger.info(
            "canary promoted" if promoted else "canary rolled back",
            extra={"drafter": name, "version": canary.canary, "reason": canary.reason},
        )
        version = self._table.find(name, kept)
        version.canary = False
        self._table.set_shares(name, {version: 1.0})
        self.unload(name, unloaded)

    def _cancel_canary(self, name: str, reason: str) -> None:
        canary = self._canaries.get(name)
        if canary is not None and canary.running:
            canary.end(drafter_pb2.CANARY_STATE_CANCELLED, reason)
            for each in self._table.of(name):
                each.canary = False

    def _remove_if_unused(self, version: Version) -> None:
        if version.draining and not version.streams and self._table.remove(version):
            self._dispose(version.drafter)
