"""A version on trial: judged beside the one it may replace, generation by generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.drafter.registry.comparison import Mean, difference_bounds, mean_per_round
from paceline.v1 import drafter_pb2

_FIRST_LOOK = 8
"""Generations of each version before the first look; twice as many before each further one."""

_NEGLIGIBLE_SECONDS = 1e-4
"""A draft may always take this much longer: no round notices."""


class TrialState(Enum):
    """Where a trial stands."""

    RUNNING = drafter_pb2.TRIAL_STATE_RUNNING
    PROMOTED = drafter_pb2.TRIAL_STATE_PROMOTED
    ROLLED_BACK = drafter_pb2.TRIAL_STATE_ROLLED_BACK
    CANCELLED = drafter_pb2.TRIAL_STATE_CANCELLED


@dataclass(frozen=True)
class TrialSettings:
    """When a version on trial is good enough; meanings as in the .proto.

    Raises:
        ValueError: One is out of range.
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
        ):
            if not low <= getattr(self, name) < high:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} to below {high}")
        if not _FIRST_LOOK <= self.max_generations <= 1 << 16:
            raise ValueError(
                f"max_generations is {self.max_generations}, expected {_FIRST_LOOK} to {1 << 16}"
            )

    @classmethod
    def from_proto(cls, message: drafter_pb2.TrialSettings) -> TrialSettings:
        """Settings as asked for; zeros stand for the defaults.

        Raises:
            ValueError: One is out of range.
        """
        # float32 on the wire: rounded, so that 0.95 is 0.95 again.
        return cls(
            confidence=round(message.confidence, 6) or cls.confidence,
            length_margin=round(message.length_margin, 6) or cls.length_margin,
            time_margin=round(message.time_margin, 6) or cls.time_margin,
            max_generations=message.max_generations or cls.max_generations,
        )


@dataclass
class Sample:
    """What one generation saw of a version."""

    rounds: int = 0
    """Trees drawn, and how the text went on known."""

    accepted: int = 0
    """Drafted tokens that the text went on with."""

    draft_seconds: float = 0.0
    """Time the drafts computed."""


@dataclass
class Trial:
    """A candidate version beside the baseline, until there is a verdict.

    Looks: both versions' samples are looked at when each has 8, 16, 32, ... of them. Look k may be
    wrong with a chance of error / (k (k + 1)), which sums to at most the error of the whole trial
    however many looks there are. At each look the candidate's accepted length and draft time are
    bounded against the baseline's and the margins (:func:`difference_bounds`): it is promoted if
    both are surely within, rolled back if one is surely not.
    """

    candidate: str
    baseline: str
    settings: TrialSettings
    state: TrialState = TrialState.RUNNING
    reason: str = ""
    looks: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether there is no verdict yet."""
        return self.state is TrialState.RUNNING

    def add(self, version: str, sample: Sample) -> None:
        """Take in a generation that ended, or left the version. May bring the verdict."""
        if not self.running or version not in (self.candidate, self.baseline) or not sample.rounds:
            return
        self.samples.setdefault(version, []).append(sample)
        counts = [len(self.samples.get(each, ())) for each in (self.candidate, self.baseline)]
        if min(counts) >= _FIRST_LOOK << self.looks:
            self._look()
        if self.running and counts[0] >= self.settings.max_generations:
            self.end(
                TrialState.ROLLED_BACK, f"no verdict after {counts[0]} generations of the candidate"
            )

    def end(self, state: TrialState, reason: str) -> None:
        """Conclude the trial."""
        self.state, self.reason = state, reason

    def info(self, name: str) -> drafter_pb2.DrafterTrial:
        """The trial as listed."""
        settings = self.settings
        return drafter_pb2.DrafterTrial(
            name=name,
            candidate=self.candidate,
            baseline=self.baseline,
            settings=drafter_pb2.TrialSettings(
                confidence=settings.confidence,
                length_margin=settings.length_margin,
                time_margin=settings.time_margin,
                max_generations=settings.max_generations,
            ),
            state=self.state.value,
            reason=self.reason,
            candidate_figures=_figures(self.samples.get(self.candidate, [])),
            baseline_figures=_figures(self.samples.get(self.baseline, [])),
        )

    def _look(self) -> None:
        self.looks += 1
        # Half for each of the two figures: either may roll the candidate back.
        error = (1.0 - self.settings.confidence) / (self.looks * (self.looks + 1)) / 2
        (new_length, new_time), (old_length, old_time) = (
            _means(self.samples[version]) for version in (self.candidate, self.baseline)
        )
        shorter, longer = difference_bounds(
            new_length, old_length, 1.0 - self.settings.length_margin, error
        )
        quicker, slower = difference_bounds(
            new_time, old_time, 1.0 + self.settings.time_margin, error
        )
        figures = (
            f"accepted {new_length.value:.2f} drafted tokens a round against "
            f"{old_length.value:.2f}, drafts took {new_time.value * 1e3:.2f} ms against "
            f"{old_time.value * 1e3:.2f} ms"
        )
        if longer < 0:
            self.end(TrialState.ROLLED_BACK, f"accepts too little: {figures}")
        elif quicker > _NEGLIGIBLE_SECONDS:
            self.end(TrialState.ROLLED_BACK, f"takes too long: {figures}")
        elif shorter >= 0 and slower <= _NEGLIGIBLE_SECONDS:
            self.end(TrialState.PROMOTED, figures)


def _means(samples: list[Sample]) -> tuple[Mean, Mean]:
    """Accepted length, and draft time in seconds."""
    rounds = [sample.rounds for sample in samples]
    return (
        mean_per_round([sample.accepted for sample in samples], rounds),
        mean_per_round([sample.draft_seconds for sample in samples], rounds),
    )


def _figures(samples: list[Sample]) -> drafter_pb2.TrialFigures:
    rounds = sum(sample.rounds for sample in samples)
    if not rounds:
        return drafter_pb2.TrialFigures()
    return drafter_pb2.TrialFigures(
        generations=len(samples),
        rounds=rounds,
        accepted_length=sum(sample.accepted for sample in samples) / rounds,
        draft_us=round(sum(sample.draft_seconds for sample in samples) / rounds * 1e6),
    )
