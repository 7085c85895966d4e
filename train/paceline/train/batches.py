"""Batches: rows of shuffled documents, whole texts of similar length, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
_SEPARATOR_PLACE = 0  # every document, so the stream, begins with a separator
PADDING = -1
_SORTED = 64  # texts among which a batch's are chosen by length: less padding
_ROUND = 32  # rows have a multiple of this length


class RowStream(Protocol):
    """An endless sequence of batches, which can be resumed at any position."""

    position: Position

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor: ...

    def seek(self, position: Position) -> None:
        """Go on from a position read earlier from `position`."""
        ...


@dataclass
class Position:
    """How far training is in its data: epoch, row within it, row length in tokens, documents."""

    epoch: int = 0
    row: int = 0
    length: int = 0
    documents: int | None = None


class Batches:
    """An endless sequence of batches that can be resumed at any `position`.

    `stream` is every document in the given order, each after one `separator`: int64 [tokens]. A
    batch holds indices into that stream: tokens, or a teacher's predictions for them, are looked up
    by it. The order of documents, and of
    the rows cut from them, is a function of (seed, epoch) alone.
    """

    def __init__(self, documents: Sequence[Sequence[int]], separator: int, seed: int = 0) -> None:
        pieces = [[separator, *ids] for ids in documents]
        ends = np.cumsum([len(piece) for piece in pieces])
        self.stream = torch.tensor([token for piece in pieces for token in piece])
        self.position = Position()
        self._places = np.split(np.arange(len(self.stream)), ends[:-1])
        self._seed = seed
        self._rows: Tensor | None = None

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """Return the next batch, int64 [rows, length + 1]: indices into `stream`.

        The first `length` indices of a row are inputs, the last `length` their targets. Rows are
        drawn from the first `documents` documents, None: all. A change of `length` or `documents`
        starts a new epoch. Raises ValueError where the corpus cannot fill one batch.
        """
        at = self.position
        if (at.length, at.documents) != (length, documents):
            # An epoch cut otherwise has no row in common with this one.
            at.epoch, at.row = at.epoch + (at.length != 0), 0
            at.length, at.documents, self._rows = length, documents, None
        if self._rows is None:
            self._rows = self._cut(rows)
        if at.row + rows > len(self._rows):
            at.epoch, at.row = at.epoch + 1, 0
            self._rows = self._cut(rows)
        batch = self._rows[at.row : at.row + rows]
        at.row += rows
        return batch

    def seek(self, position: Position) -> None:
        """Go on from a position read earlier from `position`."""
        self.position, self._rows = position, None

    def _cut(self, rows: int) -> Tensor:
        length = self.position.length
        order = np.random.default_rng((self._seed, self.position.epoch))
        used = self._places[: self.position.documents]
        shuffled = np.concatenate([used[i] for i in order.permutation(len(used))])
        count = (len(shuffled) - 1) // length
        if count < rows:
            raise ValueError(
                f"a corpus of {len(shuffled)} tokens cannot fill {rows} rows of {length} tokens: "
                "give more files or shorter rows"
            )
        starts = order.permutation(count) * length
        return torch.from_numpy(shuffled[starts[:, None] + np.arange(length + 1)])


class Prefixes:
    """An endless sequence of batches that can be resumed at any `position`.

    A row is one text from its beginning, so its tokens have the context that they will have when
    drafted. An epoch has each text whole, and once more for every two tails that it is long, up to
    random places: all parts of long texts are learnt. The order is a function of (seed, epoch).
    """

    def __init__(
        self, starts: Sequence[int], tail: int, seed: int = 0, max_length: int = 0
    ) -> None:
        """Texts that lie one after the other.

        Args:
            max_length: Longer texts are left out; 0: none. Unit: tokens.

        Raises:
            ValueError: All texts are longer.
        """
        self.position = Position()
        self._texts = [
            (start, end)
            for start, end in pairwise(starts)
            if not max_length or end - start <= max_length
        ]
        if not self._texts:
            raise ValueError(f"no conversation has at most {max_length} tokens: raise --max-length")
        self._tail, self._seed = tail, seed
        self._epoch: list[list[tuple[int, int]]] | None = None

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """Return the next batch: int64 [n, longest], tokens' indices, `PADDING` before short rows.

        The tails of a batch have about `rows` * `length` tokens. It has an even number of rows, two
        or more.
        """
        at = self.position
        if at.length != rows * length:
            at.epoch, at.row = at.epoch + (at.length != 0), 0
            at.length, self._epoch = rows * length, None
        if self._epoch is None:
            self._epoch = self._batches()
        if at.row == len(self._epoch):
            at.epoch, at.row = at.epoch + 1, 0
            self._epoch = self._batches()
        texts = self._epoch[at.row]
        at.row += 1
        longest = max(end - start for start, end in texts)
        batch = torch.full((len(texts), -(-longest // _ROUND) * _ROUND), PADDING)
        for row, (start, end) in zip(batch, texts, strict=True):
            row[start - end :] = torch.arange(start, end)
        return batch

    def seek(self, position: Position) -> None:
        """Go on from a position read earlier from `position`."""
        self.position, self._epoch = position, None

    def _batches(self) -> list[list[tuple[int, int]]]:
        """Begin and end of the rows of each batch of the epoch."""
        draw = np.random.default_rng((self._seed, self.position.epoch))
        rows = list(self._texts)
        for start, end in self._texts:
            cuts = (end - start) // (2 * self._tail)
            places = draw.integers(min(start + self._tail, end - 1), end, cuts)
            rows += [(start, int(place)) for place in places]
        order = [rows[number] for number in draw.permutation(len(rows))]
        batches: list[list[tuple[int, int]]] = []
        for begin in range(0, len(order), _SORTED):
            near = sorted(order[begin : begin + _SORTED], key=lambda row: row[1] - row[0])
            current: list[tuple[int, int]] = []
            for pair in (near[i : i + 2] for i in range(0, len(near) - 1, 2)):
                learnt = min(self._tail, pair[-1][1] - pair[-1][0])
                if current and (len(current) + 2) * learnt > self.position.length:
                    batches.append(current)
                    current = []
                current = [*current, *pair]
            if current:
                batches.append(current)
        return [batches[number] for number in draw.permutation(len(batches))]


class Answers:
    """An endless sequence of batches that can be resumed at any `position`.

    An answer is drawn in proportion to its length, so all tokens of answers are as likely. A batch
    is a function of (seed, number of the batch) alone.
    """

    def __init__(
        self, starts: Sequence[int], answers: Sequence[int], window: int, seed: int = 0
    ) -> None:
        self.position = Position()
        self._starts, self._ends = np.array(starts[:-1]), np.array(starts[1:])
        self._answers, self._window, self._seed = np.array(answers), window, seed

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """Return the next batch: int64 [rows, longest], tokens' indices, `PADDING` behind rows.

        A row is the window before an answer and its first `length` tokens.
        """
        draw = np.random.default_rng((self._seed, self.position.row))
        self.position.row += 1
        ends = np.minimum(self._ends, self._answers + length)
        counts = ends - self._answers
        drawn = draw.choice(len(counts), rows, p=counts / counts.sum())
        begins = np.maximum(self._starts, self._answers - self._window)[drawn]
        sizes = ends[drawn] - begins
        batch = torch.full((rows, int(sizes.max())), PADDING)
        for row, begin, size in zip(batch, begins.tolist(), sizes.tolist(), strict=True):
            row[:size] = torch.arange(begin, begin + size)
        return batch

    def seek(self, position: Position) -> None:
        """Go on from a position read earlier from `position`."""
        self.position = position
