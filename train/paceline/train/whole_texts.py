"""Batches of whole texts of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.train.batches import Position

PADDING = -1
_SORTED = 64  # texts among which those of a batch are chosen by length: less padding
_ROUND = 32  # rows have a multiple of this length


class WholeTexts:
    """An endless sequence of batches that can be resumed at any `position`.

    A row is one text from its beginning, so its tokens have the context that they will have when
    drafted. The order is a function of (seed, epoch) alone.
    """

    def __init__(self, starts: Sequence[int], seed: int = 0) -> None:
        """Texts that lie one after the other; `starts` has the first index of each, and the end."""
        self.position = Position()
        self._texts = list(pairwise(starts))
        self._seed = seed
        self._epoch: list[list[int]] | None = None

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """The next batch: int64 [n, longest], indices of tokens, `PADDING` after a text's end.

        A batch has about `rows` * `length` tokens: an even number of texts, two or more.
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
        texts = [self._texts[number] for number in self._epoch[at.row]]
        at.row += 1
        longest = max(end - start for start, end in texts)
        batch = torch.full((len(texts), -(-longest // _ROUND) * _ROUND), PADDING)
        for row, (start, end) in zip(batch, texts, strict=True):
            row[: end - start] = torch.arange(start, end)
        return batch

    def seek(self, position: Position) -> None:
        """Go on from a position read earlier from `position`."""
        self.position, self._epoch = position, None

    def _batches(self) -> list[list[int]]:
        """Numbers of the texts of each batch of the epoch."""
        draw = np.random.default_rng((self._seed, self.position.epoch))
        order = draw.permutation(len(self._texts)).tolist()
        batches: list[list[int]] = []
        for begin in range(0, len(order), _SORTED):
            near = sorted(order[begin : begin + _SORTED], key=self._length)
            pairs = [near[i : i + 2] for i in range(0, len(near) - 1, 2)]
            current: list[int] = []
            for pair in pairs:
                padded = (len(current) + 2) * self._length(pair[-1])
                if current and padded > self.position.length:
                    batches.append(current)
                    current = []
                current = [*current, *pair]
            if current:
                batches.append(current)
        return [batches[number] for number in draw.permutation(len(batches))]

    def _length(self, number: int) -> int:
        start, end = self._texts[number]
        return end - start
