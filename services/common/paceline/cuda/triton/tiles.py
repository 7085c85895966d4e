"""What an attention call of a GPU is split into: row tiles, chunks of keys, and paths of trees.

A row has the same bits alone, beside others, in a chain and in a tree, because what is computed
for it depends on its own path alone:

- A tile has a fixed number of rows, whatever the number of rows of the call, so that all calls use
  the same instructions. What other rows of a tile attend to does not reach a row.
- Chunks of keys begin at fixed positions (:func:`chunk_begin`), tiles of keys at fixed places in a
  chunk, and chunks are merged in their order, in groups that begin at fixed chunks. What a row does
  not see is masked: a masked tile and an empty chunk change no bit.
- A node sees its ancestors at the positions that they would have as committed tokens. Its *tail*,
  the chunks from the one in which its tree begins, is computed by a tile of rows of one path from
  the root to a leaf, which finds the slots of its columns in a list. Whole chunks before are the
  same for all rows of a tree, which share dense tiles there.

Rows of a tree are ordered depth first, so that each path owns neighbouring rows: those since the
leaf before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.cuda.triton.jit.attention import CHUNK_BITS, TILE_FIELDS
from paceline.kernels.caches import MAX_GPU_WIDTH
from paceline.kernels.trees import MAX_TREE_NODES, ContextBlock, EqualBlocks, LevelBlock, QueryBlock

# Where chunks of a length begin, and their length. Unit: keys. Longer chunks farther on keep the
# partial results few; a border depends on nothing but its position.
NEAR, MIDDLE, FAR = (0, 256), (4096, 512), (12288, 1024)
_MIDDLE_CHUNK = (MIDDLE[0] - NEAR[0]) // NEAR[1]
_FAR_CHUNK = _MIDDLE_CHUNK + (FAR[0] - MIDDLE[0]) // MIDDLE[1]
MAX_ITEMS = 16384  # work items of a CUDA graph at most

# Partial results of a launch at most; calls that need more are launched in several parts.
PART_BYTES = 256 << 20
Ints = NDArray[np.int32]


def chunk_begin(chunk: int) -> int:
    """Return the first position of a chunk of keys."""
    if chunk < _MIDDLE_CHUNK:
        return NEAR[0] + chunk * NEAR[1]
    if chunk < _FAR_CHUNK:
        return MIDDLE[0] + (chunk - _MIDDLE_CHUNK) * MIDDLE[1]
    return FAR[0] + (chunk - _FAR_CHUNK) * FAR[1]


def chunk_of(position: int) -> int:
    """Return the chunk that a position lies in."""
    if position < MIDDLE[0]:
        return position // NEAR[1]
    if position < FAR[0]:
        return _MIDDLE_CHUNK + (position - MIDDLE[0]) // MIDDLE[1]
    return _FAR_CHUNK + (position - FAR[0]) // FAR[1]


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a kind of layer, which its kernels are compiled for."""

    group: int  # query heads per kv head. Rows of a tile go node by node, its group side by side.
    rows: int  # rows of a tile, a power of two
    keys: int  # keys of a tile, a power of two
    window: int  # sliding window in tokens; 0: none

    @classmethod
    def of(cls, group: int, keys: Tensor, window: int | None) -> Tiling:
        """Return the tiling for keys ``[..., kv heads, slots, D]`` and ``group`` query heads per kv
        head: one for all numbers of rows, by type, width and kind of GPU. Raises ``ValueError``:
        heads are wider than ``MAX_GPU_WIDTH``."""
        if keys.shape[-1] > MAX_GPU_WIDTH:
            raise ValueError(
                f"heads have {keys.shape[-1]} elements, expected at most {MAX_GPU_WIDTH} on a GPU: "
                "tiles of wider ones do not fit the shared memory of GPUs; use --device cpu"
            )
        if keys.dtype == torch.float32:  # multiplied from registers, without tensor cores
            return cls(group, 16, 16, window or 0)
        if keys.shape[-1] <= 128:
            return cls(group, 64, 64, window or 0)
        return cls(group, 64, 16 if little_shared_memory(keys.device) else 32, window or 0)

    @property
    def used(self) -> int:
        """Rows of a tile that are used: whole groups, where one fits."""
        return self.rows // self.group * self.group or self.rows

    def tiles(self, nodes: int) -> int:
        """Return the number of row tiles of ``nodes`` nodes side by side."""
        return -(-nodes * self.group // self.used)


class Work(NamedTuple):
    """The work of one kind of layer."""

    spans: Ints  # int32 `[L, 4]`: first work item, end, first tile, end of each launch
    items: Ints  # int32 `[W]`: `tile << CHUNK_BITS | chunk`
    # int32 `[T, TILE_FIELDS]`: 0 block, 1 first row inside the block (places times group), 2 rows,
    # 3 first partial result, 4 first chunk, 5 number of chunks, 6 first tile of keys that any row
    # sees, 7 first one that all rows see through a window, 8 end of tiles that all rows see as a
    # whole, 9 end of the columns, 10 where the list of slots begins in `steps` (-1: columns are
    # slots).
    tiles: Ints
    # int32 `[M, 4]` by packed row: 0 the node at this place of the block, 1 the place of this node,
    # 2 the first tile for the chunks before its tail, 3 the first one for its tail.
    places: Ints
    steps: NDArray[np.uint8]  # uint8 `[n]`: lists of nodes, from the root on
    part_rows: int  # partial results of the largest launch

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All but the last."""
        return self.spans, self.items, self.tiles, self.places, self.steps


class Room(NamedTuple):
    """What the tables of a CUDA graph have room for; see :class:`Work`."""

    items: int
    tiles: int
    steps: int
    part_rows: int

    @classmethod
    def for_rows(
        cls, rows: int, blocks: int, tiling: Tiling, max_position: int, part_row_bytes: int
    ) -> Room:
        """Return room for any batch of at most ``rows`` rows and ``blocks`` blocks with positions
        up to ``max_position``, up to ``MAX_ITEMS`` work items and ``PART_BYTES`` of partial
        results, each of all kv heads and ``part_row_bytes``."""
        chunks = chunk_of(max_position) + 1
        slices = -(-tiling.group // tiling.used)
        dense = min(rows * slices, blocks + rows * tiling.group // tiling.used)
        tails = rows * slices  # each has a node at least
        items = min(dense * chunks + tails * (2 + MAX_TREE_NODES // NEAR[1]), MAX_ITEMS)
        widest = min(rows, MAX_TREE_NODES)
        # A tree of n nodes has at most n + 1 leaves and levels, and so lists of their product.
        steps = -(-rows // MAX_TREE_NODES) * ((widest + 1) // 2) * ((widest + 2) // 2)
        parts = min(rows * tiling.group * chunks, PART_BYTES // part_row_bytes)
        return cls(items, dense + tails, steps, parts)

    def holds(self, work: Work) -> bool:
        """Return whether some work fits."""
        return (
            len(work.spans) == 1
            and len(work.items) <= self.items
            and len(work.tiles) <= self.tiles
            and len(work.steps) <= self.steps
            and work.part_rows <= self.part_rows
        )


class _Paths(NamedTuple):
    """A tree depth first."""

    order: list[int]  # node at each place
    # For each path, its first own place, the end of these, and where its list of slots begins (-1:
    # its nodes are the first ones).
    leaves: list[tuple[int, int, int]]


def _depth_first(block: QueryBlock, steps: bytearray) -> _Paths:
    """Order the nodes of a tree; lists of the slots of its paths are appended to ``steps``."""
    assert block.parents is not None
    children: list[list[int]] = [[] for _ in range(block.length + 1)]  # the last one's: roots
    for node, parent in enumerate(block.parents):
        children[parent].append(node)
    order: list[int] = []
    leaves: list[tuple[int, int, int]] = []
    path, first = bytearray(block.length), 0
    waiting = children[-1][::-1]
    while waiting:
        node = waiting.pop()
        depth = block.depths[node]
        path[depth] = node
        order.append(node)
        if children[node]:
            waiting += reversed(children[node])
            continue
        leaves.append((first, len(order), -1 if node == depth else len(steps)))
        if node != depth:
            steps += path[: depth + 1]
        first = len(order)
    return _Paths(order, leaves)


class _Tiles:
    """Collects the row tiles of a plan."""

    def __init__(self, tiling: Tiling, part_rows: int) -> None:
        self._tiling, self._limit = tiling, part_rows
        self.rows: list[tuple[int, ...]] = []
        self.steps = bytearray()
        self.cuts = [0]  # tiles at which a launch begins
        self.part_rows = self._largest = 0

    @property
    def largest(self) -> int:
        """Partial results of the largest launch."""
        return max(self._largest, self.part_rows)

    def add(
        self,
        block: int,
        first: int,
        rows: int,
        positions: tuple[int, int],
        ends: tuple[int, int],
        chunks: tuple[int, int],
        tail: int | None = None,
    ) -> None:
        """Add a tile of ``rows`` rows from packed row ``first`` of the block on.

        ``positions`` are the lowest and highest of the rows; ``ends`` the ends of the columns that
        all rows see, and that any does; ``chunks`` the first chunk and the end, of which a tail
        keeps the first, else one that no row sees through a window is left out. ``tail``: where the
        list of a tail's slots begins.
        """
        keys, window = self._tiling.keys, self._tiling.window
        oldest, seen = (max(0, position - window + 1) if window else 0 for position in positions)
        begin, steps = (
            (chunks[0], tail) if tail is not None else (min(chunk_of(oldest), chunks[1]), -1)
        )
        self.rows.append((
            block, first, rows, self.part_rows, begin, chunks[1] - begin, oldest // keys * keys,
            -(-seen // keys) * keys, ends[0] // keys * keys, ends[1], steps, 0,
        ))  # fmt: skip
        self.part_rows += rows * (chunks[1] - begin)

    def cut(self, rows: int) -> None:
        """Begin another launch if so many more partial results are too many."""
        if self.part_rows and self.part_rows + rows > self._limit:
            self.cuts.append(len(self.rows))
            self._largest, self.part_rows = self.largest, 0


def plan_work(blocks: Sequence[QueryBlock], tiling: Tiling, part_row_bytes: int) -> Work:
    """Split the blocks of a plan; arguments as of :meth:`Room.for_rows`."""
    limit = PART_BYTES // part_row_bytes
    return _equal_work(blocks, tiling, limit) or _any_work(blocks, tiling, limit)


def _any_work(blocks: Sequence[QueryBlock], tiling: Tiling, limit: int) -> Work:
    """Return the work of any blocks; a launch has at most ``limit`` partial results."""
    tiles = _Tiles(tiling, limit)
    places: list[tuple[int, int, int, int]] = []
    for index, block in enumerate(blocks):
        if block.is_chain or isinstance(block, (LevelBlock, ContextBlock)):
            base = _add_dense(tiles, index, block, tiling)
            places += [(node, node, base, base) for node in range(block.length)]
        else:
            places += _add_tree(tiles, index, block, tiling)
    rows = np.array(tiles.rows, np.int32)
    steps = np.frombuffer(tiles.steps, np.uint8)
    return _with_items(rows, np.array(places, np.int32), steps, tiles.cuts, tiles.largest)


def _equal_work(blocks: Sequence[QueryBlock], tiling: Tiling, limit: int) -> Work | None:
    """Return the work of the blocks of a draft's level, with arrays. None: they are others, or need
    several launches."""
    if not isinstance(blocks, EqualBlocks):
        return None
    first, starts = blocks.first, blocks.starts
    highest = starts + first.depths[-1]
    tree = isinstance(first, LevelBlock)
    ends = (starts, starts + first.length) if tree else (starts + 1, highest + 1)
    end = _chunks_of(ends[1] - 1) + 1
    begin, keys = np.zeros_like(starts), tiling.keys
    if tiling.window:
        oldest, seen = ((at - tiling.window + 1).clip(0) for at in (starts, highest))
        begin = np.minimum(_chunks_of(oldest), end)
    work = _equal_layout(tiling, first.length, tuple(begin.tolist()), tuple(end.tolist()), limit)
    if work is None:
        return None
    tiles = work.tiles.copy()
    table = tiles.reshape(len(starts), -1, TILE_FIELDS.value)
    if tiling.window:
        table[..., 6] = (oldest // keys * keys)[:, None]
        table[..., 7] = (-(-seen // keys) * keys)[:, None]
    table[..., 8], table[..., 9] = (ends[0] // keys * keys)[:, None], ends[1][:, None]
    return work._replace(tiles=tiles)


@lru_cache(256)
def _equal_layout(
    tiling: Tiling, length: int, begins: tuple[int, ...], stops: tuple[int, ...], limit: int
) -> Work | None:
    """Work of blocks of ``length`` rows by their chunks, where tiles lack the ends of their
    columns. Texts need a new layout only where one of them grows into another chunk."""
    begin, end = np.array(begins), np.array(stops)
    parts = _slices(tiling, 0, length)
    sizes = np.array([rows for _, rows in parts])
    counts = sizes * (end - begin)[:, None]
    before = counts.cumsum().reshape(counts.shape) - counts
    if (before + sizes * end[:, None]).max() > limit:
        return None
    numbers = np.arange(len(begin))
    table = np.zeros((len(begin), len(parts), TILE_FIELDS.value), np.int32)
    table[..., 0], table[..., 1], table[..., 2] = numbers[:, None], [n for n, _ in parts], sizes
    table[..., 3], table[..., 4], table[..., 5] = before, begin[:, None], (end - begin)[:, None]
    table[..., 10] = -1
    places = np.empty((len(begin), length, 4), np.int32)
    places[..., :2] = np.arange(length)[:, None]
    places[..., 2:] = (numbers * len(parts))[:, None, None]
    rows = table.reshape(-1, TILE_FIELDS.value)
    return _with_items(rows, places.reshape(-1, 4), np.empty(0, np.uint8), [0], int(counts.sum()))


def _chunks_of(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """:func:`chunk_of` for many positions."""
    near = np.minimum(positions, MIDDLE[0]) // NEAR[1]
    if positions.max() < MIDDLE[0]:
        return near
    middle = (np.minimum(positions, FAR[0]) - MIDDLE[0]).clip(0) // MIDDLE[1]
    chunks: NDArray[np.int64] = near + middle + (positions - FAR[0]).clip(0) // FAR[1]
    return chunks


def _with_items(
    rows: Ints, places: Ints, steps: NDArray[np.uint8], cuts: Sequence[int], part_rows: int
) -> Work:
    """Work of some tiles, which are cut into launches; arguments as in :class:`Work`."""
    counts = rows[:, 5]
    ends = counts.cumsum()
    numbers = np.arange(len(rows)).repeat(counts)
    chunks = np.arange(ends[-1]) - (ends - counts - rows[:, 4])[numbers]
    cuts = [*cuts, len(rows)]
    begins = [0, *ends[np.array(cuts[1:]) - 1].tolist()]
    spans = np.array([begins[:-1], begins[1:], cuts[:-1], cuts[1:]], np.int32).T
    items = (numbers << CHUNK_BITS.value | chunks).astype(np.int32)
    if len(rows) > 1 and (rows[1:, 0] == rows[:-1, 0]).any():
        # Programs take items in their order: the tiles of a block that read the same chunk of keys
        # run side by side, so that all but the first find it in the second-level cache.
        launch = np.searchsorted(cuts[1:], numbers, "right")
        items = items[np.lexsort((numbers, chunks, rows[numbers, 0], launch))]
    return Work(spans, items, rows, places, steps, part_rows)


def _slices(tiling: Tiling, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the first row and number of rows of the tiles of some places of a block."""
    first, last = begin * tiling.group, end * tiling.group
    return [(row, min(tiling.used, last - row)) for row in range(first, last, tiling.used)]


def _add_dense(tiles: _Tiles, index: int, block: QueryBlock, tiling: Tiling) -> int:
    """Add a block whose columns are slots; returns its first tile."""
    base, start, group = len(tiles.rows), block.start, tiling.group
    tree, context = isinstance(block, LevelBlock), isinstance(block, ContextBlock)
    for first, rows in _slices(tiling, 0, block.length):
        low, high = first // group, (first + rows - 1) // group
        if tree or context:
            low, high = 0, max(block.depths)
        ends = (start + low + 1, start + high + 1)
        if tree:  # the device knows what a node sees
            ends = (start, block.stop)
        end = chunk_of(ends[1] - 1) + 1
        tiles.cut(rows * end)
        tiles.add(index, first, rows, (start + low, start + high), ends, (0, end))
    return base


def _add_tree(
    tiles: _Tiles, index: int, block: QueryBlock, tiling: Tiling
) -> list[tuple[int, int, int, int]]:
    """Add a tree; returns its rows of :attr:`Work.places`."""
    start, depths = block.start, block.depths
    tail = chunk_of(start)
    tiles.cut(block.length * tiling.group * (chunk_of(block.stop) + 1))
    base, (order, leaves) = len(tiles.rows), _depth_first(block, tiles.steps)
    shared, highest = chunk_begin(tail), start + max(depths)
    for first, rows in _slices(tiling, 0, block.length):
        tiles.add(index, first, rows, (start, highest), (shared, shared), (0, tail))
    place_of, tail_of = [0] * block.length, [0] * block.length
    for begin, end, list_begin in leaves:
        for place in range(begin, end):
            place_of[order[place]], tail_of[order[place]] = place, len(tiles.rows)
        for first, rows in _slices(tiling, begin, end):
            low = start + depths[order[first // tiling.group]]
            high = start + depths[order[(first + rows - 1) // tiling.group]]
            # The first row sees the columns of its ancestors, but their slots are in a list.
            ends = (low + 1 if list_begin < 0 else start, high + 1)
            chunks = (tail, chunk_of(high) + 1)
            tiles.add(index, first, rows, (low, high), ends, chunks, list_begin)
    return list(zip(order, place_of, [base] * block.length, tail_of, strict=True))


def programs(device: torch.device) -> int:
    """Return the programs of a launch, which take work items by turns: as many as run at once. Two
    of a tile run on a multiprocessor of sm_90."""
    if device.type != "cuda":
        return 3
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def little_shared_memory(device: torch.device) -> bool:
    """Return whether a multiprocessor has 100 KiB of it, as on sm_86, sm_89 and sm_120, or less."""
    if device.type != "cuda":
        return False
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return bool(shared_memory < 128 << 10)


def tilings_for(group: int, keys: Tensor, windows: Sequence[int | None]) -> tuple[Tiling, ...]:
    """Return the tiling of each kind of layer; arguments as of :meth:`Tiling.of`, the windows of
    all layers."""
    return tuple(Tiling.of(group, keys, window) for window in dict.fromkeys(windows))


def part_row_bytes(kv_heads: int, dim: int) -> int:
    """Return the size of a partial result: a row of all kv heads, and its log-sum-exp."""
    return 4 * kv_heads * (dim + 1)
