"""Token history for penalties, updated in constant time along the paths of a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class History:
    """Prompt and output of one sequence, with output counts.

    Stepping down a tree path is :meth:`push`, stepping back is :meth:`pop`; both take constant
    time. Not safe for use from several threads at once.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        """Start from a prompt and, when resuming, the tokens already emitted."""
        self._prompt = frozenset(prompt)
        self._prompt_length = len(prompt)
        self._output: list[int] = []
        self._counts: dict[int, int] = {}
        self._prompt_ids: Tensor | None = None
        for token in output:
            self.push(token)

    def __len__(self) -> int:
        """Length of prompt and output: the absolute position of the next token."""
        return self._prompt_length + len(self._output)

    @property
    def prompt(self) -> frozenset[int]:
        """Distinct prompt tokens."""
        return self._prompt

    @property
    def output(self) -> Sequence[int]:
        """Output tokens, oldest first; a live view that must not be changed."""
        return self._output

    @property
    def counts(self) -> dict[int, int]:
        """Count of each output token; a live view that must not be changed."""
        return self._counts

    def push(self, token: int) -> None:
        """Append an output token."""
        self._output.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1

    def pop(self) -> int:
        """Remove the newest output token and return it.

        Raises:
            IndexError: There is no output token.
        """
        token = self._output.pop()
        left = self._counts[token] - 1
        if left:
            self._counts[token] = left
        else:
            del self._counts[token]
        return token

    def prompt_ids(self) -> Tensor:
        """Distinct prompt tokens, int64, made once."""
        if self._prompt_ids is None:
            self._prompt_ids = torch.tensor(sorted(self._prompt), dtype=torch.int64)
        return self._prompt_ids

    def output_counts(self) -> tuple[Tensor, Tensor]:
        """Distinct output tokens, int64 ``[n]``, and their counts, float32 ``[n]``."""
        ids = torch.tensor(list(self._counts), dtype=torch.int64)
        return ids, torch.tensor(list(self._counts.values()), dtype=torch.float32)
