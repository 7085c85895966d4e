"""Sampling of tokens from logits.

The sampling contract: the token at absolute position t is
``argmax_v [filter(logits_t)_v + g(seed, t, v)]``, a function of the logits, the tokens before t,
the parameters and the seed alone. The filter applies, in this order, repetition penalty (prompt and
output), presence and frequency penalties (output), logit bias, temperature, then min_p, top_k and
top_p, each to the tokens that remain. Ties go to the lower token id. Arithmetic is float32, but for
the probabilities that top_p adds up: these are integers, whose sum has no rounding.

No parameter makes a finite logit infinite: :class:`SamplingParams` bounds each of them, at values
from which on a larger one would choose the same tokens. Of a model whose logits are not finite,
above temperature 0 NaN counts as the lowest float32 and plus infinity as the largest; minus
infinity excludes a token.

Speculative rejection sampling of chains, with position-keyed random numbers, is the other mode.
After Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section
2.3: a token drafted from q is accepted with probability min(1, p / q); a rejected one is replaced
by a sample of the residual norm(max(p - q, 0)). The emitted token is a sample of p for every q that
does not depend on the draws of its own position.

Its draws of absolute position t come from Philox4x32-10 as in :mod:`paceline.kernels.noise`, whose
counters end in 0. Here they are ``(t & 0xFFFFFFFF, t >> 32, purpose, 1)``, and the words (w0, w1)
make u as there. Tokens drafted after a rejected one are discarded unread: each draw is used once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._native import address, library
from paceline.kernels.devices import kernels_for
from paceline.kernels.noise import check_range, gumbel_noise_at, philox
from paceline.kernels.trees import send

_FIRST_TOP_P_GUESS = 256
_LARGEST = torch.finfo(torch.float32).max
# Below it, logits over temperature are so large that noise cannot change their order.
MIN_TEMPERATURE = 2.0**-60
_MAX_TEMPERATURE = 2.0**60
# Largest bias and penalty. All of them together, over the temperature, are finite.
_MAX_PENALTY = 2.0**40

# Changes of a row, one after the other: different token ids, with what divides their positive
# logits and multiplies negative ones; what is subtracted; what is added.
Edits = list[tuple[NDArray[np.int64], NDArray[np.float32]]]
_DRAFT, _ACCEPT, _RESIDUAL = range(3)
_SUM_TOLERANCE = 1e-3
_LOW = 0xFFFFFFFF


class History:
    """Prompt and output of one sequence, with output counts.

    Stepping down a tree path is :meth:`push`, stepping back is :meth:`pop`; both take constant
    time. Not safe for use from several threads at once. Attributes must not be changed.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        """Start from a prompt and, when resuming, the tokens already emitted."""
        self.prompt = frozenset(prompt)  # distinct prompt tokens
        self.output: list[int] = []  # output tokens, oldest first
        self.seen = array("q", self.prompt)  # distinct tokens of prompt and output
        self.emitted = array("q")  # distinct output tokens, in the order in which each came first
        self.counts = array("f")  # count of each of them
        self._places: dict[int, int] = {}
        self._prompt_length = len(prompt)
        for token in output:
            self.push(token)

    def __len__(self) -> int:
        """Return the length of prompt and output: the absolute position of the next token."""
        return self._prompt_length + len(self.output)

    def push(self, token: int) -> None:
        """Append an output token."""
        self.output.append(token)
        place = self._places.setdefault(token, len(self.emitted))
        if place < len(self.emitted):
            self.counts[place] += 1
            return
        self.emitted.append(token)
        self.counts.append(1)
        if token not in self.prompt:
            self.seen.append(token)

    def pop(self) -> int:
        """Remove the newest output token and return it. Raises ``IndexError`` if there is none."""
        token = self.output.pop()
        place = self._places[token]
        self.counts[place] -= 1
        if not self.counts[place]:  # then no token that came first after it is left
            del self._places[token], self.emitted[place], self.counts[place]
            if token not in self.prompt:
                self.seen.pop()
        return token


