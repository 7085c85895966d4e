"""Confidences that mean what they say: sequential temperature scaling of a drafter's own.

After Cheng et al., DSpark, section 3.2.1: each depth has a temperature, found from left to right,
so that the product of confidences along a path is how often such paths stand. Here each depth has a
shift besides, since a temperature alone keeps a half a half. Neither changes the order of nodes of
one depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.tree import TokenTree

FILE = "calibration.json"
"""In a drafter's folder it is read with the drafter."""

FORMAT = 1
_LEAST = 1e-6  # a confidence this far from 0 and 1 is as good as there


@dataclass(frozen=True)
class Scaling:
    """What is done to confidences of one depth: sigmoid(logit(c) / temperature + shift)."""

    temperature: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.temperature < math.inf and math.isfinite(self.shift)):
            raise ValueError(
                f"temperature {self.temperature} and shift {self.shift}: expected finite numbers, "
                "the first above 0"
            )

    def __call__(self, confidence: float) -> float:
        """A confidence made right, in (0, 1)."""
        sure = min(max(confidence, _LEAST), 1 - _LEAST)
        return 1 / (1 + math.exp(-(math.log(sure / (1 - sure)) / self.temperature + self.shift)))


@dataclass(frozen=True)
class Calibration:
    """Scalings by depth, one list for greedy texts and one for sampled ones.

    The last scaling holds for all deeper nodes; an empty list leaves confidences as they are.

    Attributes:
        method: The drafter's.
        greedy: For temperature 0.
        sampled: For temperatures above 0.
    """

    method: str
    greedy: tuple[Scaling, ...] = ()
    sampled: tuple[Scaling, ...] = ()

    def apply(self, tree: TokenTree, *, sampled: bool) -> TokenTree:
        """A tree with its confidences made right; one without stays as it is."""
        scalings = self.sampled if sampled else self.greedy
        if not scalings or not tree.confidences:
            return tree
        deepest = len(scalings) - 1
        confidences = tuple(
            scalings[min(depth - 1, deepest)](confidence)
            for depth, confidence in zip(tree.depths, tree.confidences, strict=True)
        )
        return TokenTree(tree.tokens, tree.parents, confidences, tree.proposals)

    def write(self, path: Path, notes: Mapping[str, Any]) -> None:
        """Save as JSON; ``notes`` say how it came about."""
        told = {
            "format": FORMAT,
            "method": self.method,
            "greedy": [asdict(scaling) for scaling in self.greedy],
            "sampled": [asdict(scaling) for scaling in self.sampled],
            "notes": dict(notes),
        }
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: Path, method: str) -> Calibration:
    """A calibration as :meth:`Calibration.write` saved it.

    Raises:
        LoadError: The file cannot be read, is none, or was made for another method.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}, expected {FORMAT}")
        found = Calibration(told["method"], _scalings(told["greedy"]), _scalings(told["sampled"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LoadError(
            "UNREADABLE_CALIBRATION",
            f"cannot read the calibration {path}: {type(error).__name__}: {error}; make one with "
            "paceline calibrate",
        ) from error
    if found.method != method:
        raise LoadError(
            "OTHER_CALIBRATION", f"{path} is for the method {found.method!r}, this is {method!r}"
        )
    return found


def _scalings(told: Sequence[Mapping[str, float]]) -> tuple[Scaling, ...]:
    return tuple(Scaling(float(each["temperature"]), float(each["shift"])) for each in told)
