"""The drafting method ``scripted``: trees of all kinds around recorded texts."""

from __future__ import annotations

from random import Random

from replay_method import ReplayDrafter, ReplaySequence
from trees import draw_tree

from paceline.drafter import Budget, GenerationInfo, TokenTree


class ScriptedSequence(ReplaySequence):
    """A generation of a recorded text."""

    def draft(self, budget: Budget) -> TokenTree:
        """A tree that the position draws."""
        right = self._record[self._emitted :]
        draws = Random(f"{len(self._record)}/{self._emitted}")
        return draw_tree(draws, right, self._vocab_size, budget.nodes, budget.depth)


class ScriptedDrafter(ReplayDrafter):
    """Needs the file of a recording."""

    method = "scripted"
    max_nodes = 255

    def start(self, generation: GenerationInfo) -> ScriptedSequence:
        """Begin a text."""
        return ScriptedSequence(self, generation)