@dataclass(frozen=True)
class SamplingRules:
    """Sampling parameters of a request. Their ranges are not checked here, but bounded."""

    temperature: float = 1.0  # divides the logits; below `MIN_TEMPERATURE` 0; at most 2^60
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens of this probability; 1 all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the most likely one; 0 all
    # Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is
    # off. 2^-40 to 2^40. What is added or subtracted is -2^40 to 2^40.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the output; 0 is off
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output; 0 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added; -inf excludes
    seed: int = 0  # unsigned 64-bit seed of the noise
    rejection: bool = False  # rejection sampling decides about drafted tokens, not equality

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)
        cold = self.temperature < MIN_TEMPERATURE
        keep("temperature", 0.0 if cold else min(self.temperature, _MAX_TEMPERATURE))
        keep("repetition_penalty", _bounded(self.repetition_penalty, 1 / _MAX_PENALTY))
        keep("presence_penalty", _bounded(self.presence_penalty))
        keep("frequency_penalty", _bounded(self.frequency_penalty))
        if not all(abs(x) <= _MAX_PENALTY or x == -math.inf for _, x in self.logit_bias):
            biases = [(token, x if x == -math.inf else _bounded(x)) for token, x in self.logit_bias]
            keep("logit_bias", tuple(biases))

    @cached_property
    def biases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids of ``logit_bias``, int64, and what is added to their logits."""
        ids, values = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        return np.array(ids, np.int64), np.array(values, np.float32)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a filter leaves out tokens, by how likely the others are."""
        return self.top_k != 0 or self.top_p != 1 or self.min_p != 0

    @property
    def penalised(self) -> bool:
        """Whether the history or a bias changes the logits."""
        off = self.repetition_penalty == 1 and not self.presence_penalty
        return not off or self.frequency_penalty != 0 or bool(self.logit_bias)


def _bounded(penalty: float, lowest: float = -_MAX_PENALTY) -> float:
    return max(lowest, min(penalty, _MAX_PENALTY))


def filter_logits(logits: Tensor, params: SamplingRules, history: History) -> Tensor:
    """Apply the whole filter, at temperature 0 only penalties and bias, to float32 or bf16 ``[V]``
    on the CPU, which is not modified. ``history`` are the tokens before the one to be drawn.
    Returns float32 ``[V]``; tokens filtered out are -inf. Raises ``ValueError`` if a biased or seen
    token id is outside the vocabulary."""
    return _filtered(penalise(logits, params, history), params)


def _filtered(logits: Tensor, params: SamplingRules) -> Tensor:
    """Filter without penalties and bias, to a new float32 ``[V]``; not at temperature 0."""
    if params.greedy:
        return logits.float()
    scaled = _finite(logits.float() / params.temperature)
    ids = _survivors(scaled, params)
    if ids is None:
        return scaled
    return torch.full_like(scaled, -math.inf).index_copy_(0, ids, scaled[ids])


def choose_token(logits: Tensor, params: SamplingRules, position: int, history: History) -> int:
    """Return the token that the sampling contract determines at an absolute position, by the logits
    of the token before it, float32 or bf16 ``[V]`` on the CPU. Only penalties use the history."""
    changed = penalise(logits, params, history) if params.penalised else logits
    if params.greedy:
        return _largest(changed)
    if (token := _choose(changed, params, position)) is not None:
        return token
    scaled = _finite(changed.float() / params.temperature)
    ids = _survivors(scaled, params)
    if ids is None:
        ids = torch.arange(scaled.numel())
    return int(ids[_largest(scaled[ids] + gumbel_noise_at(params.seed, position, ids))])


def _choose(logits: Tensor, params: SamplingRules, position: int) -> int | None:
    """Return the choice by the compiled kernels; None if a score is not finite."""
    check_range(params.seed, position)
    dense = logits.float().contiguous()
    token: int = library().paceline_choose(
        address(dense, "logits"), dense.numel(), params.temperature,
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        min(params.top_k, dense.numel()), params.top_p, params.seed, position,
    )  # fmt: skip
    return None if token < 0 else token


def choose_tokens(
    logits: Tensor,
    params: Sequence[SamplingRules],
    positions: Sequence[int],
    drafted: Mapping[int, tuple[int, Proposal]] = MappingProxyType({}),
) -> Tensor:
    """Return the tokens the sampling contract names for many rows at once, where the logits are.

    ``logits`` are float ``[R, V]``, rows dense, with penalties and biases, as :func:`edit_rows`
    adds; ``positions`` the absolute ones of the tokens to be chosen; ``drafted``, of rows whose
    token is chosen by rejection sampling, the drafted token and the distribution it was drawn from
    (:func:`accept_or_resample`). Returns int64 ``[R]``, on the device of the logits. A GPU is not
    waited for.
    """
    if all(rules.greedy for rules in params):
        return logits.argmax(1)
    noisy = [-1 if row in drafted else position for row, position in enumerate(positions)]
    scores = perturbed_logits(logits, params, noisy)
    tokens = scores.argmax(1)
    if drafted:
        seeds = [params[row].seed for row in drafted]
        _accept_drafts(scores, tokens, drafted, seeds, [positions[row] for row in drafted])
    return tokens


