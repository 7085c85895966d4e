"""What ``dspark`` keeps for one generation: its context, and the newest block and tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import StateReader
from paceline.drafter.methods.base import Budget, DraftSequence, Generation, Update
from paceline.drafter.methods.beam import Beam
from paceline.drafter.methods.dspark_heads import Places, Verdict
from paceline.drafter.methods.ranking import Ranker
from paceline.drafter.tree import Tree
from paceline.service.sampling import sampling_params

if TYPE_CHECKING:
    from paceline.drafter.methods.dspark import DSparkDrafter


class DSparkSequence(DraftSequence):
    """One generation of ``dspark``.

    A round takes in the hidden states that came since the last one, runs the backbone once over the
    block behind them, and grows a tree from it by the heads alone: all prefixes of a level share
    the backbone's state of their place.
    """

    def __init__(self, drafter: DSparkDrafter, generation: Generation, states: StateReader) -> None:
        self.states = states
        self.length = len(generation.tokens)
        """Tokens of the text."""
        self.anchor = generation.tokens[-1]
        """The newest of them."""
        self.beam: Beam | None = None
        """The tree of the round; None if it has none."""
        self.context = drafter.backbone.new_context()
        self._drafter = drafter
        self._hidden = self._logits = torch.empty(0)
        self._state: Tensor | None = None
        prompt = generation.prompt_length
        self._ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=generation.tokens[:prompt],
            output=generation.tokens[prompt:],
            vocab_size=min(generation.vocab_size, drafter.backbone.config.vocab_size),
            candidates=drafter.options.candidates,
        )
        self._widths = self._ranker.widths(drafter.options.widths)

    @property
    def backlog(self) -> int:
        return max(0, self._readable - self.context.wanted(self._readable))

    @property
    def wants_level(self) -> bool:
        """Whether the tree would gain from another level."""
        return self.beam is not None and self.beam.wants_level

    @property
    def at_root(self) -> bool:
        """Whether the tree has no level yet."""
        return self.beam is not None and self.beam.level == 0

    def extend(self, update: Update) -> None:
        self.beam = None
        if update.tokens:
            self.anchor = update.tokens[-1]
        self.length += len(update.tokens)
        self._ranker.extend(update.tokens)

    def warm(self, limit: int) -> None:
        news = self.news(limit)
        if news is not None:
            self._drafter.backbone.remember([(self.context, *news)])

    def draft(self, budget: Budget) -> Tree:
        return self._drafter.draft_many([(self, budget)])[0]

    def news(self, limit: int | None = None) -> tuple[int, Tensor] | None:
        """Hidden states that are still to be taken in, at most ``limit`` positions of them.

        Returns:
            The first position and the states, ``[n, taps * hidden]``; None if there are none.
        """
        end = self._readable
        begin = self.context.wanted(end)
        if limit is not None:
            end = min(end, begin + limit)
        if begin >= end:
            return None
        first, states = self.states.read(begin, end)
        return (first, states) if len(states) else None

    def begin(self, budget: Budget) -> bool:
        """Start a tree, unless there is no room for one, or the context ends before the anchor.

        Hidden states that are still on their way would leave a gap that no draft gets over.

        Raises:
            Exception: What ``states.check()`` raises: the target's cache is there no more.
        """
        self.beam = None
        config, options = self._drafter.backbone.config, self._drafter.options
        depth = min(budget.depth, self._drafter.max_depth, config.max_position - self.length + 1)
        if budget.nodes <= 0 or depth <= 0:
            return False
        self.states.check()
        if self._readable < self.length - 1 or self.length < 2:
            return False
        limits = Budget(nodes=min(budget.nodes, options.max_nodes), depth=depth)
        self.beam = Beam(limits, self._widths, options.min_survival)
        self._state = None
        return True

    def take_block(self, hidden: Tensor, logits: Tensor) -> None:
        """Keep what the backbone made of the block, ``[levels, hidden]`` and ``[levels, V]``."""
        self._hidden, self._logits = hidden, logits

    def places(self) -> Places:
        """What the heads have to look at for the next level."""
        beam = self._growing()
        tokens = [beam.tokens[node] for node in beam.frontier] if beam.level else [self.anchor]
        hidden = self._hidden[beam.level].expand(len(tokens), -1)
        before = torch.tensor(tokens, device=hidden.device)
        return Places(hidden, before, self._state)

    def add_level(self, places: Places, verdict: Verdict) -> None:
        """Take in what the heads said of :meth:`places`."""
        beam = self._growing()
        rows = len(places.before)
        logits = self._logits[beam.level].expand(rows, -1)
        if verdict.bias is not None:
            logits = logits + verdict.bias
        parents = beam.frontier if beam.level else range(-1, 0)
        prefixes = [beam.path(node) for node in beam.frontier] if beam.level else [[]]
        position = self.length + beam.level
        ranked = self._ranker.rank(logits, position, prefixes, beam.width)
        if verdict.log_confidence is not None:
            chain = set(self._widths) == {1}
            logs = confident(ranked.logs, verdict.log_confidence.cpu(), chain=chain)
            ranked = ranked._replace(logs=logs)
        beam.add_level(ranked)
        if verdict.state is not None:
            kept = [beam.parents[node] - parents.start for node in beam.frontier]
            self._state = verdict.state[kept]

    def end(self) -> None:
        """Let go of the block.

        Raises:
            Exception: What ``states.check()`` raises: the cache went while it was being read.
        """
        self._forget_block()
        self.states.check()

    def close(self) -> None:
        self.beam = None
        self._forget_block()

    def _forget_block(self) -> None:
        self._hidden = self._logits = torch.empty(0)
        self._state = None

    @property
    def _readable(self) -> int:
        """Positions below this may be read. The verifier may be ahead of this text; what it knows
        of the future is not read."""
        return min(self.states.committed, self.length - 1)

    def _growing(self) -> Beam:
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam


def confident(logs: Tensor, log_confidence: Tensor, *, chain: bool) -> Tensor:
    """Confidences of children, by what the head says of their place.

    In a chain the head's word stands for the only child (DSpark, equation 7). Siblings share it:
    the likeliest is no more certain than the head says, and all keep their proportions.

    Args:
        logs: Logs of the ranker's confidences, ``[R, w]``, best first.
        log_confidence: Log of the head's, ``[R]``.
        chain: Whether no node has a sibling.

    Returns:
        Logs, ``[R, w]``; those of siblings still add up to at most 1.
    """
    if chain:
        return torch.where(logs == -torch.inf, logs, log_confidence[:, None])
    return logs + (log_confidence[:, None] - logs[:, :1]).clamp(max=0.0)
