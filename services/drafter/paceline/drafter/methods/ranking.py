"""Ranks the next token as the verifier is going to choose it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels import History, SamplingParams, filter_logits, gumbel_noise_at


class Ranker:
    """From a drafter's logits to likely choices of the verifier, for one generation.

    The verifier takes ``argmax [filter(logits / T) + g(seed, t, v)]``. With the same g added to the
    drafter's logits, a drafter like the target ranks the verifier's choice high although it is
    random (coupling by shared noise; lower bound (1 - TV) / (1 + TV) for one child, Daliri et al.).

    Confidence of a token: at T = 0 its probability; otherwise the softmax of the perturbed logits.
    Both are at most 1 and sum to at most 1 over siblings, so survival never rises along a path.
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
            candidates: At T > 0, noise is added to so many likeliest tokens; the rest is left out.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._candidates = candidates
        self._history = History(prompt, output) if params.penalised else History(())
        self._by_row = params.penalised or (
            not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of emitted tokens."""
        if self._params.penalised:
            for token in tokens:
                self._history.push(token)

    def rank(
        self, logits: Tensor, position: int, paths: Sequence[Sequence[int]], width: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest choices at one position, after each of several paths.

        Args:
            logits: ``[F, V]`` of any float type, of the last token of each path.
            position: Absolute position of the token to be chosen.
            paths: Drafted tokens behind the text, F paths.
            width: Most choices of each path.

        Returns:
            Token ids, int64 ``[F, w]``, best first, and the logs of their confidences, float32
            ``[F, w]``; -inf where the filter left nothing. w is at most ``width``.
        """
        scores = self._filtered(logits[:, : self._vocab_size], paths)
        width = min(width, scores.shape[1])
        if self._params.greedy:
            # Logs only after the choice, where rounding could make two scores one.
            ids = scores.topk(width).indices
            return ids, scores.log_softmax(-1).gather(1, ids)
        best, ids = scores.topk(min(self._candidates, scores.shape[1]))
        noise = gumbel_noise_at(self._params.seed, position, ids.flatten())
        perturbed = best + noise.view_as(best)
        order = perturbed.topk(min(width, ids.shape[1])).indices
        return ids.gather(1, order), perturbed.log_softmax(-1).gather(1, order)

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
