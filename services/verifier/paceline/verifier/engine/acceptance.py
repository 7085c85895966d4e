"""Acceptance: the model's own token after each node, and which drafted tokens are emitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from paceline.kernels import (
    Proposal,
    SamplingParams,
    accept_or_resample,
    choose_token,
    choose_tokens,
    raw_logprobs,
    send,
)
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.batch import BatchEntry
from paceline.verifier.engine.job import Decode, FinishReason, Prefill, StepFailed, StepOutput
from paceline.verifier.engine.sequence import HiddenStates, Sequence

_log = logging.getLogger(__name__)


class Sampler:
    """Chooses the tokens of one walk, and computes their log-probabilities on request.

    Every token it returns is emitted, so it enters the sequence's history at once. With rejection
    sampling the token after a node that has a child is the child's if it is accepted, else a
    replacement, so that a walk compares tokens in both modes.

    Attributes:
        logprobs: Raw log-probability of each token; empty unless requested.
        top_logprobs: Likeliest (token, log-probability) pairs at each position; empty unless
            requested.
    """

    def __init__(
        self,
        sequence: Sequence,
        logits: Tensor,
        tree: TokenTree = EMPTY,
        tokens: Items[int] | None = None,
    ) -> None:
        """Make a sampler for one step of a sequence.

        Args:
            sequence: The sequence.
            logits: Of the anchor and the tree's nodes, ``[1 + nodes, V]``.
            tree: The tree.
            tokens: The token after each row, where ``sample_batch`` chose them already.
        """
        self._sequence = sequence
        self._logits = logits
        self._tokens = tokens
        sampling = sequence.generation.sampling
        self._argmax = sampling.greedy and not sampling.penalised
        self._chain = tree if sampling.rejection else EMPTY
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []

    def __call__(self, node: int) -> int:
        """The token after ``node`` (-1: the anchor)."""
        generation, history = self._sequence.generation, self._sequence.history
        guide, logits = self._sequence.guide, self._logits[node + 1]
        if self._tokens is None or generation.top_logprobs is not None:
            logits = logits.cpu()
        allowed = logits if guide is None else guide.mask(logits)
        if self._tokens is not None:
            token = self._tokens[node + 1]
        elif self._argmax:
            # numpy's argmax returns the lowest of equal values too, in a twentieth of torch's time.
            token = int(allowed.float().numpy().argmax())
        elif node + 1 < len(self._chain):
            token = self._accept_or_resample(node + 1, allowed)
        else:
            token = choose_token(allowed, generation.sampling, len(history), history)
        history.push(token)
        if guide is not None:
            guide.push(token)
        if generation.top_logprobs is not None:
            logprob, top = raw_logprobs(logits, token, generation.top_logprobs)
            self.logprobs.append(logprob)
            if generation.top_logprobs:
                self.top_logprobs.append(top)
        return token

    def _accept_or_resample(self, node: int, logits: Tensor) -> int:
        """The token at the position of a drafted ``node``, by rejection sampling."""
        sampling, history = self._sequence.generation.sampling, self._sequence.history
        drafted, proposals = self._chain.tokens[node], self._chain.proposals
        proposal = proposals[node] if proposals else Proposal.certain(drafted)
        return accept_or_resample(logits, sampling, len(history), history, drafted, proposal)


def score_prompt(sequence: Sequence, logits: Tensor) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities of the prompt's tokens after the committed ones.

    Args:
        sequence: A sequence before the commit of these positions.
        logits: Of consecutive positions from the committed length on, ``[rows, V]``; may be empty.

    Returns:
        For each row the next token's raw log-probability, and the likeliest tokens with theirs.
    """
    first, top = sequence.committed + 1, sequence.generation.prompt_logprobs or 0
    tokens = sequence.tokens[first : first + len(logits)]
    return [raw_logprobs(row, token, top) for row, token in zip(logits.cpu(), tokens, strict=True)]


def sample_batch(entries: Items[BatchEntry], logits: Tensor) -> dict[int, Items[int]]:
    """Choose the tokens after every row of a batch in one call, where its logits are on a GPU.

    There a walk that chose one token after the other would wait for a copy of each row.

    Args:
        entries: Of the batch.
        logits: Of all of them, ``[rows, V]``.

    Returns:
        The tokens of each entry, by its index. Entries are missing if penalties, rejection sampling
        or a grammar make a row's token depend on the one before; on the CPU all are.
    """
    if logits.device.type == "cpu":
        return {}
    rows: list[int] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    counts: dict[int, int] = {}
    for index, entry in enumerate(entries):
        sequence = entry.job.sequence
        count = entry.logits.stop - entry.logits.start
        sampling = sequence.generation.sampling
        in_turn = sampling.penalised or sampling.rejection or sequence.guide is not None
        if not count or in_turn:
            continue
        counts[index] = count
        rows += range(entry.logits.start, entry.logits.stop)
        params += [sampling] * count
        depths = (0, *entry.tree.depths)[:count]
        positions += [len(sequence.tokens) + depth for depth in depths]
    if not rows:
        return {}
    if len(rows) < len(logits):
        logits = logits[send(torch.tensor(rows), logits.device)]
    tokens = iter(choose_tokens(logits, params, positions))
    return {index: [next(tokens) for _ in range(count)] for index, count in counts.items()}


