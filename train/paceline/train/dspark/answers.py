"""Batches of answers, each with the part of its text that a drafter reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.train.batches import Position
from paceline.train.whole_texts import PADDING


class Answers:
    """An endless sequence of batches that can be resumed at any `position`.

    An answer is drawn in proportion to its length, so all tokens of answers are as likely. A batch
    is a function of (seed, number of the batch) alone.
    """

    def __init__(
        self, starts: Sequence[int], answers: Sequence[int], window: int, seed: int = 0
    ) -> None:
        """Texts that lie one after the other.

        Args:
            starts: The first index of each text, and the end.
            answers: The first index of each text's answer.
            window: Tokens before an answer that are read with it.
            seed: Of the draws.
        """
        self.position = Position()
        self._starts, self._ends = np.array(starts[:-1]), np.array(starts[1:])
        self._answers, self._window, self._seed = np.array(answers), window, seed

    def next(self, rows: int, length: int, documents: int | None = None) -> Tensor:
        """The next batch: int64 [rows, longest], indices of tokens, `PADDING` after a row's end.

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
