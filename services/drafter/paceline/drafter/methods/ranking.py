"""Ranks candidates for the next token with the verifier's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import (
    History,
    Proposal,
    SamplingParams,
    best_candidates,
    filter_logits,
    gumbel_noise,
    gumbel_noise_at,
)

_SMALL_VOCAB = 1 << 14
"""Up to this size, noise for all tokens takes less time than selecting candidates per row."""


class Ranked(NamedTuple):
    """Candidates after each of F paths."""

    ids: Tensor
    """Token ids, int64 ``[F, w]``, best first."""

    logs: Tensor
    """Logs of their confidences, float32 ``[F, w]``; -inf for tokens that the filter removed."""

    proposal: Proposal | None = None
    """Distribution of the only candidate, under rejection sampling."""


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
    ) -> None:
        """Creates a ranker.

        Args:
            params: Sampling parameters of the verifier.
            prompt: Prompt tokens, which penalties depend on.
            output: Emitted tokens.
            vocab_size: Only ids below it are drafted.
            candidates: At T > 0, number of likeliest tokens that noise is added to. The others are
                left out, unless the vocabulary is small.
            drafted: The target's token id of each logit, rising, int64 ``[R]`` on the CPU; None:
                logit i is of token i.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._candidates = candidates
        self._drafted = None if drafted is None else drafted[drafted < vocab_size]
        self._history = History(prompt, output) if params.penalised else History(())
        self._by_row = params.penalised or (
            not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        )

    def widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the nodes of each level: ``widths``, or 1 under rejection sampling."""
        return (1,) if self._params.rejection else widths

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens, which penalties depend on."""
        if self._params.penalised:
            for token in tokens:
                self._history.push(token)

    def rank(
        self, logits: Tensor, position: int, paths: Sequence[Sequence[int]], width: int
    ) -> Ranked:
        """Ranks candidates for one position after each of several paths.

        Args:
            logits: ``[F, V]`` or, of drafted tokens alone, ``[F, R]``, of any float type and
                device, of the last token of each path. If possible they are reduced to candidates
                before they are copied to the CPU.
            position: Absolute position of the token to be chosen.
            paths: F paths of drafted tokens after the text.
            width: Most candidates per path.

        Returns:
            At most ``width`` candidates per path, on the CPU. Under rejection sampling, which takes
            one path, the token that was drawn.
        """
        drafted = self._drafted
        if self._by_row or self._params.rejection:
            logits, drafted = self._all_tokens(logits.cpu()), None
        count = self._vocab_size if drafted is None else len(drafted)
        scores = self._filtered(logits[:, :count], paths)
        if self._params.rejection:
            return self._drawn(scores, position)
        ids = None if drafted is None else drafted.to(scores.device).expand(len(scores), -1)
        if not self._params.greedy:
            scores, ids = self._perturbed(scores, ids, position)
        best, logs = best_candidates(scores, min(width, scores.shape[1]))
        return Ranked((best if ids is None else ids.gather(1, best)).cpu(), logs.cpu())

    def _all_tokens(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary: -inf for tokens that are not drafted."""
        if self._drafted is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._drafted] = logits[:, : len(self._drafted)]
        return whole

    def _drawn(self, scores: Tensor, position: int) -> Ranked:
        (row,) = scores
        proposal = Proposal.likeliest(row, self._candidates)
        token = proposal.draw(self._params.seed, position)
        return Ranked(
            torch.tensor([[token]]), torch.tensor([[(1 + proposal.peak) / 2]]).log(), proposal
        )

    def _perturbed(
        self, scores: Tensor, ids: Tensor | None, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Adds noise. Takes and returns scores and their token ids; None: all ids in order."""
        seed, vocab = self._params.seed, scores.shape[1]
        if ids is None and vocab <= max(_SMALL_VOCAB, self._candidates):
            return scores.cpu() + gumbel_noise(seed, position, vocab), None
        top, best = scores.topk(min(self._candidates, vocab))
        ids = (best if ids is None else ids.gather(1, best)).cpu()
        return top.cpu() + gumbel_noise_at(seed, position, ids.flatten()).view_as(top), ids

    def _filtered(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        if self._by_row:
            rows = [self._filtered_row(row, path) for row, path in zip(logits, paths, strict=True)]
            return torch.stack(rows)
        scores = logits.float()
        return scores if self._params.greedy else scores / self._params.temperature

    def _filtered_row(self, row: Tensor, path: Sequence[int]) -> Tensor:
        if not self._params.penalised:
            return filter_logits(row, self._params, self._history)
        for token in path:
            self._history.push(token)
        try:
            return filter_logits(row, self._params, self._history)
        finally:
            for _ in path:
                self._history.pop()
