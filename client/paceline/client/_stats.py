"""What a generation cost and what its drafts were worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round as the client saw it. Times in milliseconds."""

    drafted: int
    """Nodes of the tree; 0 in a free run."""
    accepted: int
    """Drafted tokens that stood."""
    emitted: int
    """Tokens that came out, the verifier's own included."""
    round_ms: float
    """From the request for a tree (or for a free run) to the last answer."""
    draft_ms: float
    """Time the drafter computed."""
    verify_ms: float
    """Time of the verifier's steps."""
    queue_ms: float
    """Time the round waited for other sequences, in drafter and verifier."""
    checked: int = 0
    """Nodes of the tree that the verifier checked: the others were not worth their time."""
    node_budget: int = 0
    """Nodes that the verifier would check next, as it said; 0: no tree for now."""
    kv_bytes: int = 0
    """Bytes of the target's KV that came to the drafter over a wire; 0 where it is mapped."""

    @property
    def transport_ms(self) -> float:
        """Everything else: network, serialisation, event loops."""
        return max(0.0, self.round_ms - self.draft_ms - self.verify_ms - self.queue_ms)


@dataclass(frozen=True)
class Usage:
    """Tokens of a generation."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    """Prompt tokens whose KV came from a parent cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class Stats:
    """Grows while the generation runs; part of its result at the end."""

    rounds: list[RoundStats] = field(default_factory=list)
    """Every round in order, free runs included."""
    accepted_per_position: list[int] = field(default_factory=list)
    """How many rounds accepted the drafted token at depth 1, 2, ..."""
    drafter_versions: list[str] = field(default_factory=list)
    """Versions whose trees were verified, as "name@version", in order of first use."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """How often speculation or a connection failed, by reason."""
    free_run_tokens: int = 0
    """Tokens of rounds without a tree."""
    prefill_ms: float = 0.0
    """Time the verifier spent on prompts, those prefilled again after a restart included."""
    first_token_ms: float = 0.0
    """From the request for a cache to the first token."""
    total_ms: float = 0.0
    """From the start of the generation to its end."""
    batch_invariant: bool | None = None
    """Whether logits had the same bits in every batch, at every verifier that served the text: if
    not, it may depend on the drafter at numeric ties. None until a verifier has answered."""

    def add(self, entry: RoundStats) -> None:
        """Takes in a finished round."""
        self.rounds.append(entry)
        if entry.drafted == 0:
            self.free_run_tokens += entry.emitted
        missing = entry.accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(entry.accepted):
            self.accepted_per_position[position] += 1

    @property
    def drafted_rounds(self) -> int:
        """Rounds in which a tree was verified."""
        return sum(1 for entry in self.rounds if entry.drafted)

    @property
    def drafted(self) -> int:
        """Nodes drafted and sent to the verifier."""
        return sum(entry.drafted for entry in self.rounds)

    @property
    def checked(self) -> int:
        """Drafted nodes that the verifier checked."""
        return sum(entry.checked for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens that stood."""
        return sum(entry.accepted for entry in self.rounds)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per drafted round, the verifier's own included; 0 without such rounds."""
        emitted = sum(entry.emitted for entry in self.rounds if entry.drafted)
        return emitted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def mean_accepted_drafts(self) -> float:
        """Drafted tokens accepted per drafted round; 0 without such rounds."""
        return self.accepted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def draft_ms(self) -> float:
        """Time the drafter computed, in all."""
        return sum(entry.draft_ms for entry in self.rounds)

    @property
    def verify_ms(self) -> float:
        """Time of the verifier's steps, in all."""
        return sum(entry.verify_ms for entry in self.rounds)

    @property
    def queue_ms(self) -> float:
        """Time rounds waited for other sequences, in all."""
        return sum(entry.queue_ms for entry in self.rounds)

    @property
    def transport_ms(self) -> float:
        """Time of rounds that was neither computing nor queueing, in all."""
        return sum(entry.transport_ms for entry in self.rounds)

    @property
    def round_ms(self) -> float:
        """Time of all rounds."""
        return sum(entry.round_ms for entry in self.rounds)

    def summary(self) -> dict[str, object]:
        """The figures as plain JSON-ready values; times in milliseconds."""
        return {
            "rounds": len(self.rounds),
            "drafted_rounds": self.drafted_rounds,
            "drafted": self.drafted,
            "checked": self.checked,
            "accepted": self.accepted,
            "accepted_per_position": list(self.accepted_per_position),
            "mean_accepted_length": self.mean_accepted_length,
            "mean_accepted_drafts": self.mean_accepted_drafts,
            "free_run_tokens": self.free_run_tokens,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "queue_ms": self.queue_ms,
            "transport_ms": self.transport_ms,
            "round_ms": self.round_ms,
            "prefill_ms": self.prefill_ms,
            "first_token_ms": self.first_token_ms,
            "total_ms": self.total_ms,
            "batch_invariant": self.batch_invariant,
            "drafter_versions": list(self.drafter_versions),
            "fallbacks": dict(self.fallbacks),
        }
