"""Settings of ``longspec``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.drafter.kv.options import KvOptions
from paceline.drafter.methods.options import check_range
from paceline.kernels import MAX_TREE_NODES, SINKS

GPU_WIDTHS = (4, 16, 16, 16, 16)
"""The paper's (LongSpec, appendix D)."""

CPU_WIDTHS, CPU_NODES = (8, 8), 10
"""Most tokens a millisecond of draft and target with the demo pair, see docs/longspec.md. A target
whose step outweighs the draft's levels by more wants a deeper tree, such as 4,8,8,8 with 16."""


@dataclass(frozen=True)
class LongSpecOptions(KvOptions):
    """Settings of ``longspec``."""

    target: str = ""
    """Folder of the target, for its embedding and LM head; empty: the drafter's folder has them."""

    widths: tuple[int, ...] = ()
    """Nodes drafted at each level; empty: 8,8 on a CPU and 4,16,16,16,16 elsewhere."""

    depth: int = 0
    """Longest path; 0: as many levels as there are widths. Unit: tokens."""

    max_nodes: int = 0
    """Most nodes of a tree: the likeliest of those drafted; 0: 10 on a CPU where no
    widths are given, else all."""

    context: int = 512
    """Target positions that a round reads at most: the first 4 and the newest; 0: all of them.
    What it reads bounds what it costs, so that a draft takes as long at 1k as at 128k."""

    min_survival: float = 0.01
    """Nodes less likely than this to be accepted get no children."""

    candidates: int = 256
    """At temperatures above 0 the shared noise is added to so many likeliest tokens."""

    dtype: str = "auto"
    """Type of weights and ring: auto (as the folder says), float32 or bfloat16."""

    pack_head_mib: float = 16.0
    """An LM head up to this size is repacked: faster, but private to the process. Unit: MiB."""

    @property
    def levels(self) -> int:
        """Longest path. Unit: tokens."""
        return self.depth or len(self.widths)

    @property
    def drafted(self) -> int:
        """Nodes drafted in a round, before the likeliest are taken."""
        more = self.widths[-1] * max(0, self.levels - len(self.widths)) if self.widths else 0
        return sum(self.widths[: self.levels]) + more

    def for_device(self, device: str) -> LongSpecOptions:
        """With what was left open filled in for a device, by its torch name."""
        cpu = device.startswith("cpu")
        filled = replace(self, widths=self.widths or (CPU_WIDTHS if cpu else GPU_WIDTHS))
        most = CPU_NODES if cpu and not self.widths else filled.drafted
        return replace(filled, max_nodes=self.max_nodes or most)

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.widths:
            check_range("widths", width, 1, 64)
        check_range("depth", self.depth, 0, 64)
        check_range("max_nodes", self.max_nodes, 0, MAX_TREE_NODES - 1)
        check_range("context", self.context, 0, 1 << 30)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("candidates", self.candidates, 1, 1 << 20)
        check_range("pack_head_mib", self.pack_head_mib, 0.0, 1 << 20)
        if self.drafted > MAX_TREE_NODES - 1:
            raise ValueError(
                f"widths {self.widths} at depth {self.levels} draft {self.drafted} nodes, expected "
                f"at most {MAX_TREE_NODES - 1}"
            )
        if 0 < self.context <= SINKS:
            raise ValueError(
                f"option context={self.context}: expected more than {SINKS}, because the first "
                f"{SINKS} positions are always read, or 0 for all"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"option dtype={self.dtype!r}: expected auto, float32 or bfloat16")
