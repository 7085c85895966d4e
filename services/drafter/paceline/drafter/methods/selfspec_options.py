"""Settings of ``selfspec``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafter.kv.options import KvOptions
from paceline.drafter.methods.options import check_range
from paceline.kernels import MAX_TREE_NODES, SINKS


@dataclass(frozen=True)
class SelfSpecOptions(KvOptions):
    """Settings of ``selfspec``."""

    context: int = 512
    """KV budget: positions of the target's KV that a round reads at most, of each layer; 0: all."""

    ratio: float = 0.0
    """KV budget as a share of the text where that is more than ``context``. SpecAttn takes 0.07."""

    widths: tuple[int, ...] = (1,)
    """Nodes drafted at each level; the last number holds for deeper levels."""

    depth: int = 5
    """Longest path. Unit: tokens."""

    min_survival: float = 0.05
    """Nodes less likely than this to be accepted get no children."""

    candidates: int = 256
    """At temperatures above 0 the shared noise is added to so many likeliest tokens."""

    dtype: str = "auto"
    """Type of the weights: auto (as the folder says), float32 or bfloat16."""

    weights: str = "auto"
    """Whose: shared (those that a verifier on this machine keeps with --share-weights, which is
    waited for), own, or auto: shared if they are there at once, else own."""

    @property
    def drafted(self) -> int:
        """Nodes drafted in a round."""
        more = self.widths[-1] * max(0, self.depth - len(self.widths))
        return sum(self.widths[: self.depth]) + more

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.widths:
            check_range("widths", width, 1, 64)
        check_range("depth", self.depth, 1, 64)
        check_range("context", self.context, 0, 1 << 20)
        check_range("ratio", self.ratio, 0.0, 1.0)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("candidates", self.candidates, 1, 1 << 20)
        if self.drafted > MAX_TREE_NODES - 1:
            raise ValueError(
                f"widths {self.widths} at depth {self.depth} draft {self.drafted} nodes, expected "
                f"at most {MAX_TREE_NODES - 1}"
            )
        if 0 < self.context <= SINKS:
            raise ValueError(
                f"option context={self.context}: expected more than {SINKS}, or 0 for all"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"option dtype={self.dtype!r}: expected auto, float32 or bfloat16")
        if self.weights not in ("auto", "shared", "own"):
            raise ValueError(f"option weights={self.weights!r}: expected auto, shared or own")
