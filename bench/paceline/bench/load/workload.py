"""What a verifier is loaded with."""

from dataclasses import dataclass

LENGTHS = (32, 96, 192, 384)
"""Prompt lengths, in turns. Unit: tokens."""

TOKENS = 128
"""New tokens of a generation."""

LOOPS = ("closed", "open")
"""So many users who ask again and again; users who come at random times."""


@dataclass(frozen=True)
class Workload:
    """What is asked for, who drafts for it, and how much of it at a time.

    Attributes:
        drafter: Name of the drafter.
        sets: Sets of prompts, in turn.
        users: Generations at a time of the closed loop.
        arrivals: Generations that begin in the open loop. Unit: per second.
    """

    drafter: str
    sets: tuple[str, ...]
    users: tuple[int, ...]
    arrivals: tuple[float, ...] = ()


@dataclass(frozen=True)
class Spell:
    """One stretch of work, and what of it is watched.

    Attributes:
        loop: One of `LOOPS`.
        size: Users of the closed loop, or arrivals per second of the open one.
        much: How long it is watched. Unit: generations of the closed loop, seconds of the open one.
        prompt: Number of the prompt to begin with.
    """

    loop: str
    size: float
    much: float
    prompt: int


_MIXED = ("heldout", "trained", "copying")

WORKLOADS = {
    "load": Workload("ngram", _MIXED, (1, 2, 4, 8, 16, 32, 64), (1.0, 2.0, 4.0)),
    "load-copying": Workload("ngram", ("copying",), (1, 4, 16)),
    "load-longspec": Workload("longspec", ("copying",), (1, 4, 16)),
}
"""By the name of the part. Prompt lookup costs least beside the target; it hardly pays but where
texts repeat themselves."""