def walk(
    tree: TokenTree, choose: Callable[[int], int], stop_ids: Collection[int], limit: int
) -> StepOutput:
    """Walk down from the anchor while the tree holds the tokens that the model chooses.

    Args:
        tree: The drafted tree.
        choose: Returns the token after a node (-1: the anchor). It is called once for each node on
            the path, from the anchor down, and every token it returns is emitted.
        stop_ids: Tokens that end the generation.
        limit: Maximum number of tokens to emit, at least 1.

    Returns:
        The emitted tokens, the accepted nodes of ``tree`` and the finish reason. Unless ``choose``
        looks at the tree, the tokens depend on it only in their number.
    """
    node = -1
    output = StepOutput(tokens=[])
    while True:
        token = choose(node)
        output.tokens.append(token)
        child = tree.child(node, token)
        if child is not None:
            output.accepted.append(child)
        if token in stop_ids:
            output.finish = FinishReason.STOP
        elif len(output.tokens) == limit:
            output.finish = FinishReason.LENGTH
        if child is None or output.finish is not None:
            return output
        node = child


def accept(
    entry: BatchEntry, logits: Tensor, states: HiddenStates, tokens: Items[int] | None = None
) -> StepOutput | None:
    """Choose the tokens of one entry and commit them to its sequence.

    Args:
        entry: One job's part of the batch.
        logits: Of the whole batch, ``[rows, V]``.
        states: Outputs of tapped layers for the whole batch.
        tokens: The token after each row, where ``sample_batch`` chose them already.

    Returns:
        What the step emitted; None in the middle of a prefill.

    Raises:
        Exception: A token could not be chosen. Text and history are as before the step.
    """
    job, sequence = entry.job, entry.job.sequence
    if isinstance(job, Prefill):
        sequence.record(sequence.committed, states, entry.rows)
        job.prompt_logprobs += score_prompt(sequence, logits[entry.scored])
        sequence.committed = entry.stop
        if entry.stop < len(sequence.tokens):
            return None
    sampler = Sampler(sequence, logits[entry.logits], entry.tree, tokens)
    try:
        output = walk(entry.tree, sampler, sequence.generation.stop_ids, sequence.room)
        output.logprobs, output.top_logprobs = sampler.logprobs, sampler.top_logprobs
        sequence.commit(output, states, entry.rows.start)
    except Exception:
        sequence.forget_uncommitted()
        raise
    output.committed = sequence.committed
    output.checked = len(entry.tree)
    if isinstance(job, Decode):
        output.accepted = [job.nodes[node] for node in output.accepted]
    return output


def accept_batch(
    entries: Items[BatchEntry], logits: Tensor, states: HiddenStates
) -> list[StepOutput | None]:
    """Accept the tokens of every entry of a batch.

    A GPU is waited for once for the tokens of all entries, and once for the KV that they keep.

    Args:
        entries: Of the batch.
        logits: As for :func:`accept`.
        states: As for :func:`accept`.

    Returns:
        The output of each entry; None in the middle of a prefill, and for a job that failed.
    """
    tokens = sample_batch(entries, logits)
    if states and logits.device.type != "cpu":  # one copy for all sequences and layers
        states = dict(zip(states, torch.stack([*states.values()]).cpu(), strict=True))
    outputs: list[StepOutput | None] = []
    try:
        with entries[0].job.sequence.segment.together():
            for index, entry in enumerate(entries):
                outputs.append(_accept_or_fail(entry, logits, states, tokens.get(index)))
    except Exception as error:  # no entry can run again: all have their new tokens
        _log.exception("the KV of a step could not be kept")
        for entry in entries:
            entry.job.fail(StepFailed(f"the KV of the step could not be kept: {error}"))
        return [None] * len(entries)
    return outputs


def _accept_or_fail(
    entry: BatchEntry, logits: Tensor, states: HiddenStates, tokens: Items[int] | None
) -> StepOutput | None:
    try:
        return accept(entry, logits, states, tokens)
    except Exception as error:
        _log.exception("acceptance failed for one sequence")
        entry.job.fail(StepFailed(f"no token could be chosen: {error}"))
        return None
