"""Training batches: documents shuffled anew each epoch and cut into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
_SEPARATOR_PLACE = 0  # every document, so the stream, begins with a separator


class Rows(Protocol):
    """An endless sequence of batches, which can be resumed at any position."""

    position: Position

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """The next batch: int64, indices of tokens."""
        ...

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

    A share `copied` of the rows ends with a separator and a second copy of a piece of the row:
    text that appears once does not train a model to copy from its context.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        separator: int,
        seed: int = 0,
        copied: float = 0.0,
    ) -> None:
        """`documents` are token ids without separators."""
        pieces = [[separator, *ids] for ids in documents]
        ends = np.cumsum([len(piece) for piece in pieces])
        self.stream = torch.tensor([token for piece in pieces for token in piece])
        self.position = Position()
        self._places = np.split(np.arange(len(self.stream)), ends[:-1])
        self._seed = seed
        self._copied = copied
        self._rows: Tensor | None = None

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """The next batch, int64 [rows, length + 1]: indices into `stream`.

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
        cut = shuffled[starts[:, None] + np.arange(length + 1)]
        for i in np.flatnonzero(order.random(count) < self._copied):
            _end_with_copy(cut[i], order)
        return torch.from_numpy(cut)


def _end_with_copy(row: IntArray, random: np.random.Generator) -> None:
    """End the row of indices with a separator and a copy of an eighth to a half of it."""
    length = int(random.integers(len(row) // 8, (len(row) - 1) // 2 + 1))
    kept = len(row) - 1 - length
    start = int(random.integers(0, kept - length + 1))
    row[kept] = _SEPARATOR_PLACE
    row[kept + 1 :] = row[start : start + length]
