"""Statistics of a generation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoundStats:
    """A step with a tree, or consecutive steps without one, measured by the verifier. Times in
    milliseconds, summed over the steps."""

    drafted: int
    """Nodes of the tree; 0 without one."""
    accepted: int
    """Accepted drafted tokens."""
    emitted: int
    """Emitted tokens, the bonus token included."""
    round_ms: float
    """Time from the end of the step before to the end of this one."""
    draft_ms: float
    """Time to draft."""
    verify_ms: float
    """Time of the verifier's steps."""
    queue_ms: float
    """Queueing time in drafter and verifier."""
    checked: int = 0
    """Nodes that the verifier admitted and checked."""
    node_budget: int = 0
    """Maximum number of nodes of the next tree; 0: drafting does not pay at the moment."""
    kv_bytes: int = 0
    """Bytes of the target's KV sent to the drafter; 0 if the drafter maps it."""
    steps: int = 1
    """Engine steps; more than 1 only without a tree."""

    @property
    def transport_ms(self) -> float:
        """The rest: messages between verifier and drafter, and waits."""
        return max(0.0, self.round_ms - self.draft_ms - self.verify_ms - self.queue_ms)


@dataclass(frozen=True)
class Usage:
    """Tokens of a generation."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    """Prompt tokens whose KV came from another cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class Stats:
    """Statistics of all rounds; updated while the generation runs."""

    rounds: list[RoundStats] = field(default_factory=list)
    """Every step with a tree in order, and the steps without one between them."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Number of rounds that accepted the drafted token at depth 1, 2, ..."""
    verifiers: list[str] = field(default_factory=list)
    """Addresses of the verifiers that generated the text, by first use. Not in `summary`, which a
    gateway sends to its callers."""
    drafter_versions: list[str] = field(default_factory=list)
    """Versions of drafters whose trees were verified, as "name@version", by first use."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Failures of drafting and of connections, by reason."""
    free_run_tokens: int = 0
    """Tokens of rounds without a tree."""
    prefill_ms: float = 0.0
    """Prefill time of the verifier, prefills after a restart included."""
    first_token_ms: float = 0.0
    """Time from the CreateCache request to the first token."""
    total_ms: float = 0.0
    """Time of the whole generation."""
    batch_invariant: bool | None = None
    """Whether all verifiers that generated the text are batch-invariant. If not, drafting may
    change tokens at numeric ties. None until the first response."""
    same_numerics: bool = True
    """Whether all verifiers that generated the text promise the same bits. If not, tokens after
    the text moved to another one may differ at numeric ties."""

    def add(self, entry: RoundStats) -> None:
        """Adds a round."""
        self.rounds.append(entry)
        if entry.drafted == 0:
            self.free_run_tokens += entry.emitted
        missing = entry.accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(entry.accepted):
            self.accepted_per_position[position] += 1

    @property
    def drafted_rounds(self) -> int:
        """Number of rounds with a tree."""
        return sum(1 for entry in self.rounds if entry.drafted)

    @property
    def drafted(self) -> int:
        """Drafted nodes."""
        return sum(entry.drafted for entry in self.rounds)

    @property
    def checked(self) -> int:
        """Drafted nodes that the verifier checked."""
        return sum(entry.checked for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return sum(entry.accepted for entry in self.rounds)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per drafted round, the bonus token included; 0 without such rounds."""
        emitted = sum(entry.emitted for entry in self.rounds if entry.drafted)
        return emitted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def mean_accepted_drafts(self) -> float:
        """Drafted tokens accepted per drafted round; 0 without such rounds."""
        return self.accepted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def draft_ms(self) -> float:
        """Compute time of the drafter."""
        return sum(entry.draft_ms for entry in self.rounds)

    @property
    def verify_ms(self) -> float:
        """Time of the verifier's steps."""
        return sum(entry.verify_ms for entry in self.rounds)

    @property
    def queue_ms(self) -> float:
        """Queueing time."""
        return sum(entry.queue_ms for entry in self.rounds)

    @property
    def transport_ms(self) -> float:
        """Time of rounds that is neither computing nor queueing."""
        return sum(entry.transport_ms for entry in self.rounds)

    @property
    def round_ms(self) -> float:
        """Time of all rounds."""
        return sum(entry.round_ms for entry in self.rounds)

    def summary(self) -> dict[str, object]:
        """The statistics as JSON-ready values; times in milliseconds."""
        names = (
            *("drafted_rounds", "drafted", "checked", "accepted", "mean_accepted_length"),
            *("mean_accepted_drafts", "free_run_tokens", "draft_ms", "verify_ms", "queue_ms"),
            *("transport_ms", "round_ms", "prefill_ms", "first_token_ms", "total_ms"),
        )
        return {
            "rounds": len(self.rounds),
            **{name: getattr(self, name) for name in names},
            "accepted_per_position": list(self.accepted_per_position),
            "batch_invariant": self.batch_invariant,
            "same_numerics": self.same_numerics,
            "drafter_versions": list(self.drafter_versions),
            "fallbacks": dict(self.fallbacks),
        }

    def merge(self, other: Stats) -> None:
        """Adds the statistics of another generation; times are sums."""
        for entry in other.rounds:
            self.add(entry)
        self.fallbacks.update(other.fallbacks)
        self.drafter_versions = list(dict.fromkeys(self.drafter_versions + other.drafter_versions))
        self.verifiers = list(dict.fromkeys(self.verifiers + other.verifiers))
        self.same_numerics = self.same_numerics and other.same_numerics
        self.prefill_ms += other.prefill_ms
        self.first_token_ms += other.first_token_ms
        self.total_ms += other.total_ms
        if other.batch_invariant is not None:
            self.batch_invariant = other.batch_invariant and self.batch_invariant is not False
