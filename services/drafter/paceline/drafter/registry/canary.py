"""A canary: a version that is compared with the one it may replace, on a share of the traffic."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, field
from functools import reduce

from paceline.drafter.registry.comparison import difference_bounds, mean_per_round
from paceline.drafter.statistics import DraftStatistics
from paceline.v1 import drafter_pb2

_FIRST_COMPARISON = 8
"""Generations of each version before the first comparison; each further one needs twice as many."""

_NEGLIGIBLE_SECONDS = 1e-4
"""An increase of draft time that is always allowed."""


@dataclass(frozen=True)
class CanarySettings:
    """When a canary is promoted; the fields are those of ``paceline.v1.CanarySettings``.

    Raises:
        ValueError: A field is out of range.
    """

    confidence: float = 0.99
    length_margin: float = 0.05
    time_margin: float = 0.25
    max_generations: int = 256

    def __post_init__(self) -> None:
        for name, low, high in (
            ("confidence", 0.5, 1.0),
            ("length_margin", 0.0, 1.0),
            ("time_margin", 0.0, 100.0),
            ("max_generations", _FIRST_COMPARISON, 1 << 16),
        ):
            if not low <= getattr(self, name) < high:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} to below {high}")


@dataclass
class Canary:
    """Compares the generations of a canary with those of the baseline until the result is clear.

    The versions are compared when each has 8, 16, 32, ... generations. Comparison k may be wrong
    with probability error / (k (k + 1)); these sum to at most the error, 1 - confidence. Each
    comparison bounds the differences of accepted length and of draft time, beyond their margins
    (:func:`difference_bounds`). The canary is promoted if both are within the margins, and rolled
    back if one is not.
    """

    canary: str
    baseline: str
    settings: CanarySettings
    state: drafter_pb2.CanaryState = drafter_pb2.CANARY_STATE_RUNNING
    reason: str = ""
    comparisons: int = 0
    generations: dict[str, list[DraftStatistics]] = field(default_factory=dict)
    """Statistics of each generation, by version."""

    @property
    def running(self) -> bool:
        """Whether the comparison is undecided."""
        return self.state == drafter_pb2.CANARY_STATE_RUNNING

    def add(self, version: str, statistics: DraftStatistics) -> bool:
        """Add a generation that ended or left the version. May end the canary.

        Returns:
            Whether the versions were compared, or the canary ended.
        """
        if not self.running or version not in (self.canary, self.baseline) or not statistics.rounds:
            return False
        self.generations.setdefault(version, []).append(statistics)
        counts = [len(self.generations.get(each, ())) for each in (self.canary, self.baseline)]
        due = min(counts) >= _FIRST_COMPARISON << self.comparisons
        if due:
            self._compare()
        if self.running and counts[0] >= self.settings.max_generations:
            self.end(
                drafter_pb2.CANARY_STATE_ROLLED_BACK,
                f"undecided after {counts[0]} generations of the canary",
            )
        return due or not self.running

    def end(self, state: drafter_pb2.CanaryState, reason: str) -> None:
        """End the canary."""
        self.state, self.reason = state, reason

    def info(self, name: str) -> drafter_pb2.DrafterCanary:
        """The canary of the drafter ``name`` as listed."""
        return drafter_pb2.DrafterCanary(
            name=name,
            canary=self.canary,
            baseline=self.baseline,
            settings=drafter_pb2.CanarySettings(**asdict(self.settings)),
            state=self.state,
            reason=self.reason,
            canary_statistics=_totals(self.generations.get(self.canary, [])),
            baseline_statistics=_totals(self.generations.get(self.baseline, [])),
        )

    def _compare(self) -> None:
        self.comparisons += 1
        # Half for each of the two quantities: either can roll the canary back.
        error = (1 - self.settings.confidence) / (self.comparisons * (self.comparisons + 1)) / 2
        canary, baseline = (self.generations[each] for each in (self.canary, self.baseline))
        rounds = [each.rounds for each in canary], [each.rounds for each in baseline]
        new_length = mean_per_round([each.accepted for each in canary], rounds[0])
        old_length = mean_per_round([each.accepted for each in baseline], rounds[1])
        new_time = mean_per_round([each.draft_seconds for each in canary], rounds[0])
        old_time = mean_per_round([each.draft_seconds for each in baseline], rounds[1])
        length_low, length_high = difference_bounds(
            new_length, old_length, 1 - self.settings.length_margin, error
        )
        time_low, time_high = difference_bounds(
            new_time, old_time, 1 + self.settings.time_margin, error
        )
        means = (
            f"accepted length {new_length.value:.2f} against {old_length.value:.2f}, "
            f"draft time {new_time.value * 1e3:.2f} ms against {old_time.value * 1e3:.2f} ms"
        )
        if length_high < 0:
            self.end(drafter_pb2.CANARY_STATE_ROLLED_BACK, f"accepted length too low: {means}")
        elif time_low > _NEGLIGIBLE_SECONDS:
            self.end(drafter_pb2.CANARY_STATE_ROLLED_BACK, f"draft time too high: {means}")
        elif length_low >= 0 and time_high <= _NEGLIGIBLE_SECONDS:
            self.end(drafter_pb2.CANARY_STATE_PROMOTED, means)


def _totals(generations: list[DraftStatistics]) -> drafter_pb2.CanaryStatistics:
    total = reduce(operator.iadd, generations, DraftStatistics())
    return drafter_pb2.CanaryStatistics(
        generations=len(generations),
        rounds=total.rounds,
        accepted_length=total.accepted_length,
        draft_us=total.draft_us,
    )
