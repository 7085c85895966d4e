"""A generation at a drafter: what it is told of the text, what it drafts, and how well."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.sampling import Sampling
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from paceline.drafter.kv.reader import KvReader, StateReader


@dataclass(frozen=True)
class Budget:
    """Limits of the tree of one round."""

    nodes: int  # maximum number of nodes
    depth: int  # maximum depth, in tokens
    deadline: float = math.inf  # Latest time of use. Unit: seconds of time.monotonic().


@dataclass(frozen=True)
class GenerationInfo:
    """A generation, as the service describes it to a drafter."""

    tokens: Sequence[int]
    """Prompt and emitted tokens; the last is the anchor. At least one; each < vocab_size."""

    prompt_length: int  # number of prompt tokens among them
    vocab_size: int  # Number of token ids of the target. A tree contains no others.
    sampling: Sampling = field(default_factory=Sampling)  # the verifier's
    owner: str = ""
    """Whose text it is: a drafter may use it for later texts of the same owner, never for others'.
    Empty: for no other text."""

    read_grant: bytes = b""  # capability to read the committed KV of the cache
    verifier_address: str = ""  # address of the verifier that serves it
    kv: KvReader | None = None
    """The target layers whose KV the method needs, mapped or followed; None if it has none. The
    service closes it, after the sequence. A sequence calls ``kv.settle()`` before it uses what it
    read, or ``kv.check()`` where a GPU has read it by then: it lets :class:`KvGone` pass, and the
    service refuses the sequence."""

    states: StateReader | None = None
    """The hidden states that the method needs; None if it has none. As for ``kv``: they may run
    ahead of the text, the service closes them, and the sequence checks them."""


@dataclass(frozen=True)
class Update:
    """Tokens since the last round."""

    tokens: Sequence[int]  # emitted since the last update; the last is the new anchor
    committed_length: int = 0
    """Positions whose KV is final, as the verifier reports it. :attr:`GenerationInfo.kv` has its
    own committed length. Unit: tokens."""


class DraftSequence(ABC):
    """The state of one generation at one drafter.

    One thread at a time uses it, so it needs no lock. The caller that started it closes it once,
    after its last use. A tree that :meth:`draft` returned stays valid after that.
    """

    @abstractmethod
    def extend(self, update: Update) -> None:
        """Add emitted tokens. Cheap: :meth:`warm` and :meth:`draft` process them."""

    @abstractmethod
    def draft(self, budget: Budget) -> TokenTree:
        """Draft a tree, after it has processed the backlog: at most ``budget.nodes`` nodes and
        ``budget.depth`` levels, possibly none, without duplicate siblings, of tokens below the
        target's vocabulary size. Raises ``KvGone`` if the cache whose KV it reads is gone."""

    @property
    def backlog(self) -> int:
        """Tokens that were added but not processed. :meth:`draft` is fast only if there are few."""
        return 0

    def warm(self, limit: int) -> None:  # noqa: B027 - only methods with a backlog need it
        """Process at most ``limit`` tokens of the backlog."""

    def close(self) -> None:  # noqa: B027 - only methods that hold more than memory need it
        """Release memory and connections."""


@dataclass
class DraftStatistics:
    """Totals over the rounds of one or more generations."""

    rounds: int = 0  # trees drafted whose continuation is known
    accepted: int = 0  # accepted draft tokens
    draft_seconds: float = 0.0

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens emitted per round, the bonus token included; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def draft_us(self) -> int:
        """Mean draft time of a round. Unit: microseconds."""
        return round(self.draft_seconds / self.rounds * 1e6) if self.rounds else 0

    def add(self, accepted: int, draft_seconds: float) -> None:
        self.rounds += 1
        self.accepted += accepted
        self.draft_seconds += draft_seconds
