"""Keys and values of the newest tokens in memory that never grows and is never moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import MAX_TREE_NODES

Run = tuple[int, int]
"""First slot, and how many tokens lie from there on in slots that follow each other."""


class Ring:
    """Self-attention KV of one generation: the text's last ``window`` positions, and one tree.

    The position p of the text has slot ``p % window``, so a new token overwrites the one that has
    just left every window. Behind the ring there is one slot for each node of a round's tree,
    whether its branch is halted or goes on: nothing is moved when a branch is given up (LongSpec,
    appendix D), nor when one is accepted: its tokens are fed again as text.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        window: int,
        room: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Make an empty ring.

        Args:
            kv_heads: Heads of keys and values.
            head_dim: Width of a head.
            window: Positions that a token sees, its own included.
            room: Most nodes of a tree.
            dtype: Type of keys and values.
            device: Where they lie.
        """
        self.window = window
        self.length = 0
        """Positions of the text below this have been written, the last ``window`` are there."""
        with torch.inference_mode(False):  # or it could only be written in inference mode
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            shape = (2, kv_heads, window + room, head_dim)
            self._store = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = self._store[0], self._store[1]

    @property
    def nbytes(self) -> int:
        """Bytes it holds, from its first day to its last."""
        return self._store.nbytes

    def text_runs(self, begin: int, end: int) -> list[Run]:
        """Where the positions ``begin`` to ``end`` belong; at most ``window`` of them."""
        runs: list[Run] = []
        while begin < end:
            slot = begin % self.window
            count = min(end - begin, self.window - slot, MAX_TREE_NODES)
            runs.append((slot, count))
            begin += count
        return runs

    def node_run(self, nodes: range) -> Run:
        """Where nodes of the tree belong that were added one after the other."""
        return self.window + nodes.start, len(nodes)

    def mask(self, position: int, length: int, paths: Sequence[Sequence[int]]) -> Tensor:
        """What tokens at one position see of the ring, to be added to their scores.

        Args:
            position: Of all the tokens.
            length: Tokens of the text, all of them written when the scores are made.
            paths: For each token the tree's nodes down to it, itself included; empty if it is the
                newest of the text.

        Returns:
            float32 ``[tokens, slots]``: 0 or -inf. Slots from there on are none of theirs.
        """
        nodes = max((path[-1] + 1 for path in paths if path), default=0)
        # In numpy: a dozen small steps, each a fraction of what it costs in torch.
        mask = np.full((len(paths), self.window + nodes), -np.inf, np.float32)
        for slot, count in self.text_runs(max(0, position - self.window + 1), length):
            mask[:, slot : slot + count] = 0.0
        for row, path in zip(mask, paths, strict=True):
            for node in path[-self.window :]:
                row[self.window + node] = 0.0
        return torch.from_numpy(mask)
