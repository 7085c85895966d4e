"""Options that several methods have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.checks import check_range
from paceline.drafter.methods.base import check_choice
from paceline.formats import FLOATS
from paceline.kernels import MAX_TREE_NODES, SINKS


@dataclass(frozen=True)
class TreeOptions:
    """Options of every method whose trees grow by the passes of a model."""

    # Nodes drafted at each level; the last number applies to all deeper levels.
    widths: tuple[int, ...] = ()
    depth: int = 0  # maximum path; 0: as many levels as ``widths`` has numbers, in tokens
    # Maximum number of nodes of a tree: the likeliest of those drafted; 0: all of them.
    max_nodes: int = 0
    min_survival: float = 0.01  # nodes less likely than this to be accepted are not expanded
    candidates: int = 256  # likeliest tokens that rejection sampling draws from

    # Format of the weights: auto (as stored), float32 or bfloat16, also the type of the KV; for
    # methods whose weights are their own or the target's also int8 or int4.
    weights: str = "auto"
    formats: ClassVar[tuple[str, ...]] = ("auto", *FLOATS)  # known values of ``weights``

    @property
    def levels(self) -> int:
        """Maximum depth. Unit: tokens."""
        return self.depth or len(self.widths)

    @property
    def drafted(self) -> int:
        """Nodes drafted in a round, before the likeliest are selected."""
        more = self.widths[-1] * max(0, self.levels - len(self.widths)) if self.widths else 0
        return sum(self.widths[: self.levels]) + more

    def __post_init__(self) -> None:
        for width in self.widths:
            check_range("widths", width, 1, 64)
        check_range("depth", self.depth, 0, 64)
        check_range("max_nodes", self.max_nodes, 0, MAX_TREE_NODES - 1)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("candidates", self.candidates, 1, 1 << 20)
        check_choice("weights", self.weights, self.formats)

    def check_drafted(self) -> None:
        """Raises ``ValueError`` if a round drafts more nodes than one forward pass takes."""
        if self.drafted > MAX_TREE_NODES - 1:
            raise ValueError(
                f"widths {self.widths} at depth {self.levels} draft {self.drafted} nodes, expected "
                f"at most {MAX_TREE_NODES - 1}"
            )


def check_context(context: int) -> None:
    """Raises ``ValueError`` unless a KV budget is 0 (all positions) or above the sinks."""
    check_range("context", context, 0, 1 << 30)
    if 0 < context <= SINKS:
        raise ValueError(
            f"option context={context}: expected more than {SINKS}, because the first {SINKS} "
            "positions are always read, or 0 for all"
        )
