"""Candidates for the next token, ranked with the verifier's own noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.device import device_of
from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    best_candidates,
    edit_rows,
    edits,
    gumbel_noise_at,
    perturbed_logits,
    send,
)
from paceline.kernels.sampling import Edits


class Ranker:
    """Ranks a drafter's logits by what the verifier will probably choose, for one generation.

    The verifier takes ``argmax [filter(logits / T) + g(seed, t, v)]``. With the same g added to the
    drafter's logits, a drafter like the target ranks the verifier's choice high although it is
    random (coupling by shared noise; one child is right with probability at least
    (1 - TV) / (1 + TV), Daliri et al.). All nodes of a tree with siblings get the penalties after
    the text: penalties of their paths would change little of what is drafted.

    Confidence of a token: at T = 0 its probability; otherwise the softmax of the perturbed logits.
    Both are at most 1 and sum to at most 1 over siblings, so survival never rises along a path.

    Under rejection sampling one token is drawn from the likeliest ``candidates``, with the draws
    that the verifier checks. Its confidence is the mean of their largest probability and 1. It must
    not depend on the drawn token, because it decides whether the token is verified (DSpark, 3.2.2).
    Not thread-safe.
    """

    def __init__(
        self,
        params: SamplingRules,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
        candidates: int,
        drafted: Tensor | None = None,
        drafted_on_device: Tensor | None = None,
    ) -> None:
        """Create a ranker for a text of ``prompt`` and emitted ``output``, on which penalties
        depend. Only ids below ``vocab_size`` are drafted; rejection sampling draws from so many
        likeliest ``candidates``. ``drafted`` has the target's token id of each logit, rising, int64
        ``[R]`` on the CPU, ``drafted_on_device`` the same on the device of the logits; None if
        logit i is of token i."""
        self.params = params
        self._vocab_size = vocab_size
        self._candidates = candidates
        # Number of logits that candidates are taken of, the first ones.
        self.count = vocab_size if drafted is None else int((drafted < vocab_size).sum())
        self._drafted = None
        if drafted is not None:
            there = drafted if drafted_on_device is None else drafted_on_device
            self._drafted = there[: self.count]
        self._history = History(prompt, output) if params.penalised else History(())

    @property
    def plain(self) -> bool:
        """Whether logits, temperature and noise alone rank candidates."""
        filtered = self.params.filtered and not self.params.greedy
        return not (filtered or self.params.penalised or self.params.rejection)

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What texts have in common whose candidates are ranked together."""
        return self.count, self.params.penalised, self.params.rejection

    def extend(self, tokens: Sequence[int]) -> None:
        """Add emitted tokens, which penalties depend on."""
        if self.params.penalised:
            for token in tokens:
                self._history.push(token)

    def edits(self, chain: Sequence[int]) -> Edits:
        """Return penalties and bias of the token after the text and a chain of drafted tokens."""
        for token in chain:
            self._history.push(token)
        changes = edits(self.params, self._history)
        for _ in chain:
            self._history.pop()
        return changes

    def rank(
        self, logits: Tensor, position: int, width: int, chain: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Rank at most ``width`` candidates for the token at an absolute position, without
        rejection sampling, by logits ``[F, V]`` or, of drafted tokens alone, ``[F, R]``; penalties
        depend on a ``chain`` of drafted tokens too. Returns token ids, int64 ``[F, w]``, best
        first, and the logs of their confidences, float32 ``[F, w]``; -inf for tokens that the
        filter removes."""
        if device_of(logits.device).runs_beside:
            return rank_rows([self], logits, [position], width, chain)
        params, drafted = self.params, self._drafted
        if params.penalised:
            logits, drafted = penalised([self], logits, chain), None
        scores, temperature, noise = logits[:, : self._size(drafted)], params.temperature, None
        if params.greedy:
            temperature = 1.0
        else:
            if params.filtered:
                rows = len(scores)
                scores = perturbed_logits(scores, [params] * rows, [-1] * rows)  # without noise
                temperature = 1.0
            ids = torch.arange(scores.shape[1]) if drafted is None else drafted
            noise = gumbel_noise_at(params.seed, position, ids)
        best, logs = best_candidates(scores, min(width, scores.shape[1]), temperature, noise)
        return best if drafted is None else drafted[best], logs

    def draw(
        self, logits: Tensor, position: int, chain: Sequence[int] = ()
    ) -> tuple[int, float, Proposal]:
        """Draw the token at an absolute position by rejection sampling's rule, by logits ``[V]`` or
        ``[R]`` on any device; penalties depend on a ``chain`` of drafted tokens too. Returns the
        token, the log of its confidence, and the distribution that it was drawn from."""
        whole = penalised([self], logits[None], chain)[:, : self._vocab_size].cpu()
        (scores,) = perturbed_logits(whole, [self.params], [-1])
        proposal = Proposal.likeliest(scores, self._candidates)
        confidence = torch.tensor((1 + proposal.peak) / 2)
        return proposal.draw(self.params.seed, position), float(confidence.log()), proposal

    def _size(self, drafted: Tensor | None) -> int:
        return self._vocab_size if drafted is None else len(drafted)


def rank_rows(
    rankers: Sequence[Ranker],
    logits: Tensor,
    positions: Sequence[int],
    width: int,
    chain: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Rank candidates of several texts of one :attr:`Ranker.kind` on a GPU, by logits ``[S F, V]``.
    Other arguments are as for :meth:`Ranker.rank`, one position a text and a ``chain`` only for one
    text, and so is what is returned, on the device of the logits."""
    first, rows = rankers[0], len(logits) // len(rankers)
    params = [ranker.params for ranker in rankers for _ in range(rows)]
    drafted = first._drafted
    if first.params.penalised:
        logits, drafted = penalised(rankers, logits, chain), None
    scores = logits[:, : first._size(drafted)]
    if not all(rules.greedy for rules in params):
        repeated = [position for position in positions for _ in range(rows)]
        scores = perturbed_logits(scores, params, repeated, drafted)
    best, logs = best_candidates(scores.float(), min(width, scores.shape[1]))
    return best if drafted is None else drafted[best], logs


def penalised(rankers: Sequence[Ranker], logits: Tensor, chain: Sequence[int] = ()) -> Tensor:
    """Return float32 logits of the whole vocabulary, ``[S F, V]``, with penalties; -inf for tokens
    that are not drafted."""
    first, rows = rankers[0], len(logits) // len(rankers)
    if first._drafted is None:
        whole = logits.to(torch.float32, copy=True).contiguous()
    else:
        size = first._vocab_size
        whole = torch.full((len(logits), size), -torch.inf, device=logits.device)
        whole[:, first._drafted] = logits[:, : first.count].float()
    if first.params.penalised:
        changes = [ranker.edits(chain) for ranker in rankers]
        edit_rows(whole, range(len(whole)), [change for change in changes for _ in range(rows)])
    return whole


def draw_rows(
    rankers: Sequence[Ranker],
    logits: Tensor,
    positions: Sequence[int],
    proposals: Sequence[list[Proposal]],
) -> tuple[Tensor, Tensor]:
    """Draw one token of each text by rejection sampling's rule, and add to its ``proposals``.
    Returns as :meth:`Ranker.rank`, one candidate a text, on the device of the logits."""
    drawn = list(map(Ranker.draw, rankers, logits, positions))
    for (_, _, proposal), earlier in zip(drawn, proposals, strict=True):
        earlier.append(proposal)
    ids, logs = (torch.tensor([[draw[n]] for draw in drawn]) for n in (0, 1))
    return send(ids, logits.device), send(logs, logits.device)
