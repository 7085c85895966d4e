"""Sampling of tokens from logits.

The sampling contract: the token at absolute position t is
``argmax_v [filter(logits_t)_v + g(seed, t, v)]``, a function of the logits, the tokens before t,
the parameters and the seed alone. The filter applies, in this order, repetition penalty (prompt and
output), presence and frequency penalties (output), logit bias, temperature, then min_p, top_k and
top_p, each to the tokens that remain. Ties go to the lower token id. All arithmetic is float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._native import library
from paceline.kernels.history import History
from paceline.kernels.noise import gumbel_noise, gumbel_noise_at

_FIRST_TOP_P_GUESS = 256


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        temperature: 0: the most likely token; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens with this probability or more; 1 all.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0 all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in the
            prompt or the output; 1 is off.
        presence_penalty: Subtracted from the logit of every token in the output; 0 is off.
        frequency_penalty: Subtracted per occurrence in the output; 0 is off.
        logit_bias: Pairs (token id, value added to its logit).
        seed: Unsigned 64-bit seed of the noise.
        rejection: Drafted tokens are accepted and replaced by rejection sampling
            (:mod:`paceline.kernels.rejection`), not by equality with the chosen token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    rejection: bool = False

    def __post_init__(self) -> None:
        self._require("temperature", 0 <= self.temperature < math.inf, "finite, 0 or more")
        self._require("top_k", self.top_k >= 0, "0 (off) or more")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf,
                      "finite, above 0")  # fmt: skip
        self._require("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        self._require("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        self._require("logit_bias", all(t >= 0 and b < math.inf for t, b in self.logit_bias),
                      "token ids of 0 or more with finite values or -inf")  # fmt: skip
        self._require("seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit integer")

    def _require(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0

    @cached_property
    def bias_tensors(self) -> tuple[Tensor, Tensor]:
        """Biased ids, int64 ``[n]``, and their biases, float32 ``[n]``."""
        ids = torch.tensor([token for token, _ in self.logit_bias], dtype=torch.int64)
        return ids, torch.tensor([bias for _, bias in self.logit_bias], dtype=torch.float32)

    @property
    def penalised(self) -> bool:
        """Whether the history or a bias changes the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
        )


