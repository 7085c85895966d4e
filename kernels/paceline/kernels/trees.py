"""Query blocks of an attention call.

A *query block*, or *block*, is a chain or a tree of new tokens of one sequence after a committed
prefix. Their keys and values are already in the sequence's cache: node i has slot
``start + i`` and the absolute position ``start + depth(i)``. A *plan* holds the blocks of one
forward pass and everything about them that does not depend on the layer, computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.structures import LIMITS

if TYPE_CHECKING:
    from paceline.kernels.executor import NativeTables

MAX_TREE_NODES = LIMITS["MAX_TREE_NODES"]  # maximum number of nodes that a query block may have

# Keys per attention chunk. Chunks begin at absolute multiples of this in every batch.
CHUNK = LIMITS["CHUNK"]


@dataclass(frozen=True)
class QueryBlock:
    """One query block: ``length`` new tokens of one sequence."""

    sequence: int  # index into the lists of caches given with the plan
    start: int  # committed prefix length, in tokens
    # None for a chain; otherwise `parents[i] < i` is the parent of node i inside the block, -1 for
    # a child of the last committed token.
    parents: tuple[int, ...] | None
    length: int  # number of nodes, 1 to `MAX_TREE_NODES`
    final: bool = False  # a chain of which every node will be committed if the pass succeeds

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_TREE_NODES:
            raise ValueError(
                f"a query block has {self.length} nodes, expected 1 to {MAX_TREE_NODES}; "
                "split a longer chain into several blocks"
            )
        if self.start < 0 or self.sequence < 0:
            raise ValueError(
                f"start {self.start} and sequence {self.sequence} of a query block must not be "
                "negative"
            )
        if self.parents is None:
            return
        if len(self.parents) != self.length:
            raise ValueError(
                f"a query block has {self.length} nodes but {len(self.parents)} parents; "
                "give one each"
            )
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"parents[{node}] is {parent}, expected -1 to {node - 1}: "
                    "nodes must be in topological order"
                )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for a child of the last committed token."""
        if self.parents is None:
            return tuple(range(self.length))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parents is None or all(p == i - 1 for i, p in enumerate(self.parents))

    @property
    def stop(self) -> int:
        """One past the last cache slot the block fills."""
        return self.start + self.length

    @cached_property
    def paths(self) -> tuple[int, ...]:
        """The path of each node to itself: bit n is set if it has node n."""
        if self.is_chain:
            return tuple((2 << node) - 1 for node in range(self.length))
        assert self.parents is not None
        paths: list[int] = []
        for node, parent in enumerate(self.parents):
            paths.append(1 << node | (paths[parent] if parent >= 0 else 0))
        return tuple(paths)

    def ancestors(self) -> NDArray[np.bool_]:
        """Ancestor-or-self relation, ``[length, stop - start]``: row i marks the path of node i."""
        count = self.stop - self.start
        size = (count + 7) // 8
        packed = b"".join(path.to_bytes(size, "little") for path in self.paths)
        bits = np.frombuffer(packed, np.uint8).reshape(self.length, size)
        return np.unpackbits(bits, axis=1, count=count, bitorder="little").view(np.bool_)


@dataclass(frozen=True)
class ContextBlock(QueryBlock):
    """Rows that all attend to the same keys: the keys of a prefix and of the slot after it."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Zeros: all rows are at the last slot."""
        return (0,) * self.length

    @property
    def is_chain(self) -> bool:
        """No row is the child of another one."""
        return False

    @property
    def stop(self) -> int:
        """One past the last slot."""
        return self.start + 1

    @property
    def paths(self) -> tuple[int, ...]:
        """Ones: all rows see the slot."""
        return (1,) * self.length


