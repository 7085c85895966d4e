"""Settings of ``dspark``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafter.kv.options import TRANSPORTS
from paceline.drafter.methods.options import check_range
from paceline.kernels import MAX_TREE_NODES


@dataclass(frozen=True)
class DSparkOptions:
    """Settings of ``dspark``."""

    target: str = ""
    """Folder of the target, for its embedding and LM head; empty: the drafter's folder has them."""

    widths: tuple[int, ...] = (4, 8)
    """Nodes drafted at each level, the last number for all deeper ones. 1: the block as a chain."""

    depth: int = 0
    """Longest path; 0: as long as the drafter's block. Unit: tokens."""

    max_nodes: int = 16
    """Most nodes of a tree: the likeliest of those drafted."""

    min_survival: float = 0.01
    """Nodes less likely than this to be accepted get no children."""

    states: str = "auto"
    """How hidden states come: map (shared memory), follow (copies over gRPC), or auto: map where
    drafter and verifier share a machine and a user, else follow."""

    candidates: int = 256
    """At temperatures above 0 the shared noise is added to so many likeliest tokens."""

    dtype: str = "auto"
    """Type of weights and context: auto (as the folder says), float32 or bfloat16."""

    pack_head_mib: float = 16.0
    """An LM head up to this size is repacked: faster, but private to the process. Unit: MiB."""

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("option widths is empty, expected at least one number")
        for width in self.widths:
            check_range("widths", width, 1, 64)
        check_range("depth", self.depth, 0, 64)
        check_range("max_nodes", self.max_nodes, 1, MAX_TREE_NODES - 1)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("candidates", self.candidates, 1, 1 << 20)
        check_range("pack_head_mib", self.pack_head_mib, 0.0, 1 << 20)
        if self.states not in TRANSPORTS:
            raise ValueError(
                f"option states={self.states!r}: expected one of {', '.join(TRANSPORTS)}"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"option dtype={self.dtype!r}: expected auto, float32 or bfloat16")
