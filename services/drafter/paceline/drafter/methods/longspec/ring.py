"""A ring buffer of keys and values: constant memory, and nothing is ever moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.drafter.methods.slots import SlotRun, ring_slots


class Ring:
    """Self-attention KV of one generation: the text's last ``window`` positions, and one tree.

    Position p of the text has slot ``p % window``, so a new token overwrites the one that has just
    left every window. The ring is followed by one slot for each node of a round's tree (LongSpec,
    appendix D). Neither a rejected branch nor an accepted one is moved: accepted tokens are fed
    again as text.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        window: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Creates an empty ring.

        Args:
            kv_heads: Heads of keys and values.
            head_dim: Width of a head.
            window: Positions that a token attends to, including its own.
            nodes: Most nodes of a tree.
            dtype: Type of keys and values.
            device: Device of keys and values.
        """
        self.window = window
        self.length = 0
        """Positions of the text below this were written; the last ``window`` of them remain."""
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            shape = (2, kv_heads, window + nodes, head_dim)
            self._store = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = self._store[0], self._store[1]

    @property
    def nbytes(self) -> int:
        """Size of the buffer, which never changes. Unit: bytes."""
        return self._store.nbytes

    def node_slots(self, nodes: range) -> SlotRun:
        """Returns the slots of consecutive nodes of the tree."""
        return self.window + nodes.start, len(nodes)

    def mask(self, position: int, length: int, paths: Sequence[Sequence[int]]) -> Tensor:
        """Returns the additive attention mask of tokens at one position.

        Args:
            position: Position of all the tokens.
            length: Tokens of the text, all of which are written before the mask is used.
            paths: For each token the tree's nodes on its path, including itself; empty for the
                newest token of the text.

        Returns:
            float32 ``[tokens, slots]``, 0 or -inf; no token attends to slots behind the last one.
        """
        nodes = max((path[-1] + 1 for path in paths if path), default=0)
        # In numpy: a dozen small steps, each a fraction of its cost in torch.
        mask = np.full((len(paths), self.window + nodes), -np.inf, np.float32)
        oldest = max(0, position - self.window + 1)
        for slot, count in ring_slots(oldest, length, self.window):
            mask[:, slot : slot + count] = 0.0
        for row, path in zip(mask, paths, strict=True):
            row[[self.window + node for node in path[-self.window :]]] = 0.0
        return torch.from_numpy(mask)