@dataclass(frozen=True)
class LevelBlock(QueryBlock):
    """Levels of a tree one after the other, whose parents only the device knows.

    The plan's ``ancestors`` are the paths of its nodes.
    """

    levels: tuple[int, ...] = ()  # nodes of each level

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The level of each node."""
        return tuple(depth for depth, count in enumerate(self.levels) for _ in range(count))

    @property
    def is_chain(self) -> bool:
        """Not known here."""
        return False

    @property
    def paths(self) -> tuple[int, ...]:
        """Zeros: the device adds the nodes."""
        return (0,) * self.length


class EqualBlocks(Sequence[QueryBlock]):
    """Blocks of the sequences 0, 1, ... that are equal but for their starts, as of a level of the
    trees of several texts. The blocks themselves are made where somebody asks for them."""

    def __init__(self, first: QueryBlock, starts: NDArray[np.int64]) -> None:
        """Take the block of sequence 0, and the starts of all, int64 ``[S]``."""
        self.first = first  # the block of sequence 0
        self.starts = starts  # starts of all

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> QueryBlock: ...

    @overload
    def __getitem__(self, index: slice) -> list[QueryBlock]: ...

    def __getitem__(self, index: int | slice) -> QueryBlock | list[QueryBlock]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return replace(self.first, sequence=index, start=int(self.starts[index]))


@dataclass
class TreePlan:
    """All query blocks of one forward pass, packed row after row."""

    # The blocks; rows `offsets[j] .. offsets[j + 1]` of the packed query are block j.
    blocks: Sequence[QueryBlock]
    offsets: tuple[int, ...]  # row where each block starts, one longer than `blocks`
    positions: Tensor  # absolute position of every row, int64 `[M]`, on the plan's device
    longest: int  # the largest position
    device: torch.device  # device of the queries and caches
    # Where all blocks are `LevelBlock` and equally long, the paths of all nodes to themselves, bool
    # `[S, length, length]`, on the device; else None.
    ancestors: Tensor | None = None
    # Blocks of the same rows that attend to contexts; see `paceline.kernels.Executor.run`. Made at
    # their first use.
    contexts: TreePlan | None = field(default=None, repr=False)
    # Shapes of calls that fit the plan.
    checked: set[tuple[object, ...]] = field(default_factory=set, repr=False)
    # Tables of the compiled kernels, by query heads per kv head.
    native: dict[int, NativeTables] = field(default_factory=dict, repr=False)
    # Tables of the Triton kernels; None: none so far.
    triton: Any = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        """M, the number of packed query rows."""
        return self.offsets[-1]


def send(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy a small tensor of the CPU to another device, without a wait for what a GPU runs."""
    pin = numbers.is_cpu and torch.device(device).type == "cuda"
    pinned = numbers.pin_memory() if pin else numbers
    return pinned.to(device, non_blocking=True)


def plan_trees(
    blocks: Sequence[QueryBlock],
    *,
    positions: Sequence[int] | NDArray[np.int64] | None = None,
    device: torch.device | str = "cpu",
    ancestors: Tensor | None = None,
) -> TreePlan:
    """Plan one packed forward pass, for all its layers.

    Several blocks may belong to one sequence (chunks of a prefill); their keys and values must all
    be in the cache before attention runs. ``positions`` are the absolute ones of all rows, for
    caches whose slots are not positions; ``device`` has the queries and caches, ``ancestors`` as
    in :class:`TreePlan`. Raises ``ValueError`` if there is no block, or another number of positions
    than rows.
    """
    if not blocks:
        raise ValueError("a plan needs at least one query block, got none")
    if isinstance(blocks, EqualBlocks):  # kept, since its tables are made of arrays
        offsets = list(range(0, (len(blocks) + 1) * blocks.first.length, blocks.first.length))
    else:
        blocks = tuple(blocks)
        offsets = list(accumulate((block.length for block in blocks), initial=0))
    if positions is None:
        positions = [block.start + depth for block in blocks for depth in block.depths]
    elif len(positions) != offsets[-1]:
        raise ValueError(
            f"{len(positions)} positions for {offsets[-1]} rows, expected one for each"
        )
    where, rows = torch.device(device), np.array(positions, np.int64)
    return TreePlan(
        blocks=blocks, offsets=tuple(offsets), positions=send(torch.from_numpy(rows), where),
        longest=int(rows.max()), device=where, ancestors=ancestors,
    )  # fmt: skip
