"""Acceptance: which drafted tokens of a step are emitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from torch import Tensor

from paceline.tree import TokenTree
from paceline.verifier.engine.batch import BatchEntry
from paceline.verifier.engine.errors import StepFailed
from paceline.verifier.engine.job import Decode, Prefill
from paceline.verifier.engine.output import FinishReason, StepOutput
from paceline.verifier.engine.sampler import Sampler, sample_batch, score_prompt
from paceline.verifier.engine.sequence import HiddenStates

_log = logging.getLogger(__name__)


def walk(
    tree: TokenTree, choose: Callable[[int], int], stop_ids: Collection[int], limit: int
) -> StepOutput:
    """Walk down from the anchor while the tree holds the tokens that the model chooses.

    Args:
        tree: The drafted tree.
        choose: Returns the token after a node (-1: the anchor). It is called once for each node on
            the path, from the anchor down, and every token it returns is emitted.
        stop_ids: Tokens that end the generation.
        limit: Most tokens to emit, at least 1.

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

    Args:
        entries: Of the batch.
        logits: As for :func:`accept`.
        states: As for :func:`accept`.

    Returns:
        The output of each entry; None in the middle of a prefill, and for a job that failed.
    """
    tokens = sample_batch(entries, logits)
    outputs: list[StepOutput | None] = []
    for index, entry in enumerate(entries):
        try:
            outputs.append(accept(entry, logits, states, tokens.get(index)))
        except Exception as error:
            _log.exception("acceptance failed for one sequence")
            entry.job.fail(StepFailed(f"no token could be chosen: {error}"))
            outputs.append(None)
    return outputs
