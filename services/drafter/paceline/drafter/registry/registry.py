"""Which version a generation gets, which one takes over, and when one may go."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from paceline.drafter.methods.base import Drafter
from paceline.drafter.registry.keeper import Keeper
from paceline.drafter.registry.loader import Loader
from paceline.drafter.registry.state import RegistryState, SavedTrial
from paceline.drafter.registry.table import VersionTable
from paceline.drafter.registry.trial import Sample, Trial, TrialSettings, TrialState
from paceline.drafter.registry.version import Version
from paceline.drafter.spec import DrafterSpec
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2

logger = logging.getLogger("paceline.drafter")

MOST_VERSIONS = 256
"""Loaded at a time, whoever asks for more."""

Check = Callable[[DrafterSpec, Drafter], Awaitable[drafter_pb2.DrafterCheck | None]]
"""Tries a drafter out before it gets traffic. Raises LoadError if it is not fit for any."""


class Registry:
    """All loaded versions. Belongs to one event loop.

    Who may free: a drafter's weights are freed by the registry alone, through ``dispose``, once its
    version was unloaded and its last stream detached. Until then whoever is attached may use it.
    """

    def __init__(
        self,
        loader: Loader,
        dispose: Callable[[Drafter], None],
        *,
        check: Check | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """Make an empty registry.

        Args:
            loader: Loads drafters; closed with the registry.
            dispose: Closes a drafter that nobody uses any more, where its sequences were closed.
            check: Tries out every version before it is listed.
            keeper: Keeps the state over a restart; closed with the registry.
        """
        self._loader = loader
        self._dispose = dispose
        self._check = check
        self._keeper = keeper
        self._given: list[DrafterSpec] = []
        self._table = VersionTable()
        self._loading: set[tuple[str, str]] = set()
        self._trials: dict[str, Trial] = {}

    @property
    def default_name(self) -> str:
        """What an empty name stands for: the drafter loaded first. Empty if there is none."""
        return self._table.default_name

    def versions(self) -> list[Version]:
        """All versions, sorted by name, then load time."""
        return sorted(self._table, key=lambda version: version.spec.name)

    def trials(self) -> list[tuple[str, Trial]]:
        """The last trial of each name, sorted by name."""
        return sorted(self._trials.items())

    async def begin(self, given: list[DrafterSpec], state: RegistryState | None) -> None:
        """Load what there is at the start.

        A state that began with the same ``given`` is taken up again; what of it cannot be loaded
        any more is left out. Otherwise ``given`` is loaded.

        Raises:
            LoadError: A drafter of ``given`` cannot be loaded.
        """
        self._given = given
        if state is not None and state.given == given:
            await self._take_up(state)
        else:
            if state is not None:
                logger.warning("told to load other drafters than before: the old state is dropped")
            for spec in given:
                await self._load(spec)
        self._changed()

    async def load(self, spec: DrafterSpec, *, activate: bool = False) -> Version:
        """Load a version while everything else goes on. The first of a name becomes active.

        Raises:
            LoadError: The method, the folder or an option is wrong, or the check failed.
            ServiceError: ALREADY_LOADED, if the name has this version; TOO_MANY_VERSIONS.
        """
        loaded = await self._load(spec)
        if activate:
            self._cancel_trial(spec.name, "another version was activated")
            self._table.set_shares(spec.name, {loaded: 1.0})
        self._changed()
        return loaded

    def activate(
        self, name: str, version: str, share: float, trial: TrialSettings | None = None
    ) -> Version:
        """Give a version a share of new generations.

        Args:
            name: Drafter name.
            version: Version to activate.
            share: In (0, 1]. Below 1 the rest stays with the other active version: the one that had
                the largest share; all others get none.
            trial: Judge the version beside the other one; needs a share below 1.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND, INVALID_SHARE, DRAINING, or NO_OTHER_VERSION.
        """
        if not 0.0 < share <= 1.0 or (trial is not None and share == 1.0):
            raise ServiceError.invalid_argument(
                "INVALID_SHARE",
                f"traffic share is {share}, expected above 0 and at most 1, on trial below 1",
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
        self._cancel_trial(name, "shares were changed by hand")
        if share == 1.0:
            self._table.set_shares(name, {chosen: 1.0})
        else:
            rest = max(others, key=lambda v: v.share)
            self._table.set_shares(name, {chosen: share, rest: 1.0 - share})
            if trial is not None:
                self._trials[name] = Trial(chosen.version, rest.version, trial)
                chosen.on_trial = True
        self._changed()
        return chosen

    def unload(self, name: str, version: str = "", *, force: bool = False) -> bool:
        """Remove a version, or all versions of a name.

        A removed version takes no new streams; its shares go to what is left of the name, and its
        streams follow at their next round (:meth:`successor`).

        Args:
            name: Drafter name.
            version: Empty: all of them.
            force: End its streams instead of waiting for them.

        Returns:
            Whether everything asked for is gone already; otherwise it goes with its last stream.

        Raises:
            ServiceError: DRAFTER_NOT_FOUND.
        """
        found = [self._table.find(name, version)] if version else list(self._table.of(name))
        if not found:
            raise self._table.not_found(name)
        trial = self._trials.get(name)
        if trial is not None and {v.version for v in found} & {trial.candidate, trial.baseline}:
            self._cancel_trial(name, "one of its versions was unloaded")
        for each in found:
            each.draining = True
            each.share = 0.0
        self._table.share_out(name)
        waiting = [each for each in found if each.evictions]
        for each in found:
            self._remove_if_unused(each)
        if force:
            for evict in [evict for each in waiting for evict in each.evictions]:
                evict()
        self._changed()
        return not waiting

    def choose(self, name: str, version: str = "") -> Version:
        """The version a new generation gets: as :meth:`VersionTable.choose`."""
        return self._table.choose(name, version)

    def successor(self, version: Version) -> Version | None:
        """The version that takes over a running generation; None while it may stay, or must."""
        if not version.draining:
            return None
        active = self._table.active(version.spec.name)
        return max(active, key=lambda v: v.share, default=None)

    def attach(self, version: Version, evict: Callable[[], None]) -> None:
        """Count a stream. Until :meth:`detach` the drafter is not freed.

        Args:
            version: As :meth:`choose` or :meth:`successor` gave it, in the same step of the event
                loop.
            evict: Ends the stream; called at most once, by a forced unload.
        """
        version.evictions.add(evict)

    def detach(self, version: Version, evict: Callable[[], None], sample: Sample) -> None:
        """The stream ended and its sequence is closed, or will be before anything posted later.

        Args:
            version: As attached.
            evict: As attached.
            sample: How the version did; it counts in a trial.
        """
        version.evictions.discard(evict)
        name = version.spec.name
        trial = self._trials.get(name)
        if trial is not None and trial.running:
            looks = trial.looks
            trial.add(version.version, sample)
            if not trial.running:
                self._conclude(name, trial)
            elif trial.looks != looks:
                self._changed()
        self._remove_if_unused(version)

    def failed(self, version: Version, what: str) -> None:
        """A version raised, or drew nonsense: on trial, that is the end of it."""
        trial = self._trials.get(version.spec.name)
        if trial is not None and trial.running and version.on_trial:
            trial.end(TrialState.ROLLED_BACK, f"it failed: {what}")
            self._conclude(version.spec.name, trial)

    async def saved(self) -> None:
        """Return when all changes so far are on disk.

        Raises:
            ServiceError: STATE_NOT_SAVED, if the disk did not take them.
        """
        try:
            if self._keeper is not None:
                await self._keeper.saved()
        except OSError as error:
            raise ServiceError.internal(
                "STATE_NOT_SAVED",
                f"the change is in effect but would be lost in a restart: {error}",
            ) from error

    async def close(self) -> None:
        """Stop loading and free every drafter. Nothing may be attached any more."""
        await self._loader.close()
        if self._keeper is not None:
            await self._keeper.close()
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
        if len(self.versions()) + len(self._loading) >= MOST_VERSIONS:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_VERSIONS",
                f"there are {MOST_VERSIONS} versions, the most there may be; unload one first",
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
        if not self._table.active(spec.name):
            self._table.set_shares(spec.name, {loaded: 1.0})
        return loaded

    async def _take_up(self, state: RegistryState) -> None:
        self._table.numbers = dict(state.numbers)
        shares: dict[str, dict[Version, float]] = {}
        for spec, share in state.loaded:
            try:
                version = await self._load(spec)
            except Exception as error:  # a drafter is no reason not to start
                logger.error(
                    "a drafter of the saved state was left out",
                    extra={"drafter": spec.name, "version": spec.version, "fault": str(error)},
                )
            else:
                shares.setdefault(spec.name, {})[version] = share
        for name, kept in shares.items():
            self._table.set_shares(name, kept)
            self._table.share_out(name)
        for saved in state.trials:
            active = {v.version: v for v in self._table.active(saved.name)}
            if {saved.candidate, saved.baseline} <= set(active):
                self._trials[saved.name] = Trial(
                    saved.candidate, saved.baseline, saved.settings, looks=saved.looks
                )
                active[saved.candidate].on_trial = True

    def _changed(self) -> None:
        if self._keeper is not None:
            self._keeper.keep(
                RegistryState(
                    given=self._given,
                    loaded=[
                        (replace(v.spec, version=v.version), v.share)
                        for v in self._table
                        if not v.draining
                    ],
                    numbers=dict(self._table.numbers),
                    trials=[
                        SavedTrial(name, each.candidate, each.baseline, each.settings, each.looks)
                        for name, each in self._trials.items()
                        if each.running
                    ],
                )
            )

    def _conclude(self, name: str, trial: Trial) -> None:
        """Act on a verdict."""
        promoted = trial.state is TrialState.PROMOTED
        stays, goes = trial.candidate, trial.baseline
        if not promoted:
            stays, goes = goes, stays
        logger.info(
            "trial concluded",
            extra={
                "drafter": name,
                "version": trial.candidate,
                "verdict": trial.state.name.lower(),
                "reason_given": trial.reason,
            },
        )
        kept = self._table.find(name, stays)
        kept.on_trial = False
        self._table.set_shares(name, {kept: 1.0})
        self.unload(name, goes)

    def _cancel_trial(self, name: str, why: str) -> None:
        trial = self._trials.get(name)
        if trial is not None and trial.running:
            trial.end(TrialState.CANCELLED, why)
            for each in self._table.of(name):
                each.on_trial = False

    def _remove_if_unused(self, version: Version) -> None:
        if version.draining and not version.evictions and self._table.remove(version):
            self._dispose(version.drafter)
