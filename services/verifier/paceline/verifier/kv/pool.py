"""KV of all sequences in pages of one allocation: how it lies on a GPU."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from paceline.cudaipc import Driver, DriverError, ExportedMemory, cuda_driver
from paceline.decoder import ACCELERATORS
from paceline.kernels import PagedPlane
from paceline.verifier.kv.base import OutOfMemory, SequenceKv
from paceline.verifier.kv.layout import BLOCK_TOKENS, TREE_TOKENS, KvLayout, round_up
from paceline.verifier.kv.taps import TapLayout

PAGE_TOKENS = BLOCK_TOKENS
_TABLE_BYTES = 4096


class PagePool:
    """Pages of 256 tokens for all layers, and a page table for each sequence.

    On a GPU the memory is one plain allocation, exported once: drafters on the same machine map it
    whole and are told page tables. Pages belong to the engine thread; rows are taken by the event
    loop and given back by the engine, each by one operation on a list.

    Attributes:
        layout: Shape of the model's KV.
        device: Where it lies.
        kv: ``[pages, layers, 2, kv_heads, PAGE_TOKENS, head_dim]``; 0 is keys, 1 values.
        tables: Pages of each sequence, int32 ``[sequences, most]``.
        exported: How other processes map it; None on the CPU, where they cannot.
    """

    def __init__(
        self,
        layout: KvLayout,
        device: torch.device,
        *,
        kv_bytes: int,
        max_sequences: int,
        max_context: int,
        driver: Driver | None = None,
    ) -> None:
        """Allocate all of it.

        Args:
            layout: Shape of the model's KV.
            device: Where it is to lie.
            kv_bytes: Its size, rounded down to whole pages. Unit: bytes.
            max_sequences: Most sequences at once.
            max_context: Longest text. Unit: tokens.
            driver: What to allocate with; None: the GPU's own, and PyTorch on the CPU.

        Raises:
            OutOfMemory: The device has not that much, or it is less than a page.
        """
        self.layout = layout
        self.device = device
        self.page_bytes = PAGE_TOKENS * layout.token_bytes
        count = kv_bytes // self.page_bytes
        if count < 1:
            raise OutOfMemory(f"{kv_bytes} bytes of KV hold no page of {self.page_bytes} bytes")
        self.exported: ExportedMemory | None = None
        shape = (count, layout.layers, 2, layout.kv_heads, PAGE_TOKENS, layout.head_dim)
        if driver is not None or device.type == "cuda":
            try:
                self.exported = ExportedMemory(
                    driver or cuda_driver(), device.index or 0, count * self.page_bytes
                )
            except DriverError as error:
                raise OutOfMemory(f"no {kv_bytes} bytes of GPU memory for KV: {error}") from error
            self.kv: Tensor = self.exported.bytes.view(layout.dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=layout.dtype, device=device)
        most = (round_up(max_context) + TREE_TOKENS) // PAGE_TOKENS
        # A row more, all of whose pages are page 0: what nothing reads may be written there.
        self.tables = torch.zeros(max_sequences + 1, most, dtype=torch.int32, device=device)
        self._reading = torch.Stream(device) if device.type in ACCELERATORS else None
        self._free_pages = list(range(count))[::-1]
        self._free_rows = list(range(1, max_sequences + 1))[::-1]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free_pages)

    @property
    def free_rows(self) -> int:
        """Page tables that no sequence has."""
        return len(self._free_rows)

    def planes(self, row: int, capacity: int) -> list[tuple[PagedPlane, PagedPlane]]:
        """Keys and values of every layer as kernels read them, for the sequence of a table."""
        return [
            (
                PagedPlane(self.kv[:, layer, 0], self.tables, row, capacity),
                PagedPlane(self.kv[:, layer, 1], self.tables, row, capacity),
            )
            for layer in range(self.layout.layers)
        ]

    def beside_steps(self) -> AbstractContextManager[object]:
        """What is read in here, of committed positions, waits for no step that the GPU runs.

        The GPU was done with these positions before they were called committed.
        """
        return nullcontext() if self._reading is None else self._reading

    def take_row(self) -> int:
        """A page table for a sequence.

        Raises:
            OutOfMemory: All are taken.
        """
        if not self._free_rows:
            raise OutOfMemory("every page table is taken; wait for other sequences to end")
        return self._free_rows.pop()

    def take_pages(self, count: int) -> list[int]:
        """Pages for a sequence; what is in them is of no meaning.

        Raises:
            OutOfMemory: There are not so many; none is taken.
        """
        if count > len(self._free_pages):
            raise OutOfMemory(
                f"the pool has {len(self._free_pages)} pages of KV left, {count} are needed; "
                "wait for other sequences to end"
            )
        return [self._free_pages.pop() for _ in range(count)]

    def give_back(self, row: int, pages: list[int]) -> None:
        """A sequence has ended."""
        self._free_rows.append(row)
        self._free_pages += pages[::-1]

    def check_integrity(self) -> None:
        """Prove that everything was given back. Only when no sequence is left.

        Raises:
            AssertionError: A page or a page table leaked, or was given back twice.
        """
        pages, rows = len(self.kv), len(self.tables) - 1
        if sorted(self._free_pages) != list(range(pages)) or (
            sorted(self._free_rows) != list(range(1, rows + 1))
        ):
            raise AssertionError(
                f"{self.free_pages} of {pages} pages and {self.free_rows} of {rows} page tables "
                "are free, expected each of them once"
            )

    def close(self) -> None:
        """Give the memory back to the machine; no sequence may use it any more."""
        self.kv = torch.empty(0)
        if self.exported is not None:
            self.exported.close()


class PoolView:
    """The pool as a cache without positions, for what is about no sequence in particular."""

    def __init__(self, pool: PagePool) -> None:
        self._layers = pool.planes(0, pool.tables.shape[1] * PAGE_TOKENS)

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        """Keys and values of a layer."""
        return self._layers[index]


class PagedKv(SequenceKv):
    """KV of one sequence in pages of a pool.

    Its file holds the header and, at its second 4096 bytes, the page table: int32, one for every
    256 positions, written before the committed length that needs it. So a reader that has mapped
    the pool needs no call to follow the sequence.

    Safety contract for readers, beside :class:`SequenceKv`'s: positions below the committed length
    keep their pages and their values while the generation stays the same. Once the sequence is
    closed its pages are given to others, so what was read must be dropped if the generation has
    changed afterwards.
    """

    def __init__(self, pool: PagePool, capacity: int, taps: TapLayout | None = None) -> None:
        """Take a page table, but no page yet.

        Args:
            pool: Where pages come from.
            capacity: Slots, a multiple of 256.
            taps: Where hidden states are to lie; None: none are kept.

        Raises:
            OutOfMemory: All page tables are taken, or /dev/shm is full.
        """
        entries = capacity // PAGE_TOKENS
        if entries > pool.tables.shape[1]:
            raise OutOfMemory(f"{capacity} tokens need more pages than a table of the pool has")
        self._table_bytes = -(-entries * 4 // _TABLE_BYTES) * _TABLE_BYTES
        self._row = pool.take_row()
        try:
            super().__init__(pool.layout, capacity, self._table_bytes, taps)
            self._fill(self.table_offset, self._table_bytes, capacity)
        except BaseException:
            pool.give_back(self._row, [])
            raise
        self.device = pool.device
        self.pool = pool
        taps_bytes = 0 if taps is None else taps.byte_size
        self.byte_size = pool.layout.byte_size(capacity) + taps_bytes
        self._table = self._body.view(torch.int32)
        self._pages: list[int] = []
        self._layers = pool.planes(self._row, capacity)

    @property
    def table_offset(self) -> int:
        """Where the page table begins. Unit: bytes from the file's start."""
        return self._taps_offset - self._table_bytes

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        """See :class:`SequenceKv`."""
        return self._layers[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`SequenceKv`."""
        keys, values = self._layers[layer]
        with self.pool.beside_steps():
            there = positions.to(self.device)
            return keys.gather(there).cpu(), values.gather(there).cpu()

    def reserve(self, tokens: int) -> None:
        """See :class:`SequenceKv`."""
        if tokens <= self.reserved:
            return
        target = min(round_up(tokens), self.capacity)
        self._fill_taps(self.reserved, target)
        have = len(self._pages)
        new = self.pool.take_pages(target // PAGE_TOKENS - have)
        self._pages += new
        self._table[have : have + len(new)] = torch.tensor(new, dtype=torch.int32)
        row = self.pool.tables[self._row, have : have + len(new)]
        row.copy_(self._table[have : have + len(new)])
        self.reserved = target

    def copy_prefix(self, source: Self, tokens: int) -> None:
        """See :class:`SequenceKv`."""
        self.reserve(tokens)
        for own, theirs in zip(
            self._pages[: math.ceil(tokens / PAGE_TOKENS)], source._pages, strict=False
        ):
            self.pool.kv[own].copy_(self.pool.kv[theirs])
        if tokens and self.taps is not None and source.taps is not None:
            self.taps.copy_prefix(source.taps, tokens)

    def keep(self, slots: list[int], start: int) -> None:
        """See :class:`SequenceKv`."""
        goals = range(start, start + len(slots))
        old, new = self._places(slots), self._places(goals)
        moved = self.pool.kv[old[0], :, :, :, old[1]]
        self.pool.kv[new[0], :, :, :, new[1]] = moved

    def publish(self, committed: int) -> None:
        """See :class:`SequenceKv`: what was asked of the GPU is done first."""
        if self.device.type in ACCELERATORS:
            torch.accelerator.current_stream(self.device).synchronize()
        super().publish(committed)

    def close(self) -> None:
        """See :class:`SequenceKv`. Its pages go to others."""
        if self.closed:
            return
        super().close()
        self.pool.give_back(self._row, self._pages)
        self._pages = []
        self._layers = []
        self._table = torch.empty(0)

    def _places(self, slots: range | list[int]) -> tuple[Tensor, Tensor]:
        """Page and place in it of each slot, on the device, in one copy."""
        both = [[self._pages[s // PAGE_TOKENS] for s in slots], [s % PAGE_TOKENS for s in slots]]
        pages, places = torch.tensor(both).to(self.device)
        return pages, places
