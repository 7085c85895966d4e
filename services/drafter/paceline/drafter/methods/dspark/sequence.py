"""The state of one generation of ``dspark``: its context, and the newest block and tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import StateReader
from paceline.drafter.methods.base import Generation, Update
from paceline.drafter.methods.beam_drafter import BeamSequence
from paceline.drafter.methods.dspark.heads import HeadInput, HeadOutput

if TYPE_CHECKING:
    from paceline.drafter.methods.dspark.drafter import DSparkDrafter


class DSparkSequence(BeamSequence):
    """One generation of ``dspark``.

    A round adds the hidden states since the last round to the context, runs the backbone once over
    the block after it, and grows a tree with the heads alone. All paths of a level share the
    backbone's hidden state of the level.
    """

    _drafter: DSparkDrafter

    def __init__(self, drafter: DSparkDrafter, generation: Generation, states: StateReader) -> None:
        super().__init__(drafter, generation)
        self.states = states
        self.anchor = generation.tokens[-1]
        """Newest token of the text."""
        self.context = drafter.backbone.new_context()
        self._hidden = self._logits = torch.empty(0)
        self._state: Tensor | None = None

    @property
    def backlog(self) -> int:
        return max(0, self._readable - self.context.next_position(self._readable))

    def extend(self, update: Update) -> None:
        if update.tokens:
            self.anchor = update.tokens[-1]
        super().extend(update)

    def warm(self, limit: int) -> None:
        new = self.new_states(limit)
        if new is not None:
            self._drafter.backbone.add_states([(self.context, *new)])

    def new_states(self, limit: int | None = None) -> tuple[int, Tensor] | None:
        """Reads hidden states that the context lacks, of at most ``limit`` positions.

        Returns:
            The first position and the states, ``[n, taps * hidden]``; None if there are none.
        """
        end = self._readable
        begin = self.context.next_position(end)
        if limit is not None:
            end = min(end, begin + limit)
        if begin >= end:
            return None
        first, states = self.states.read(begin, end)
        return (first, states) if len(states) else None

    def prepare(self) -> bool:
        """Returns False unless the hidden states of all positions before the anchor are there."""
        self.states.check()
        self._state = None
        return self._readable >= self.length - 1 and self.length >= 2

    def set_block(self, hidden: Tensor, logits: Tensor) -> None:
        """Sets the backbone's output of the block, ``[levels, hidden]`` and ``[levels, V]``."""
        self._hidden, self._logits = hidden, logits

    def head_input(self) -> HeadInput:
        """Returns the input of the heads for the next level."""
        beam = self.tree
        tokens = [beam.tokens[node] for node in beam.frontier] if beam.level else [self.anchor]
        hidden = self._hidden[beam.level].expand(len(tokens), -1)
        return HeadInput(hidden, torch.tensor(tokens, device=hidden.device), self._state)

    def add_level(self, output: HeadOutput) -> None:
        """Adds a level to the tree from the heads' output for :meth:`head_input`."""
        beam, parents = self.tree, self.tree.frontier
        logits = self._logits[beam.level].expand(len(parents), -1)
        if output.bias is not None:
            logits = logits + output.bias
        ranked = self.rank(logits)
        if output.log_confidence is not None:
            logs, head = ranked.logs, output.log_confidence.cpu()[:, None]
            if set(self._widths) == {1}:  # a chain's only child gets it as it is (equation 7)
                logs = torch.where(logs == -torch.inf, logs, head)
            else:  # siblings are scaled together: the likeliest is no more confident than the head
                logs = logs + (head - logs[:, :1]).clamp(max=0.0)
            ranked = ranked._replace(logs=logs)
        beam.add_level(ranked)
        if output.state is not None:
            self._state = output.state[[beam.parents[n] - parents.start for n in beam.frontier]]

    def finish(self) -> None:
        self._clear_block()
        self.states.check()

    def close(self) -> None:
        super().close()
        self._clear_block()

    def _clear_block(self) -> None:
        self._hidden = self._logits = torch.empty(0)
        self._state = None

    @property
    def _readable(self) -> int:
        """Positions below this are read: committed ones, and none beyond this text's anchor."""
        return min(self.states.committed, self.length - 1)
