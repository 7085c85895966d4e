"""What a drafting method is: a loaded drafter, and the state of one generation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.drafter.kv.options import KvOptions
from paceline.drafter.tree import Tree
from paceline.v1 import sampling_pb2

if TYPE_CHECKING:
    from paceline.drafter.calibration import Calibration
    from paceline.drafter.kv.reader import KvReader, StateReader


class LoadError(Exception):
    """A drafter cannot be loaded as asked: its folder, its options or its weights are wrong."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Stable upper-case name of what was wrong."""


@dataclass(frozen=True)
class Needs:
    """What a method needs from the verifier besides tokens."""

    kv_layers: tuple[int, ...] = ()
    """Target layers whose committed K and V it reads; negative ones count from the last. Every
    generation then comes with them (:attr:`Generation.kv`), or is refused."""

    kv_options: KvOptions = field(default_factory=KvOptions)
    """How it gets them."""

    kv_budget: int = 0
    """Positions of a layer that it will ask for at most; 0: all. Unit: tokens."""

    kv_ratio: float = 0.0
    """Share of the text's positions that it will ask for where that is more than ``kv_budget``."""

    hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose outputs it reads, 0 for the first, rising. Every generation then comes
    with them (:attr:`Generation.states`), or is refused."""

    hidden_state_window: int = 0
    """Only the last so many positions of them; 0: all. Unit: tokens."""

    hidden_state_transport: str = "auto"
    """How it gets them: map, follow, or auto: map where that works."""

    def kv_budget_at(self, length: int) -> int:
        """Positions of a layer asked for while so many are committed; 0: all. Unit: tokens."""
        return self.kv_budget and max(self.kv_budget, math.ceil(self.kv_ratio * length))


@dataclass(frozen=True)
class Fit:
    """Which targets a drafter fits; an empty field fits any."""

    target_fingerprint: str = ""
    """Fingerprint of the target it was made for."""

    tokenizer_digest: str = ""
    """SHA-256 hex of the tokenizer.json its tokens mean."""

    vocab_size: int = 0
    """Token ids it knows: 0 to this - 1."""


@dataclass(frozen=True)
class Resources:
    """What a loaded drafter may use of the machine."""

    device: str = "cpu"
    """torch name of the device."""

    threads: int | None = None
    """Threads of the math library; None: as it is set."""


@dataclass(frozen=True)
class Budget:
    """How much tree one round wants."""

    nodes: int
    """Most nodes."""

    depth: int
    """Longest path. Unit: tokens."""

    deadline: float = math.inf
    """After this a tree is worthless. Unit: seconds of time.monotonic()."""


@dataclass(frozen=True)
class Generation:
    """What a drafter learns about a generation when it attaches."""

    tokens: Sequence[int]
    """Prompt and emitted tokens; the last is the anchor. At least one; each < vocab_size."""

    prompt_length: int
    """How many of them are the prompt."""

    vocab_size: int
    """Number of token ids of the target: no tree may hold others."""

    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """How the verifier will choose tokens."""

    read_grant: bytes = b""
    """Lets its holder read the committed KV of the cache."""

    verifier_address: str = ""
    """Where to read it."""

    kv: KvReader | None = None
    """The layers of :attr:`Needs.kv_layers`, mapped or followed; None if it has none. The service
    closes it, after the sequence. A sequence calls ``kv.check()`` before it uses what it read: it
    lets :class:`KvGone` pass, which ends the stream."""

    states: StateReader | None = None
    """The hidden states of :attr:`Needs.hidden_state_layers`; None if it has none. As for ``kv``:
    they may run ahead of the text, the service closes them, and the sequence calls ``check()``."""


@dataclass(frozen=True)
class Update:
    """What a drafter learns with each round."""

    tokens: Sequence[int]
    """Tokens emitted since the last update; the last is the new anchor."""

    committed_length: int = 0
    """Positions whose KV is final, as the client says. What of :attr:`Generation.kv` may be read
    says that itself. Unit: tokens."""


class DraftSequence(ABC):
    """What one drafter keeps for one generation.

    One thread at a time uses it, never two at once; it need not lock. Whoever started it closes it,
    once, after its last use; from then on it may not be touched. What :meth:`draft` returns belongs
    to the caller and stays good after that.
    """

    @abstractmethod
    def extend(self, update: Update) -> None:
        """Take note of emitted tokens. Cheap: real work waits for :meth:`warm` or :meth:`draft`."""

    @abstractmethod
    def draft(self, budget: Budget) -> Tree:
        """A tree of at most ``budget.nodes`` nodes and ``budget.depth`` levels, perhaps empty.

        Without duplicate siblings, tokens below the target's vocabulary, and empty rather than
        late. Does what is left of the backlog first.

        Raises:
            KvGone: The cache whose KV it reads is gone.
        """

    @property
    def backlog(self) -> int:
        """Tokens taken note of but not yet worked on. :meth:`draft` is only quick when few are."""
        return 0

    def warm(self, limit: int) -> None:  # noqa: B027 - only methods with a backlog need it
        """Work on at most ``limit`` tokens of the backlog."""

    def close(self) -> None:  # noqa: B027 - only methods that hold more than memory need it
        """Free everything."""


class Drafter(ABC):
    """A loaded version of a method: weights and settings that all its sequences share.

    :meth:`start` may be called from any thread. :meth:`draft_many`, and every method of its
    sequences, are called from one thread at a time. Only the registry closes a drafter, after its
    last sequence was closed.
    """

    method: ClassVar[str]
    """Name of the method."""

    inline: ClassVar[bool] = False
    """A round of it takes well under 100 µs: it may run on the event loop."""

    path_options: ClassVar[tuple[str, ...]] = ()
    """Options that name a file or folder. Like the drafter's own, it must be below a root."""

    fit: Fit = Fit()
    needs: Needs = Needs()
    max_nodes: int = 64
    """Most nodes it drafts in a round."""

    max_depth: int = 64
    """Longest path it drafts. Unit: tokens."""

    weight_bytes: int = 0

    calibration: Calibration | None = None
    """What makes its confidences right; None: they are sent as they are."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        """Load a version. May take long: never called on the event loop.

        Raises:
            LoadError: The folder or an option is wrong.
        """

    @abstractmethod
    def start(self, generation: Generation) -> DraftSequence:
        """State for one generation. Cheap: real work waits for :meth:`DraftSequence.warm`."""

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[Tree]:
        """One tree for each of several sequences of this drafter, drafted together where it pays.

        When it raises, every sequence in it must still be good for another attempt.
        """
        return [sequence.draft(budget) for sequence, budget in rounds]

    def close(self) -> None:  # noqa: B027 - only methods that hold more than memory need it
        """Free everything."""


def refuse_folder(method: str, folder: Path | None) -> None:
    """For methods without weights.

    Raises:
        LoadError: A folder was given.
    """
    if folder is not None:
        raise LoadError(
            "FOLDER_NOT_WANTED", f"{method} has no weights, got the folder {folder}; leave it out"
        )
