"""Calibrated confidences: sequential temperature scaling of a drafter's own confidences.

After Cheng et al., DSpark, section 3.2.1: each depth has a temperature, fitted from the first depth
on, so that the product of confidences along a path is the probability that the path is accepted.
Each depth also has a shift, since a temperature alone leaves a confidence of 0.5 as it is. Neither
changes the order of nodes of one depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.tree import TokenTree

FILE = "calibration.json"
"""Name of the file in a drafter's folder."""

FORMAT = 1
_CLIP = 1e-6  # confidences are clipped to [this, 1 - this]


@dataclass(frozen=True)
class Scaling:
    """Calibration of one depth: sigmoid(logit(c) / temperature + shift)."""

    temperature: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.temperature < math.inf and math.isfinite(self.shift)):
            raise ValueError(
                f"temperature {self.temperature} and shift {self.shift}: expected finite numbers, "
                "the first above 0"
            )

    def __call__(self, confidence: float) -> float:
        """The calibrated confidence, in (0, 1)."""
        clipped = min(max(confidence, _CLIP), 1 - _CLIP)
        logit = math.log(clipped / (1 - clipped))
        return 1 / (1 + math.exp(-(logit / self.temperature + self.shift)))


@dataclass(frozen=True)
class Calibration:
    """Scalings by depth, the first for depth 1.

    The last scaling also applies to deeper nodes. Without scalings, confidences stay unchanged.

    Attributes:
        method: The drafter's method.
        greedy: For temperature 0.
        sampled: For temperatures above 0.
    """

    method: str
    greedy: tuple[Scaling, ...] = ()
    sampled: tuple[Scaling, ...] = ()

    def apply(self, tree: TokenTree, *, sampled: bool) -> TokenTree:
        """The tree with calibrated confidences; a tree without confidences is unchanged."""
        scalings = self.sampled if sampled else self.greedy
        if not scalings or not tree.confidences:
            return tree
        confidences = tuple(
            scalings[min(depth, len(scalings)) - 1](confidence)
            for depth, confidence in zip(tree.depths, tree.confidences, strict=True)
        )
        return replace(tree, confidences=confidences)

    @classmethod
    def read(cls, path: Path, method: str) -> Calibration:
        """Read what :meth:`write` saved, for a drafter of a method.

        Raises:
            LoadError: The file cannot be read, is malformed, or is for another method.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']}, expected {FORMAT}")
            greedy, sampled = (
                tuple(Scaling(float(s["temperature"]), float(s["shift"])) for s in value[name])
                for name in ("greedy", "sampled")
            )
            found = cls(value["method"], greedy, sampled)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise LoadError(
                "UNREADABLE_CALIBRATION",
                f"cannot read the calibration {path} ({type(error).__name__}: {error}); create one "
                "with paceline calibrate",
            ) from error
        if found.method != method:
            raise LoadError(
                "OTHER_CALIBRATION",
                f"{path} is for the method {found.method!r}, the drafter's is {method!r}; "
                "calibrate this drafter",
            )
        return found

    def write(self, path: Path, notes: Mapping[str, Any]) -> None:
        """Save as JSON, with ``notes`` on how it was fitted."""
        value = {"format": FORMAT, **asdict(self), "notes": dict(notes)}
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
