"""Ranks the next token as the verifier is going to choose it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import (
    History,
    Proposal,
    SamplingParams,
    filter_logits,
    gumbel_noise,
    gumbel_noise_at,
)

_SMALL_VOCAB = 1 << 14
"""Up to here, noise for all tokens takes less time than finding candidates in every row."""


class Ranked(NamedTuple):
    """Choices after each of F paths."""

    ids: Tensor
    """Token ids, int64 ``[F, w]``, best first."""

    logs: Tensor
    """Logs of their confidences, float32 ``[F, w]``; -inf where the filter left nothing."""

    proposal: Proposal | None = None
    """What the only choice was drawn from, under rejection sampling."""


class Ranker:
    """From a drafter's logits to likely choices of the verifier, for one generation.

    The verifier takes ``argmax [filter(logits / T) + g(seed, t, v)]``. With the same g added to the
    drafter's logits, a drafter like the target ranks the verifier's choice high although it is
    random (coupling by shared noise; lower bound (1 - TV) / (1 + TV) for one child, Daliri et al.).

    Confidence of a token: at T = 0 its probability; otherwise the softmax of the perturbed logits.
    Both are at most 1 and sum to at most 1 over siblings, so survival never rises along a path.

    Under rejection sampling nothing is ranked: one token is drawn from the likeliest
    ``candidates``, with the draws that the verifier will check. Its confidence is a plain rule,
    half way from the largest probability there to 1, and says nothing of the token itself, since
    whether a token is looked at must not depend on it (DSpark, 3.2.2).
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
    ) -> None:
        """Make a ranker.

        Args:
            params: How the verifier samples.
            prompt: Prompt tokens; penalties look at them.
            output: Emitted tokens.
            vocab_size: Ids that may be drafted: those below it.
            candidates: At T > 0, noise is added to so many likeliest tokens; the rest is left out,
                unless the vocabulary is so small that this would be slower.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._candidates = candidates
        self._history = History(prompt, output) if params.penalised else History(())
        self._by_row = params.penalised or (
            not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        )

    def widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Nodes of each level: those wanted, or the 1 that can be drawn."""
        return (1,) if self._params.rejection else widths

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of emitted tokens."""
        if self._params.penalised:
            for token in tokens:
                self._history.push(token)

    def rank(
        self, logits: Tensor, position: int, paths: Sequence[Sequence[int]], width: int
    ) -> Ranked:
        """The likeliest choices at one position, after each of several paths.

        Args:
            logits: ``[F, V]`` of any float type, of the last token of each path; on any device,
                and reduced to candidates there before they are copied.
            position: Absolute position of the token to be chosen.
            paths: Drafted tokens behind the text, F paths.
            width: Most choices of each path.

        Returns:
            At most ``width`` choices a path, on the CPU; a drawn one under rejection sampling,
            which takes one path.
        """
        if self._by_row or self._params.rejection:
            logits = logits.cpu()
        scores = self._filtered(logits[:, : self._vocab_size], paths)
        if self._params.rejection:
            return self._drawn(scores, position)
        ids: Tensor | None = None
        if not self._params.greedy:
            scores, ids = self._perturbed(scores, position)
        # Logs only after the choice: rounding could make two scores one.
        best = scores.topk(min(width, scores.shape[1])).indices
        logs = scores.log_softmax(-1).gather(1, best)
        return Ranked((best if ids is None else ids.gather(1, best)).cpu(), logs.cpu())

    def _drawn(self, scores: Tensor, position: int) -> Ranked:
        (row,) = scores
        proposal = Proposal.likeliest(row, self._candidates)
        token = proposal.draw(self._params.seed, position)
        return Ranked(
            torch.tensor([[token]]), torch.tensor([[(1 + proposal.peak) / 2]]).log(), proposal
        )

    def _perturbed(self, scores: Tensor, position: int) -> tuple[Tensor, Tensor | None]:
        """Scores with noise, and whose they are; None for all tokens'."""
        seed, vocab = self._params.seed, scores.shape[1]
        if vocab <= max(_SMALL_VOCAB, self._candidates):
            return scores.cpu() + gumbel_noise(seed, position, vocab), None
        likely, ids = (each.cpu() for each in scores.topk(self._candidates))
        return likely + gumbel_noise_at(seed, position, ids.flatten()).view_as(likely), ids

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
