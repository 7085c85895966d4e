"""Settings of ``lm``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafter.methods.lm_budget import POLICIES
from paceline.drafter.methods.options import check_range
from paceline.kernels import MAX_TREE_NODES, SINKS


@dataclass(frozen=True)
class LmOptions:
    """Settings of ``lm``."""

    widths: tuple[int, ...] = (4, 4, 4, 4)
    """Nodes drafted at each level; the last number holds for deeper levels."""

    depth: int = 0
    """Longest path; 0: as many levels as there are widths. Unit: tokens."""

    max_nodes: int = 16
    """Most nodes of a tree: the likeliest of those drafted."""

    min_survival: float = 0.03
    """Nodes less likely than this to be accepted get no children."""

    candidates: int = 256
    """At temperatures above 0 the shared noise is added to so many likeliest tokens."""

    context: int = 0
    """KV budget: positions of the text that a round looks at most; 0: all. What is new since the
    last round and the tree come on top."""

    kv_policy: str = "streaming"
    """Which ones: streaming (the first and the newest) or chunk_topk (the newest, and chunks of 8
    by the attention they got so far)."""

    dtype: str = "auto"
    """Type of weights and KV: auto (as the folder says), float32 or bfloat16."""

    kv_gib: float = 4.0
    """Most memory for the KV of all sequences; one that finds no room drafts no more. Unit: GiB."""

    @property
    def levels(self) -> int:
        """Longest path. Unit: tokens."""
        return self.depth or len(self.widths)

    @property
    def drafted(self) -> int:
        """Nodes drafted in a round, before the likeliest are taken."""
        more = self.widths[-1] * max(0, self.levels - len(self.widths))
        return sum(self.widths[: self.levels]) + more

    def __post_init__(self) -> None:
        for width in self.widths:
            check_range("widths", width, 1, 64)
        check_range("depth", self.depth, 0, 64)
        check_range("max_nodes", self.max_nodes, 1, MAX_TREE_NODES - 1)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("candidates", self.candidates, 1, 1 << 20)
        check_range("kv_gib", self.kv_gib, 0.001, 1 << 20)
        check_range("context", self.context, 0, 1 << 30)
        if 0 < self.context <= SINKS:
            raise ValueError(
                f"option context={self.context}: expected more than {SINKS}, or 0 for all"
            )
        if self.kv_policy not in POLICIES:
            raise ValueError(
                f"option kv_policy={self.kv_policy!r}: expected one of {', '.join(POLICIES)}"
            )
        if self.drafted > MAX_TREE_NODES:
            raise ValueError(
                f"widths {self.widths} at depth {self.levels} draft {self.drafted} nodes, expected "
                f"at most {MAX_TREE_NODES}"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"option dtype={self.dtype!r}: expected auto, float32 or bfloat16")