def filter_logits(logits: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Apply the whole filter.

    Args:
        logits: float32 or bf16 ``[V]`` on the CPU; not modified.
        params: Sampling parameters; at temperature 0 only penalties and bias are applied.
        history: Tokens before the one to be drawn.

    Returns:
        float32 ``[V]``; tokens filtered out are -inf.

    Raises:
        ValueError: A biased or seen token id is outside the vocabulary.
    """
    changed = penalise(logits, params, history)
    if params.greedy:
        return changed
    scaled = changed / params.temperature
    ids = _survivors(scaled, params)
    if ids is None:
        return scaled
    kept = torch.full_like(scaled, -math.inf)
    kept[ids] = scaled[ids]
    return kept


def choose_token(logits: Tensor, params: SamplingParams, position: int, history: History) -> int:
    """The token that the sampling contract determines.

    Args:
        logits: float32 or bf16 ``[V]`` on the CPU, of the token before ``position``.
        params: Sampling parameters.
        position: Absolute position of the token to be chosen.
        history: Tokens before ``position``; only penalties use it.

    Returns:
        The token id; the lowest one on ties.
    """
    changed = penalise(logits, params, history) if params.penalised else logits
    if params.greedy:
        return _largest(changed)
    scaled = changed.float() / params.temperature
    ids = _survivors(scaled, params)
    if ids is None:
        scaled += gumbel_noise(params.seed, position, scaled.numel())
        return _largest(scaled)
    noisy = scaled[ids] + gumbel_noise_at(params.seed, position, ids)
    return int(ids[_largest(noisy)])


def choose_tokens(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """The tokens the sampling contract names for many rows at once, where the logits are.

    On a GPU this is one kernel. It takes the same random bits and filters as :func:`choose_token`;
    only where probabilities reach ``top_p`` within rounding may the border lie elsewhere.

    Args:
        logits: Float ``[R, V]``, rows dense.
        params: One a row, none of them penalised.
        positions: Absolute positions of the tokens to be chosen.

    Returns:
        Token ids.

    Raises:
        ValueError: A row has penalties or biases, which need its history.
    """
    if any(each.penalised for each in params):
        raise ValueError("choose_tokens has no histories: use choose_token for rows with penalties")
    if logits.device.type == "cuda":
        with suppress(ImportError):
            from paceline.kernels._triton.sampling import choose

            return choose(logits, params, positions)
    nothing = History([])
    rows = zip(logits.cpu(), params, positions, strict=True)
    return [choose_token(row, each, position, nothing) for row, each, position in rows]


def penalise(logits: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Penalties and bias on raw logits, as a new float32 ``[V]``."""
    changed = logits.float() if logits.dtype != torch.float32 else logits.clone()
    try:
        if params.repetition_penalty != 1:
            ids = torch.cat([history.prompt_ids(), history.output_counts()[0]]).unique()
            seen = changed[ids]
            penalty = params.repetition_penalty
            changed[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = history.output_counts()
            changed[ids] -= params.frequency_penalty * counts + params.presence_penalty
        if params.logit_bias:
            changed.index_add_(0, *params.bias_tensors)
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"a token id of the history or of logit_bias is outside the vocabulary of "
            f"{logits.numel()}: {error}"
        ) from None
    return changed


def raw_logprobs(logits: Tensor, token: int, top_n: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probabilities of the model itself, before any filter.

    Args:
        logits: float32 or bf16 ``[V]``.
        token: The emitted token.
        top_n: How many of the most likely tokens to list.

    Returns:
        The token's natural log-probability, and (id, log-probability) of the ``top_n`` most
        likely tokens, best first, ties by lower id.
    """
    raw = logits.float()
    total = _logsumexp(raw)
    best: list[tuple[int, float]] = []
    if top_n > 0:
        ids = _ranked(raw, min(top_n, raw.numel()))[:top_n]
        best = list(zip(ids.tolist(), (raw[ids].double() - total).tolist(), strict=True))
    return float(raw[token]) - total, best


def _largest(values: Tensor) -> int:
    """Index of the largest of ``[n]`` values, the first on ties; much faster than torch."""
    return int(values.float().numpy().argmax())


def _survivors(scaled: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that remain after min_p, top_k and top_p, int64; None if all do."""
    ids: Tensor | None = None
    if params.min_p > 0:
        ids = (scaled >= scaled.max() + math.log(params.min_p)).nonzero()[:, 0]
    if params.top_k and params.top_k < (scaled.numel() if ids is None else ids.numel()):
        among = scaled if ids is None else scaled[ids]
        best = _ranked(among, params.top_k)[: params.top_k]
        ids = best if ids is None else ids[best]
        ids = ids.sort().values
    if params.top_p < 1:
        among = scaled if ids is None else scaled[ids]
        best = _nucleus(among, params.top_p)
        ids = best if ids is None else ids[best]
        ids = ids.sort().values
    return ids


def _ranked(values: Tensor, count: int) -> Tensor:
    """Ids of at least the ``count`` largest values, best first, ties by lower id."""
    least = values.topk(count).values[-1]
    ids = (values >= least).nonzero()[:, 0]
    return ids[values[ids].sort(descending=True, stable=True).indices]


def _nucleus(values: Tensor, mass: float) -> Tensor:
    """Smallest prefix of the ranking whose probability reaches ``mass``; at least one token."""
    weights, total = _exponentials(values)
    count = min(_FIRST_TOP_P_GUESS, values.numel())
    while True:
        ids = _ranked(values, count)
        reached = np.cumsum(weights[ids.numpy()], dtype=np.float64)
        if count == values.numel() or reached[-1] >= mass * total:
            break
        count = min(count * 8, values.numel())
    keep = int((reached < mass * total).sum()) + 1
    return ids[:keep]


def _logsumexp(values: Tensor) -> float:
    """Log of the sum of exponentials of float32 ``[n]``."""
    native = library()
    if native is None:
        return float(values.double().logsumexp(0))
    dense, memory = values.contiguous(), np.empty(values.numel(), np.float32)
    total: float = _logsumexp_of(native)(dense.data_ptr(), dense.numel(), memory.ctypes.data)
    return total


def _exponentials(values: Tensor) -> tuple[NDArray[np.float32], float]:
    """Exponentials of float32 ``[n]`` less their maximum, and their sum."""
    native = library()
    if native is None:
        weights = (values - values.max()).exp().numpy()
        return weights, float(weights.sum(dtype=np.float64))
    dense = values.contiguous()
    out = np.empty(dense.numel(), np.float32)
    peak = ctypes.c_float()
    total: float = _exponentials_of(native)(
        dense.data_ptr(), dense.numel(), ctypes.byref(peak), out.ctypes.data
    )
    return out, total


@cache
def _logsumexp_of(native: ctypes.CDLL) -> Any:
    function = native.paceline_logsumexp
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    function.restype = ctypes.c_double
    return function


@cache
def _exponentials_of(native: ctypes.CDLL) -> Any:
    function = native.paceline_exponentials
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, ctypes.c_int64, pointer, pointer)
    function.restype = ctypes.c_double
    return function
