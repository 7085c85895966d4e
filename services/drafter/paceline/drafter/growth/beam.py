"""A token tree that grows level by level, each level by one forward pass over its frontier.

Candidates for the next token are ranked with the verifier's own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.drafter.generation import Budget
from paceline.kernels import (
    History,
    Proposal,
    SamplingParams,
    best_candidates,
    edit_rows,
    edits,
    filter_logits,
    gumbel_noise_at,
    perturbed_logits,
)
from paceline.tree import TokenTree

_T = TypeVar("_T")

_SMALL_VOCAB = 1 << 14  # noise for this many tokens a row takes less time than selecting candidates


class Ranked(NamedTuple):
    """Candidates after each of F paths."""

    ids: Tensor  # token ids, int64 ``[F, w]``, best first
    logs: Tensor
    """Logs of their confidences, float32 ``[F, w]``; -inf for tokens that the filter removed."""

    proposal: Proposal | None = None  # distribution of the only candidate, under rejection sampling


class Ranker:
    """Ranks a drafter's logits by what the verifier will probably choose, for one generation.

    The verifier takes ``argmax [filter(logits / T) + g(seed, t, v)]``. With the same g added to the
    drafter's logits, a drafter like the target ranks the verifier's choice high although it is
    random (coupling by shared noise; one child is right with probability at least
    (1 - TV) / (1 + TV), Daliri et al.).

    Confidence of a token: at T = 0 its probability; otherwise the softmax of the perturbed logits.
    Both are at most 1 and sum to at most 1 over siblings, so survival never rises along a path.

    Under rejection sampling one token is drawn from the likeliest ``candidates``, with the draws
    that the verifier checks. Its confidence is the mean of their largest probability and 1. It must
    not depend on the drawn token, because it decides whether the token is verified (DSpark, 3.2.2).
    Not thread-safe.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
        candidates: int,
        drafted: Tensor | None = None,
        drafted_on_device: Tensor | None = None,
    ) -> None:
        """Create a ranker.

        Args:
            params: Sampling parameters of the verifier.
            prompt: Prompt tokens, which penalties depend on.
            output: Emitted tokens.
            vocab_size: Only ids below it are drafted.
            candidates: At T > 0, number of likeliest tokens that noise is added to. The others are
                left out, unless the vocabulary is small.
            drafted: The target's token id of each logit, rising, int64 ``[R]`` on the CPU; None:
                logit i is of token i.
            drafted_on_device: The same on the device of the logits, if that is another one.
        """
        self.params = params  # sampling parameters of the verifier
        self._vocab_size = vocab_size
        self._candidates = candidates
        self._drafted = None if drafted is None else drafted[drafted < vocab_size]
        self.drafted_on_device = (
            None if drafted_on_device is None else drafted_on_device[: self.count]
        )  # the target's id of each logit on their device, int64; None: logit i is of token i
        self._history = History(prompt, output) if params.penalised else History(())
        self._by_row = params.penalised or (
            not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        )

    def widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the nodes of each level: ``widths``, or 1 under rejection sampling."""
        return (1,) if self.params.rejection else widths

    @property
    def count(self) -> int:
        """Logits that candidates are taken of, the first ones."""
        return self._vocab_size if self._drafted is None else len(self._drafted)

    @property
    def by_paths(self) -> bool:
        """Whether a path's tokens change the candidates after it, or they are drawn one by one."""
        return self.params.penalised or self.params.rejection

    def plain_logits(self) -> int:
        """Return how many of a CPU's logits, the first ones, have candidates ranked by logits,
        temperature and noise alone; 0 if the others have a part in it, or filters."""
        count = self.count
        few = self.params.greedy or count <= max(_SMALL_VOCAB, self._candidates)
        return count if few and not self._by_row and not self.params.rejection else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add emitted tokens, which penalties depend on."""
        if self.params.penalised:
            for token in tokens:
                self._history.push(token)

    def rank(
        self, logits: Tensor, position: int, paths: Sequence[Sequence[int]], width: int
    ) -> Ranked:
        """Rank candidates for one position after each of several paths.

        Args:
            logits: ``[F, V]`` or, of drafted tokens alone, ``[F, R]``, of any float type and
                device, of the last token of each path. A GPU reduces them to candidates.
            position: Absolute position of the token to be chosen.
            paths: F paths of drafted tokens after the text.
            width: Most candidates per path.

        Returns:
            At most ``width`` candidates per path, on the CPU. Under rejection sampling, which takes
            one path, the token that was drawn.
        """
        if not logits.is_cpu and not self.params.rejection:
            return self._rank_on_device(logits, position, paths, width)
        drafted = self._drafted
        if self._by_row or self.params.rejection:
            logits, drafted = self._all_tokens(logits.cpu(), drafted), None
        count = self._vocab_size if drafted is None else len(drafted)
        scores, temperature = logits[:, :count].float(), self.params.temperature
        if self._by_row:
            rows = [self._filtered_row(row, path) for row, path in zip(scores, paths, strict=True)]
            scores, temperature = torch.stack(rows), 1.0
        if self.params.rejection:
            return self._drawn(scores / temperature, position)
        width, seed = min(width, count), self.params.seed
        if self.params.greedy:
            best, logs = best_candidates(scores, width)
        elif count <= max(_SMALL_VOCAB * len(scores), self._candidates):
            ids = torch.arange(count) if drafted is None else drafted
            noise = gumbel_noise_at(seed, position, ids)
            best, logs = best_candidates(scores, width, temperature, noise)
        else:
            top, best = scores.topk(self._candidates)
            ids = best if drafted is None else drafted[best]
            noise = gumbel_noise_at(seed, position, ids.flatten()).view_as(ids)
            best, logs = best_candidates(top / temperature + noise, width)
            return Ranked(ids.gather(1, best), logs)
        return Ranked(best if drafted is None else drafted[best], logs)

    def _rank_on_device(
        self, logits: Tensor, position: int, paths: Sequence[Sequence[int]], width: int
    ) -> Ranked:
        """Rank on the device of the logits, with noise for all tokens."""
        drafted = self.drafted_on_device
        assert (drafted is None) == (self._drafted is None)
        if self.params.penalised:
            logits, drafted = self._all_tokens(logits, drafted), None
            logits = logits[:, : self._vocab_size].to(torch.float32, copy=True)
            edit_rows(logits, range(len(paths)), [self._after(path, edits) for path in paths])
        count = self._vocab_size if drafted is None else len(drafted)
        rows = len(logits)
        ids, logs = rank_rows(
            logits[:, :count], [self.params] * rows, [position] * rows, drafted, width
        )
        return Ranked(ids.cpu(), logs.cpu())

    def _all_tokens(self, logits: Tensor, drafted: Tensor | None) -> Tensor:
        """Logits of the whole vocabulary: -inf for tokens that are not drafted."""
        if drafted is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        whole[:, drafted] = logits[:, : len(drafted)]
        return whole

    def _drawn(self, scores: Tensor, position: int) -> Ranked:
        (row,) = scores
        proposal = Proposal.likeliest(row, self._candidates)
        token = proposal.draw(self.params.seed, position)
        return Ranked(
            torch.tensor([[token]]), torch.tensor([[(1 + proposal.peak) / 2]]).log(), proposal
        )

    def _filtered_row(self, row: Tensor, path: Sequence[int]) -> Tensor:
        return self._after(path, lambda params, history: filter_logits(row, params, history))

    def _after(self, path: Sequence[int], found: Callable[[SamplingParams, History], _T]) -> _T:
        """What a function gives for the history after a path of drafted tokens."""
        if not self.params.penalised:
            return found(self.params, self._history)
        for token in path:
            self._history.push(token)
        try:
            return found(self.params, self._history)
        finally:
            for _ in path:
                self._history.pop()


def rank_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    drafted: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Rank candidates for one position of each row on the device of the logits.

    Args:
        logits: ``[R, V]`` of any float type, with penalties.
        params: Sampling parameters by row.
        positions: Positions of the tokens to be chosen, by row.
        drafted: The target's id of each logit, int64 ``[V]``; None: its index.
        width: Most candidates of a row.

    Returns:
        Token ids, int64 ``[R, w]``, best first, and the logs of their confidences, float32.
    """
    if not all(each.greedy for each in params):
        logits = perturbed_logits(logits, params, positions, drafted)
    return best_tokens(logits, drafted, width)


