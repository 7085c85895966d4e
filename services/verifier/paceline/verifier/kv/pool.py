"""KV and hidden states of all sequences in pages of one allocation, as they are on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from paceline.device import Device, DriverError
from paceline.kernels import PagedPlane, send
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD
from paceline.tree import TokenTree
from paceline.v1 import kv_pb2
from paceline.verifier.kv.base import (
    RESERVED_TOKENS,
    TREE_TOKENS,
    HiddenStates,
    KvLayout,
    OutOfMemory,
    SequenceKv,
    TapLayout,
    TapRows,
    round_up,
)

if TYPE_CHECKING:
    from paceline.cuda.memory import ExportedMemory

PAGE_TOKENS = RESERVED_TOKENS
_TABLE_BYTES = 4096
_ANCHOR, _NEVER = -1, -2  # in the place of tokens: always accepted, never


class PagePool:
    """Pages of 256 tokens for all layers, and a page table for each sequence.

    On a GPU the memory is one allocation, exported once: drafters on the same machine map it whole
    and read the page tables from the caches' files. The engine thread takes and frees pages; the
    event loop takes rows and the engine thread frees them, each by one operation on a list.
    Hidden states take pages of the same size, of caches that keep them.
    """

    table = None

    def __init__(
        self,
        layout: KvLayout,
        device: Device,
        *,
        kv_bytes: int,
        max_sequences: int,
        max_context: int,
    ) -> None:
        """Allocate whole pages of at most ``kv_bytes``. Raises ``OutOfMemory`` if the device has
        too little memory, or the size is less than a page."""
        self.layout = layout  # shape of the model's KV
        self.device = device.torch  # where the memory is
        self.wait = device.wait
        self.page_bytes = PAGE_TOKENS * layout.token_bytes
        count = kv_bytes // self.page_bytes
        if count < 1:
            raise OutOfMemory(f"{kv_bytes} bytes of KV hold no page of {self.page_bytes} bytes")
        try:
            # None on the CPU, where other processes cannot map it.
            self.exported: ExportedMemory | None = device.export_memory(count * self.page_bytes)
        except DriverError as error:
            raise OutOfMemory(f"no {kv_bytes} bytes of GPU memory for KV: {error}") from error
        shape = (count, layout.layers, 2, layout.kv_heads, PAGE_TOKENS, layout.head_dim)
        # `[pages, layers, 2, kv_heads, PAGE_TOKENS, head_dim]`; 0 is keys, 1 values.
        self.kv: Tensor = (
            torch.zeros(shape, dtype=layout.dtype, device=self.device)
            if self.exported is None
            else self.exported.bytes.view(layout.dtype).view(shape)
        )
        hidden = max(1, layout.hidden)
        rows = self.page_bytes // (hidden * layout.hidden_dtype.itemsize)
        memory = self.kv.view(count, -1).view(torch.uint8).view(layout.hidden_dtype)
        # The same memory as rows of hidden states, `[pages, rows, hidden]`.
        self.states: Tensor = memory[:, : rows * hidden].view(count, rows, hidden)
        max_pages = (round_up(max_context) + TREE_TOKENS) // PAGE_TOKENS
        # Row 0 belongs to no sequence; all its entries are page 0.
        # Pages of each sequence, int32 `[sequences, max_pages]`.
        self.tables = torch.zeros(
            max_sequences + 1, max_pages, dtype=torch.int32, device=self.device
        )
        self._holders = [0] * count  # sequences that hold each page
        # In it reads of committed positions do not wait for a running step: the GPU has written
        # these positions before they are published as committed.
        self.beside_steps = device.stream()
        self._free_pages = list(range(count))[::-1]
        self._free_rows = list(range(1, max_sequences + 1))[::-1]

    def describe(self) -> kv_pb2.KvPages:
        """Describe the pages to other processes."""
        described = kv_pb2.KvPages(page_size=PAGE_TOKENS)
        if self.exported is not None and self.exported.handle:
            described.memory.device_uuid = self.exported.device_uuid
            described.memory.handle = self.exported.handle
            described.memory.byte_size = self.exported.bytes.numel()
        return described

    @property
    def limit_bytes(self) -> int:
        """Memory of all pages. Unit: bytes."""
        return len(self._holders) * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Memory of the pages that sequences hold. Unit: bytes."""
        return self.limit_bytes - self.free_pages * self.page_bytes

    def bytes_of(self, slots: int, taps: TapLayout | None) -> int:
        """Return the memory of so many slots and their hidden states. Unit: bytes."""
        rows = 0 if taps is None else self.pages_of_rows(taps.rows_of(slots))
        return (-(-slots // PAGE_TOKENS) + rows) * self.page_bytes

    def pages_of_rows(self, rows: int) -> int:
        """Return the number of pages for so many rows of hidden states."""
        return -(-rows // self.states.shape[1])

    def allocate(self, capacity: int, taps: TapLayout | None) -> PagedKv:
        """Take a page table for a sequence; see :class:`PagedKv`."""
        return PagedKv(self, capacity, taps)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def layer(
        self, index: int, row: int = 0, capacity: int | None = None
    ) -> tuple[PagedPlane, PagedPlane]:
        """Return keys and values of a layer for the sequence of a page table. Row 0 belongs to
        none: with it the pool is a cache itself."""
        where = self.tables, row, capacity or self.tables.shape[1] * PAGE_TOKENS
        return PagedPlane(self.kv[:, index, 0], *where), PagedPlane(self.kv[:, index, 1], *where)

    def keep_accepted(
        self, blocks: Sequence[tuple[PagedKv, int, TokenTree, int]], chosen: Tensor
    ) -> Tensor:
        """Move the KV of the path that each tree and the chosen tokens share behind its anchor's.

        The device is not waited for, so that what is moved is not known here: each slot of a block
        is written, with itself or with the accepted node of its depth. Nothing else is read or
        written later than this by the step.

        Args:
            blocks: The cache of a sequence, the anchor's slot, the tree whose nodes are behind it,
                and the anchor's index in ``chosen``, where the nodes follow too.
            chosen: The token after each row of the blocks, int64 on the device.

        Returns:
            For each slot of the blocks, how far behind it its new contents were, int64 on the
            device.
        """
        columns: list[tuple[int, ...]] = []
        depth = 0
        for cache, slot, tree, row in blocks:
            first = len(columns)
            columns.append((first, first, row, _ANCHOR, *cache.page_of(slot)))
            for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
                token = token if tree.child(parent, token) == node else _NEVER
                depth = max(depth, tree.depths[node])
                columns.append(
                    (
                        first + 1 + parent, first + tree.depths[node], row + 1 + parent, token,
                        *cache.page_of(slot + 1 + node),
                    )
                )  # fmt: skip
        table = send(torch.tensor(columns).T.contiguous(), self.device)
        parents, goals, rows, tokens, pages, slots = table
        kept = (tokens == _ANCHOR) | (chosen[rows] == tokens)
        for _ in range(depth.bit_length()):  # after the n-th, of 2^n nodes up the path
            kept = kept & kept[parents]
            parents = parents[parents]
        count = len(columns)
        sources = torch.arange(count + 1, device=self.device)
        sources[torch.where(kept, goals, count)] = sources[:count].clone()
        sources = sources[:count]
        self.kv[pages, :, :, :, slots] = self.kv[pages[sources], :, :, :, slots[sources]]
        return sources - torch.arange(count, device=self.device)

    def record(
        self,
        blocks: Sequence[tuple[TapPages, int, slice, int | None]],
        states: Mapping[int, Tensor],
        moved: Tensor | None,
    ) -> None:
        """Write hidden states of a step, without waiting for the device. A row of a tree whose KV
        was moved is written where its KV is; other rows of the tree are written behind the
        committed length, as all rows of a block whose KV has not moved yet. ``blocks`` say where
        the states of a sequence go, the position of its first row, its rows of the step, and the
        first of them in ``moved``, which :meth:`keep_accepted` returned, or None; ``states`` are
        outputs of tapped layers for all rows, ``[M, hidden]`` each."""
        planes = {layer: index for index, layer in enumerate(states)}
        stacked = torch.stack([*states.values()])
        parts = []
        for taps, first, rows, column in blocks:
            taps.first = min(taps.first, first)
            count = rows.stop - rows.start
            newest = torch.arange(max(0, count - taps.layout.slots), count)
            layers = torch.tensor([planes[layer] for layer in taps.layout.taps.layers])
            sources = (rows.start + newest)[:, None] + layers * stacked.shape[1]
            # Column 0 is an anchor, which stays.
            columns = torch.zeros_like(newest) if column is None else column + newest
            parts.append(
                torch.stack(
                    [
                        sources.flatten(),
                        columns.repeat_interleave(len(layers)),
                        *taps.places(first + newest),
                    ]
                )
            )
        sources, columns, pages, at = send(torch.cat(parts, dim=1), self.device)
        if moved is not None:
            sources = sources + moved[columns]
        self.states[pages, at] = stacked.flatten(0, 1)[sources]

    def compact(self, old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
        """Move slots, given as pages and offsets in them; none to where a later one comes from."""
        (from_pages, to_pages), (from_slots, to_slots) = send(
            torch.tensor([old, new]).permute(2, 0, 1).contiguous(), self.device
        )
        self.kv[to_pages, :, :, :, to_slots] = self.kv[from_pages, :, :, :, from_slots]
        self.wait()

    def take_row(self) -> int:
        """Take a page table; returns its row. Raises ``OutOfMemory`` if none is free."""
        if not self._free_rows:
            raise OutOfMemory("every page table is taken; wait for other sequences to end")
        return self._free_rows.pop()

    def take_pages(self, count: int) -> list[int]:
        """Take pages for a sequence. Their contents are undefined. Raises ``OutOfMemory``: fewer
        pages are free; none is taken."""
        if count > len(self._free_pages):
            raise OutOfMemory(
                f"the pool has {len(self._free_pages)} pages of KV left, {count} are needed; "
                "wait for other sequences to end"
            )
        pages = [self._free_pages.pop() for _ in range(count)]
        self.share_pages(pages)
        return pages

    def share_pages(self, pages: list[int]) -> None:
        """Hold pages once more, for a sequence with the same text up to their end.

        Nobody writes to them again: a sequence writes only behind its committed length.
        """
        for page in pages:
            self._holders[page] += 1

    def free(self, row: int, pages: list[int]) -> None:
        """Free the page table of a sequence, and its pages that no other one holds."""
        self._free_rows.append(row)
        for page in pages[::-1]:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free_pages.append(page)

    def check_integrity(self) -> None:
        """Check that everything is free. Call it only when there is no sequence. Raises
        ``AssertionError``: a page or a page table leaked, or was freed twice."""
        pages, rows = len(self.kv), len(self.tables) - 1
        if sorted(self._free_pages) != list(range(pages)) or (
            sorted(self._free_rows) != list(range(1, rows + 1))
        ):
            raise AssertionError(
                f"{self.free_pages} of {pages} pages and {len(self._free_rows)} of {rows} page "
                "tables are free, expected each of them once"
            )

    def close(self) -> None:
        """Free the memory; no sequence may use it afterwards."""
        self.kv = self.states = torch.empty(0)
        if self.exported is not None:
            self.exported.close()


class TapPages(TapRows):
    """Hidden states of one cache in pages of a pool.

    Those of layer l (of the kept ones) at position p are row (p % slots) * layers + l; row r is in
    page ``table[r // n]``, where it is row r % n of the n rows of a page. All rows of a block are
    written before it is known which of them are committed.
    """

    ahead = TAP_AHEAD

    def __init__(self, layout: TapLayout, pool: PagePool, table: Tensor) -> None:
        """Take no pages yet; ``table`` is the page table, int32 in the cache's file."""
        super().__init__(layout)
        self.pages: list[int] = []  # the pages, in order
        self.pool = pool  # pool of the pages
        self._table = table

    def lacking(self, tokens: int) -> int:
        """Return the number of pages that are missing for the rows of so many positions."""
        return self.pool.pages_of_rows(self.layout.rows_of(tokens)) - len(self.pages)

    def append(self, new: list[int]) -> None:
        """Add pages to the table."""
        have = len(self.pages)
        self.pages += new
        self._table[have : have + len(new)] = torch.tensor(new, dtype=torch.int32)

    def places(
        self, positions: Tensor, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return pages and rows in them, int64 ``[n * layers]`` on the CPU, of the layers at each
        position, of all layers if they are None."""
        kept = self.layout.taps.layers
        indices = range(len(kept)) if layers is None else [kept.index(layer) for layer in layers]
        slots = positions % self.layout.slots
        rows = (slots[:, None] * len(kept) + torch.tensor([*indices])).flatten()
        size = self.pool.states.shape[1]
        return self._table[rows // size].long(), rows % size

    def record(self, first: int, states: HiddenStates, rows: slice | list[int]) -> None:
        outputs = [torch.as_tensor(states[layer])[rows] for layer in self.layout.taps.layers]
        new = torch.stack(outputs, dim=1)[-self.layout.slots :].view(self.pool.states.dtype)
        end = first + len(outputs[0])
        self.first = min(self.first, first)
        self._write(torch.arange(end - len(new), end), new.flatten(0, 1))

    def gather(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        rows = self._read(torch.arange(begin, end), layers)
        return [*rows.view(end - begin, len(layers), -1).unbind(1)]

    def copy(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        with self.pool.beside_steps:
            return [rows.cpu() for rows in self.gather(layers, begin, end)]

    def move(self, positions: list[int], start: int) -> None:
        """Move the rows at positions to ``start``, ``start + 1``, ..."""
        rows = self._read(torch.tensor(positions))
        self._write(torch.arange(start, start + len(positions)), rows)

    def copy_prefix(self, source: TapRows, tokens: int, committed: int) -> None:
        super().copy_prefix(source, tokens, committed)
        self.pool.wait()

    def _read(self, positions: Tensor, layers: Sequence[int] | None = None) -> Tensor:
        pages, at = send(torch.stack(self.places(positions, layers)), self.pool.device)
        return self.pool.states[pages, at]

    def _write(self, positions: Tensor, rows: Tensor) -> None:
        pages, at = send(torch.stack(self.places(positions)), self.pool.device)
        self.pool.states[pages, at] = rows


class PagedKv(SequenceKv):
    """KV of one sequence in pages of a pool.

    Its file holds the header and, at byte 4096, the page table: one int32 for every 256 positions,
    written before the committed length that needs it. The hidden states' table follows. So a
    reader that has mapped the pool needs no call to follow the sequence.

    Safety contract for readers, in addition to :class:`SequenceKv`'s: positions below the
    committed length keep their pages and their values while the epoch stays the same. Pages of
    a closed sequence are reused, so a reader drops what it read if the epoch has changed.
    """

    taps: TapPages | None = None

    def __init__(self, pool: PagePool, capacity: int, taps: TapLayout | None = None) -> None:
        """Take a page table for so many slots, a multiple of 256, and no pages yet. Raises
        ``OutOfMemory``: no page table is free, or there is no memory."""
        entries = capacity // PAGE_TOKENS
        if entries > pool.tables.shape[1]:
            raise OutOfMemory(f"{capacity} tokens need more pages than a table of the pool has")
        kept = 0 if taps is None else pool.pages_of_rows(taps.rows_of(capacity))
        table_bytes = -(-(entries + kept) * 4 // _TABLE_BYTES) * _TABLE_BYTES
        described = None
        if taps is not None:
            described = taps.describe(table_offset=HEADER_BYTES + entries * 4)
        self.row = pool.take_row()
        try:
            super().__init__(
                pool.layout, capacity, table_bytes, taps=described, pages=pool.describe()
            )
            self._fill(HEADER_BYTES, table_bytes, capacity)
        except BaseException:
            pool.free(self.row, [])
            raise
        self.device = pool.device
        self.pool = pool
        self._table = self._body.view(torch.int32)
        if taps is not None:
            self.taps = TapPages(taps, pool, self._table[entries:])
        self._pages: list[int] = []
        layers = range(pool.layout.layers)
        self._layers = [pool.layer(index, self.row, capacity) for index in layers]

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        return self._layers[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        with self.pool.beside_steps:
            slots = positions.to(self.device)
            return keys.gather(slots).cpu(), values.gather(slots).cpu()

    def _take(self, slots: int) -> None:
        count = slots // PAGE_TOKENS - len(self._pages)
        kept = 0 if self.taps is None else self.taps.lacking(slots)
        new = self.pool.take_pages(count + kept)
        self._append(new[:count])
        if self.taps is not None:
            self.taps.append(new[count:])

    def _bytes_of(self, slots: int) -> int:
        return self.pool.bytes_of(slots, None if self.taps is None else self.taps.layout)

    def _append(self, new: list[int]) -> None:
        """Add pages that this sequence holds to its table."""
        have = len(self._pages)
        self._pages += new
        self._table[have : have + len(new)] = torch.tensor(new, dtype=torch.int32)
        row = self.pool.tables[self.row, have : have + len(new)]
        row.copy_(self._table[have : have + len(new)])
        self.reserved = len(self._pages) * PAGE_TOKENS

    def copy_prefix(self, source: Self, tokens: int, committed: int) -> None:
        """See :class:`SequenceKv`: whole pages are shared, only the last one is copied."""
        shared = source._pages[: tokens // PAGE_TOKENS]
        self.pool.share_pages(shared)
        self._append(shared)
        self._take(self.reserved)
        super().copy_prefix(source, tokens, committed)

    def _copy_kv(self, source: Self, tokens: int) -> None:
        if tokens % PAGE_TOKENS:
            last = tokens // PAGE_TOKENS
            self.pool.kv[self._pages[last]].copy_(self.pool.kv[source._pages[last]])
            self.pool.wait()

    def compact(self, slots: list[int], start: int) -> None:
        if self.taps is not None:
            self.taps.move(slots, start)
        new = range(start, start + len(slots))
        self.pool.compact([self.page_of(slot) for slot in slots], [self.page_of(s) for s in new])

    @property
    def files(self) -> list[int]:
        exported = self.pool.exported
        return [self.file] if exported is None or exported.file < 0 else [self.file, exported.file]

    def close(self) -> None:
        """See :class:`SequenceKv`. Frees its pages."""
        if self.closed:
            return
        pages = self._pages if self.taps is None else self._pages + self.taps.pages
        super().close()
        self.pool.free(self.row, pages)
        self._pages = []
        self._layers = []
        self._table = torch.empty(0)

    def page_of(self, slot: int) -> tuple[int, int]:
        """Return page and offset in the page of a slot."""
        return self._pages[slot // PAGE_TOKENS], slot % PAGE_TOKENS