def _accept_drafts(
    scores: Tensor,
    tokens: Tensor,
    drafted: Mapping[int, tuple[int, Proposal]],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> None:
    """Replace the tokens of rows by rejection sampling from their filtered scores."""
    if not scores.is_cpu:
        records = _draft_records(drafted, seeds, positions, scores.shape[1])
        kernels_for(scores.device).accept_drafts(scores, tokens, *records)
        return
    for row, seed, position in zip(drafted, seeds, positions, strict=True):
        tokens[row] = resampled(scores[row], seed, position, *drafted[row])


def _draft_records(
    drafted: Mapping[int, tuple[int, Proposal]],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each draft: row, token, seed, position and the sum of its probabilities as float64; and
    its probabilities: places in ``[D, vocab]`` and float32 bits."""
    proposals = [proposal for _, proposal in drafted.values()]
    sums = [proposal.probabilities.sum(dtype=np.float64) for proposal in proposals]
    integers = [
        np.array([*drafted]), np.array([token for token, _ in drafted.values()]),
        np.array(seeds, np.uint64).view(np.int64), np.array(positions),
        np.array(sums).view(np.int64),
    ]  # fmt: skip
    places = [index * vocab + proposal.tokens for index, proposal in enumerate(proposals)]
    values = np.concatenate([proposal.probabilities for proposal in proposals]).view(np.int32)
    return np.stack(integers, 1), np.stack([np.concatenate(places), values])


def perturbed_logits(
    logits: Tensor,
    params: Sequence[SamplingRules],
    positions: Sequence[int],
    ids: Tensor | None = None,
) -> Tensor:
    """Return filtered logits over temperature and noise, whose largest is the contract's token.

    On a GPU these are Triton kernels, which keep the same tokens as :func:`filter_logits`.
    ``logits`` are float ``[R, V]``, rows dense, with penalties and biases. Rows at temperature 0 or
    a position below 0 get no noise. ``ids`` has the token of each logit, rising, int64 ``[V]`` on
    the device of the logits; None: its index. Returns float32 ``[R, V]`` there; -inf for tokens
    that a filter removes.
    """
    if not logits.is_cpu:
        return kernels_for(logits.device).perturb(logits, params, positions, ids)
    tokens = torch.arange(logits.shape[1]) if ids is None else ids
    scores = torch.stack([_filtered(*pair) for pair in zip(logits, params, strict=True)])
    for row, rules, position in zip(scores, params, positions, strict=True):
        if not rules.greedy and position >= 0:
            row += gumbel_noise_at(rules.seed, position, tokens)
    return scores


def edits(params: SamplingRules, history: History) -> Edits:
    """Return penalties and bias of the token after a history."""
    seen = output = np.empty(0, np.int64)
    if params.repetition_penalty != 1:
        seen = np.array(history.seen, np.int64)
    if params.presence_penalty or params.frequency_penalty:
        output = np.array(history.emitted, np.int64)
    penalty = np.array(history.counts[: len(output)], np.float32)
    penalty *= np.float32(params.frequency_penalty)
    penalty += np.float32(params.presence_penalty)
    factors = np.full(len(seen), params.repetition_penalty, np.float32)
    return [(seen, factors), (output, penalty), params.biases]


def edit_rows(logits: Tensor, rows: Sequence[int], changes: Sequence[Edits]) -> None:
    """Apply penalties and biases, in place, to different rows of logits, float32 ``[R, V]``, dense,
    on any device. A GPU is not waited for. Raises ``ValueError`` if a biased or seen token id is
    outside the vocabulary."""
    flat = logits.view(-1)
    for kind, parts in enumerate(zip(*changes, strict=True)):
        ids = np.concatenate([ids for ids, _ in parts])
        if not len(ids):
            continue
        if ids.min() < 0 or ids.max() >= logits.shape[1]:
            raise ValueError(
                "a token id of the history or of logit_bias is outside the vocabulary of "
                f"{logits.shape[1]}: {ids.min()} to {ids.max()}"
            )
        places = np.repeat(rows, [len(ids) for ids, _ in parts]) * logits.shape[1] + ids
        numbers = np.concatenate([values for _, values in parts]).view(np.int32)
        packed = send(torch.from_numpy(np.stack([places, numbers])), logits.device)
        at, values = packed[0], packed[1].to(torch.int32).view(torch.float32)
        old = flat.index_select(0, at)
        if kind == 0:
            new = torch.where(old > 0, old / values, old * values)
        else:
            new = old - values if kind == 1 else old + values
        flat.index_copy_(0, at, new)


def penalise(logits: Tensor, params: SamplingRules, history: History) -> Tensor:
    """Return penalties and bias on raw logits, as a new float32 ``[V]``.

    As elsewhere in the choice of one token, operations on all logits are NumPy's: PyTorch's wait
    for all threads, which takes milliseconds where other processes keep the cores busy.
    """
    changed = torch.from_numpy(logits.float().numpy().copy())
    edit_rows(changed[None], [0], [edits(params, history)])
    return changed


def raw_logprobs(logits: Tensor, token: int, top_n: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probabilities of the model itself, before any filter, by its logits, float32
    or bf16 ``[V]``.

    Returns the natural log-probability of the emitted token, and (id, log-probability) of the
    ``top_n`` most likely tokens, best first, ties by lower id.
    """
    address(logits, "logits")  # refuses another device, which the check of values would wait for
    raw = _finite(logits.float())
    dense, memory = raw.contiguous(), np.empty(raw.numel(), np.float32)
    at = address(dense, "logits")
    total: float = library().paceline_logsumexp(at, dense.numel(), memory.ctypes.data)
    best: list[tuple[int, float]] = []
    if top_n > 0:
        count = min(top_n, raw.numel())
        # Candidates at minus infinity are arbitrary.
        ranked = raw.numpy().min() == -math.inf
        ids = _ranked(raw, count)[:count] if ranked else best_candidates(raw[None], count)[0][0]
        best = list(zip(ids.tolist(), (raw[ids].double() - total).tolist(), strict=True))
    return float(raw[token]) - total, best


def _largest(values: Tensor) -> int:
    """Return the index of the largest of ``[n]`` values, the first on ties; faster than torch."""
    return int(values.float().numpy().argmax())


def _finite(values: Tensor) -> Tensor:
    """float32 ``[n]`` without NaN and plus infinity; the same tensor if it has none."""
    if math.isfinite(values.numpy().max()):  # the largest of values with a NaN is NaN
        return values
    return values.nan_to_num(nan=-_LARGEST, posinf=_LARGEST, neginf=-math.inf)


def _survivors(scaled: Tensor, params: SamplingRules) -> Tensor | None:
    """Return ids that remain after min_p, top_k and top_p, int64; None if all do."""
    ids: Tensor | None = None
    if params.min_p > 0:
        ids = (scaled >= scaled.max() + math.log(params.min_p)).nonzero()[:, 0]
    among = scaled if ids is None else scaled[ids]
    if params.top_k and params.top_k < among.numel():
        best = _ranked(among, params.top_k)[: params.top_k].sort().values
        ids, among = best if ids is None else ids[best], among[best]
    if params.top_p < 1:
        best = _nucleus(among, params.top_p).sort().values
        ids = best if ids is None else ids[best]
    return ids


def _ranked(values: Tensor, count: int) -> Tensor:
    """Return the ids of at least the ``count`` largest values, best first, ties by lower id."""
    smallest = values.topk(count).values[-1]
    ids = (values >= smallest).nonzero()[:, 0]
    return ids[values[ids].sort(descending=True, stable=True).indices]


def _nucleus(values: Tensor, mass: float) -> Tensor:
    """Return the shortest prefix of the ranking with probability ``mass``; at least one token."""
    weights, total = _weights(values)
    needed = max(1, min(total, math.ceil(mass * float(total))))
    count = min(_FIRST_TOP_P_GUESS, values.numel())
    while True:
        ids = _ranked(values, count)
        reached = weights[ids.numpy()].cumsum()
        if count == values.numel() or reached[-1] >= needed:
            return ids[: int(np.searchsorted(reached, needed)) + 1]
        count = min(count * 8, values.numel())


def _weights(values: Tensor) -> tuple[NDArray[np.int64], int]:
    """Probabilities in integers, and their sum: of float32 ``[n]`` without NaN and plus infinity.

    The weight of x is 2^40 e^(x - max), by integer arithmetic: sums do not depend on their order,
    so that every device finds the same nucleus. ``native/sampling.c`` and the Triton kernels
    compute the same. If all x are minus infinity, all weights are 0.
    """
    dense = values.contiguous()
    weights = np.empty(dense.numel(), np.int64)
    at = address(dense, "logits")
    return weights, library().paceline_weights(at, dense.numel(), weights.ctypes.data)


def best_candidates(
    logits: Tensor, width: int, temperature: float = 1.0, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ``width`` largest scores of each row of ``[R, V]``, as its softmax sees them.

    Scores are ``logits / temperature + noise``, the noise float32 ``[V]`` on the CPU, as are the
    logits then; without noise they are the logits. On the CPU logits are read as float32. Returns
    ids, int64 ``[R, width]``, best first, and the logs of their softmax, ``[R, width]``, on the
    device of ``logits``. Ids with log -inf are arbitrary.
    """
    if not logits.is_cpu:
        return kernels_for(logits.device).best_candidates(logits, width)
    logits = logits.float() if logits.stride(1) == 1 else logits.float().contiguous()
    rows, count = logits.shape
    ids = torch.empty(rows, width, dtype=torch.int64)
    logs = torch.empty(rows, width)
    both = None if noise is None else torch.cat([noise, noise])  # and memory for the scores
    library().paceline_candidates(
        address(logits, "logits"), logits.stride(0), rows, count, width,
        temperature, None if both is None else both.data_ptr(), ids.data_ptr(), logs.data_ptr(),
    )  # fmt: skip
    return ids, logs


@dataclass(frozen=True)
class Proposal:
    """A distribution q over a few tokens.

    It is sent unchanged, so that drafter and verifier draw the same token from it.
    """

    tokens: NDArray[np.int64]  # different token ids, int64 `[n]`
    probabilities: NDArray[np.float32]  # of each, float32 `[n]`; their sum is 1 up to rounding

    @classmethod
    def checked(cls, tokens: Sequence[int], probabilities: Sequence[float]) -> Proposal:
        """Check a distribution. Raises ``ValueError`` if it is empty, lists a token twice, has a
        probability below 0, or a sum that is not 1."""
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
        return cls(np.array([token], dtype=np.int64), np.ones(1, dtype=np.float32))

    @classmethod
    def likeliest(cls, scores: Tensor, count: int) -> Proposal:
        """Return the softmax of ``scores``, ``[V]``, truncated to the ``count`` most likely tokens.

        Tokens at -inf are left out; at least one must be finite.
        """
        best = scores.topk(min(count, scores.numel()))
        kept = best.values > -torch.inf
        chances = best.values[kept].float().softmax(0)
        return cls(best.indices[kept].numpy(), chances.numpy())

    @property
    def peak(self) -> float:
        return float(self.probabilities.max())

    def draw(self, seed: int, position: int) -> int:
        """Return the sample of q that a drafter takes at an absolute position. Raises
        ``ValueError`` if seed or position are out of range."""
        weights = self.probabilities.astype(np.float64)
        return int(self.tokens[_pick(weights, _uniform(seed, position, _DRAFT))])


def accept_or_resample(
    logits: Tensor,
    params: SamplingRules,
    position: int,
    history: History,
    drafted: int,
    proposal: Proposal,
) -> int:
    """Return the drafted token if accepted, else a sample of the residual; temperature above 0.

    ``logits`` are of the token before ``position``, float32 or bf16 ``[V]`` on the CPU,
    ``history`` the tokens before it. ``drafted`` is ``proposal.draw(params.seed, position)``, or
    the token that the proposal is certain of.
    """
    scores = filter_logits(logits, params, history)
    return resampled(scores, params.seed, position, drafted, proposal)


def resampled(scores: Tensor, seed: int, position: int, drafted: int, proposal: Proposal) -> int:
    """:func:`accept_or_resample` of filtered logits over temperature."""
    p = scores.double().softmax(0).numpy()
    q = np.zeros_like(p)
    q[proposal.tokens] = proposal.probabilities
    q /= q.sum()
    if _uniform(seed, position, _ACCEPT) * q[drafted] < p[drafted]:
        return drafted
    residual = np.maximum(p - q, 0.0)
    weights = residual if residual.any() else p  # if p and q are equal up to rounding
    return _pick(weights, _uniform(seed, position, _RESIDUAL))


def _uniform(seed: int, position: int, purpose: int) -> float:
    """Strictly between 0 and 1."""
    check_range(seed, position)
    words = philox((position & _LOW, position >> 32, purpose, 1), (seed & _LOW, seed >> 32))
    mantissa: int = words[0] << 20 | words[1] >> 12
    return (mantissa + 0.5) * 2.0**-52


def _pick(weights: NDArray[np.float64], u: float) -> int:
    """Return the index drawn in proportion to weights, by inversion; never one of weight 0."""
    reached = weights.cumsum()
    index = int(np.searchsorted(reached, u * reached[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # u times the sum may round to the sum