def best_tokens(scores: Tensor, drafted: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """As :func:`rank_rows`, from the scores themselves."""
    best, logs = best_candidates(scores.float(), min(width, scores.shape[1]))
    return best if drafted is None else drafted[best], logs


@dataclass(frozen=True)
class Chain:
    """Nodes drafted ahead, each the child of the one before; the first follows the text."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    proposals: Sequence[Proposal]
    fed: int  # leading nodes whose KV is in the cache, behind that of the text


class Beam:
    """The tree of one sequence in one round.

    Dynamic beam: each level keeps the likeliest paths over all its parents, and only nodes that
    could still be among the ``nodes`` best of the whole tree are expanded (after EAGLE-2, section
    4). A node's score is the log of its survival. Nodes of a level are sorted by score, so that
    the frontier, the nodes to be expanded, comes first.

    Nodes are numbered in the order in which they are added. A forward pass over a KV cache is fed
    nodes ``trunk`` to ``frontier.stop`` as a tree block whose node i uses cache slot ``start + i``.
    The trunk, leading levels of one node each that were fed before, is not fed again.
    """

    def __init__(
        self,
        budget: Budget,
        widths: Sequence[int],
        min_survival: float,
        drafted: Chain | None = None,
    ) -> None:
        """Create a tree of the anchor and the nodes that were drafted ahead.

        Args:
            budget: Maximum number of nodes and greatest depth of the result.
            widths: Nodes of each level; the last number applies to all deeper levels.
            min_survival: Nodes less likely than this are not expanded.
            drafted: Nodes drafted ahead. Those beyond the depth, and those that would not have
                been expanded, are dropped.
        """
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.log_probs: list[float] = []
        self.proposals: list[Proposal] = []
        self.level = 0  # number of levels
        self.frontier = range(-1, 0)  # nodes to be expanded next; -1 is the anchor
        self.trunk = 0
        self.fed = 0  # nodes below this have been fed: their KV is in the cache
        self.limits = budget  # maximum number of nodes and greatest depth
        self._widths = widths
        self._min_score = math.log(min_survival) if min_survival > 0 else -math.inf
        if drafted is not None:
            self._take(drafted)

    @property
    def width(self) -> int:
        """Nodes of the next level."""
        return self._widths[min(self.level, len(self._widths) - 1)]

    @property
    def grows(self) -> bool:
        """Whether another level fits the budget and has a node to expand."""
        return self.level < self.limits.depth and len(self.frontier) > 0

    def block(self) -> tuple[list[int], tuple[int, ...]]:
        """Return tokens and parents of the block to feed; the frontier is at its end."""
        part = slice(self.trunk, self.frontier.stop)
        parents = tuple(max(-1, parent - self.trunk) for parent in self.parents[part])
        return self.tokens[part], parents

    def mark_fed(self) -> None:
        """Record that :meth:`block` was fed."""
        self.fed = self.frontier.stop
        if len(self.tokens) == self.level:  # one node per level so far
            self.trunk = self.fed

    def add_level(self, ranked: Ranked, log_confidences: Sequence[float] | None = None) -> None:
        """Add children of the frontier: the likeliest of the choices after each of its nodes.

        Args:
            ranked: The choices.
            log_confidences: Of a confidence head, for each node of the frontier. In a chain the
                only child gets it as it is (DSpark, equation 7). Siblings are scaled together, so
                that the likeliest is no more confident than the head.
        """
        chain = set(self._widths) == {1}
        found: list[tuple[float, float, int, int]] = []
        rows = zip(self.frontier, ranked.ids.tolist(), ranked.logs.tolist(), strict=True)
        for index, (parent, ids, logs) in enumerate(rows):
            above = self.scores[parent] if parent >= 0 else 0.0
            change = 0.0
            if log_confidences is not None and logs[0] > -math.inf:
                change = log_confidences[index] - logs[0]
                change = change if chain else min(0.0, change)
            for token, log in zip(ids, logs, strict=True):
                log = min(0.0, log + change)  # rounding may leave it a little above 0
                found.append((above + log, log, parent, token))
        found.sort(key=itemgetter(0), reverse=True)
        start = len(self.tokens)
        for score, log, parent, token in found[: self.width]:
            if score == -math.inf:
                break
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)
            self.log_probs.append(log)
        if ranked.proposal is not None:
            self.proposals.append(ranked.proposal)
        self._end_level(start)

    def expand_last(self) -> bool:
        """Make the last node of a chain the frontier, whatever its score and the budget.

        Returns False for a tree with siblings, and if nothing followed the last node.
        """
        last = len(self.tokens) - 1
        if last < 0 or last + 1 != self.level:
            return False
        self.frontier = range(last, last + 1)
        return True

    def after(self, tokens: Sequence[int]) -> Chain | None:
        """Return the nodes of a chain behind ``tokens``; None if it does not begin with them."""
        count = len(tokens)
        if len(self.tokens) != self.level or count >= self.level:
            return None
        if self.tokens[:count] != list(tokens):
            return None
        fed = max(0, self.fed - count)
        return Chain(self.tokens[count:], self.log_probs[count:], self.proposals[count:], fed)

    def tree(self) -> TokenTree:
        """Return the best nodes within the budget, sorted by falling survival."""
        # A child scores no more than its parent and has a higher number: parents come first.
        best = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        best = best[: self.limits.nodes]
        index = {node: i for i, node in enumerate(best)} | {-1: -1}
        return TokenTree(
            tuple(self.tokens[node] for node in best),
            tuple(index[self.parents[node]] for node in best),
            tuple(math.exp(self.log_probs[node]) for node in best),
            tuple(self.proposals[: len(best)]),  # only chains have proposals, one per node
        )

    def fed_path(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes on the path that starts with ``tokens``, as far as they were fed."""
        children = {(self.parents[i], self.tokens[i]): i for i in range(self.fed)}
        path: list[int] = []
        node = -1
        for token in tokens:
            child = children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def path(self, node: int) -> list[int]:
        """Return the nodes from the anchor's child down to ``node``; none for the anchor."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def frontier_tokens(self) -> list[list[int]]:
        """Return, for each node of the frontier, the tokens from the anchor's child to it."""
        return [[self.tokens[each] for each in self.path(node)] for node in self.frontier]

    def _take(self, chain: Chain) -> None:
        for token, log in zip(chain.tokens, chain.log_probs, strict=True):
            if not self.grows:
                break
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node - 1)
            self.scores.append(log + (self.scores[-1] if self.scores else 0.0))
            self.log_probs.append(log)
            self._end_level(node)
        self.proposals += chain.proposals[: self.level]
        # The last node is fed again if it is expanded: its logits are not kept.
        self.trunk = self.fed = min(chain.fed, self.level - 1)

    def _end_level(self, start: int) -> None:
        """Choose the frontier among the nodes from ``start`` on."""
        self.level += 1
        # A child scores at most as much as its parent, and loses ties to nodes added before it.
        worst, stop = self._worst_kept_score(), start
        while stop < len(self.scores) and worst < self.scores[stop] >= self._min_score:
            stop += 1
        self.frontier = range(start, stop)

    def _worst_kept_score(self) -> float:
        """Score of the worst node that still fits the budget."""
        if len(self.scores) < self.limits.nodes:
            return -math.inf
        return sorted(self.scores, reverse=True)[self.limits.nodes - 1]
