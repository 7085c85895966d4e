"""Speculative rejection sampling of chains, with position-keyed random numbers.

After Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section
2.3. A token drafted from q is accepted with probability min(1, p / q); a rejected one is replaced
by a sample of the residual norm(max(p - q, 0)). The emitted token is a sample of p for every q that
does not depend on the draws of its own position.

The draws of absolute position t come from Philox4x32-10 as in :mod:`paceline.kernels.noise`, whose
counters end in 0. Here they are ``(t & 0xFFFFFFFF, t >> 32, purpose, 1)``, and the words (w0, w1)
make u as there. Tokens drafted after a rejected one are discarded unread: each draw is used once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.history import History
from paceline.kernels.noise import philox_words
from paceline.kernels.sampling import SamplingParams, filter_logits

_DRAFT, _ACCEPT, _RESIDUAL = range(3)
_SUM_TOLERANCE = 1e-3
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Proposal:
    """A distribution q over a few tokens.

    It is sent unchanged, so that drafter and verifier draw the same token from it.

    Attributes:
        tokens: Different token ids, int64 ``[n]``.
        probabilities: Of each, float32 ``[n]``; their sum is 1 up to rounding.
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]

    @classmethod
    def checked(cls, tokens: Sequence[int], probabilities: Sequence[float]) -> Proposal:
        """Validate a distribution.

        Raises:
            ValueError: It is empty, lists a token twice, has a probability below 0, or a sum that
                is not 1.
        """
        if not tokens or len(tokens) != len(probabilities):
            raise ValueError(
                f"{len(tokens)} tokens with {len(probabilities)} probabilities, expected one each "
                "for at least one"
            )
        ids = np.array(tokens, dtype=np.int64)
        chances = np.array(probabilities, dtype=np.float32)
        if len(np.unique(ids)) != len(ids):
            raise ValueError("a token is listed twice")
        if not (np.isfinite(chances).all() and (chances >= 0).all()):
            raise ValueError("a probability is not a number of 0 or more")
        total = float(chances.sum(dtype=np.float64))
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ValueError(f"the probabilities add up to {total:.4f}, expected 1")
        return cls(ids, chances)

    @classmethod
    def certain(cls, token: int) -> Proposal:
        """The distribution that is certain of one token."""
        return cls(np.array([token], dtype=np.int64), np.ones(1, dtype=np.float32))

    @classmethod
    def likeliest(cls, scores: Tensor, count: int) -> Proposal:
        """The softmax of ``scores``, ``[V]``, truncated to the ``count`` most likely tokens.

        Tokens at -inf are left out; at least one must be finite.
        """
        best = scores.topk(min(count, scores.numel()))
        kept = best.values > -torch.inf
        chances = best.values[kept].float().softmax(0)
        return cls(best.indices[kept].numpy(), chances.numpy())

    @property
    def peak(self) -> float:
        """The largest probability."""
        return float(self.probabilities.max())

    def draw(self, seed: int, position: int) -> int:
        """The sample of q that a drafter takes at an absolute position.

        Raises:
            ValueError: Seed or position out of range.
        """
        weights = self.probabilities.astype(np.float64)
        return int(self.tokens[_pick(weights, _uniform(seed, position, _DRAFT))])


def accept_or_resample(
    logits: Tensor,
    params: SamplingParams,
    position: int,
    history: History,
    drafted: int,
    proposal: Proposal,
) -> int:
    """The drafted token if it is accepted, else a sample of the residual.

    Args:
        logits: float32 or bf16 ``[V]`` on the CPU, of the token before ``position``.
        params: Sampling parameters; the temperature is above 0.
        position: Absolute position of the token.
        history: Tokens before ``position``.
        drafted: The drafted token: ``proposal.draw(params.seed, position)``, or the token that the
            proposal is certain of.
        proposal: The distribution it was drawn from.
    """
    p = filter_logits(logits, params, history).double().softmax(0).numpy()
    q = np.zeros_like(p)
    q[proposal.tokens] = proposal.probabilities
    q /= q.sum()
    if _uniform(params.seed, position, _ACCEPT) * q[drafted] < p[drafted]:
        return drafted
    residual = np.maximum(p - q, 0.0)
    # Empty only if p and q are equal up to rounding.
    weights = residual if residual.any() else p
    return _pick(weights, _uniform(params.seed, position, _RESIDUAL))


def _uniform(seed: int, position: int, purpose: int) -> float:
    """Strictly between 0 and 1."""
    if not 0 <= seed < 1 << 64 or not 0 <= position < 1 << 64:
        raise ValueError(f"seed {seed} or position {position} is no unsigned 64-bit integer")
    words = philox_words((position & _LOW, position >> 32, purpose, 1), (seed & _LOW, seed >> 32))
    return ((words[0] << 20 | words[1] >> 12) + 0.5) * 2.0**-52


def _pick(weights: NDArray[np.float64], u: float) -> int:
    """Index drawn in proportion to weights, by inversion; never one of weight 0."""
    reached = weights.cumsum()
    index = int(np.searchsorted(reached, u * reached[-1], side="right"))
    # By rounding, u times the sum may equal the sum.
    return min(index, int(np.flatnonzero(weights)[-1]))
