"""The forward pass of a batch, and what each job's share of the logits comes to."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from paceline.decoder import Decoder, GraphRunner
from paceline.verifier.engine.acceptance import Walk, walk
from paceline.verifier.engine.ahead import choose_ahead
from paceline.verifier.engine.batch import Batch, Share
from paceline.verifier.engine.choice import Chooser
from paceline.verifier.engine.job import Emission, Job, Prefill, microseconds
from paceline.verifier.engine.sequence import Sequence, States

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to for one job.

    Attributes:
        share: The job's share of the batch.
        walk: Emitted tokens; None in the middle of a prefill.
        chooser: Who chose them.
        error: Why this job alone could not be settled; its sequence is as before the step.
    """

    share: Share
    walk: Walk | None = None
    chooser: Chooser | None = None
    error: Exception | None = None

    @property
    def job(self) -> Job:
        """Whose it is."""
        return self.share.job

    def emission(
        self, began: float, ended: float, batch_tokens: int, node_budget: int
    ) -> Emission | None:
        """The answer for the job, with the times of the step (time.perf_counter)."""
        if self.walk is None or self.chooser is None:
            return None
        return Emission(
            tokens=self.walk.tokens,
            accepted=self.share.tree.drafted_path(self.walk.path),
            logprobs=self.chooser.logprobs,
            top_logprobs=self.chooser.top_logprobs,
            finish=self.walk.finish,
            committed=self.job.sequence.committed,
            queue_us=microseconds(began - self.job.ready_at),
            step_us=microseconds(ended - began),
            batch_tokens=batch_tokens,
            checked=len(self.share.tree) - 1,
            node_budget=node_budget,
        )


def run_batch(batch: Batch, decoder: Decoder, graphs: GraphRunner | None) -> list[Outcome]:
    """Run a batch and settle its shares. An exception leaves all of their sequences as before."""
    logits, states = batch.forward(decoder, graphs)
    ahead = choose_ahead(batch.shares, logits)
    return [
        settle(share, logits, states, ahead.get(index)) for index, share in enumerate(batch.shares)
    ]


def settle(
    share: Share, logits: Tensor, states: States, tokens: Items[int] | None = None
) -> Outcome:
    """Walk a share's tree and take the result into its sequence.

    Args:
        share: One job's part of the batch.
        logits: Of the whole batch, ``[rows, V]``.
        states: Outputs of tapped layers for the whole batch.
        tokens: Tokens behind its nodes, where they are known already.
    """
    sequence = share.job.sequence
    try:
        if isinstance(share.job, Prefill):
            sequence.record(sequence.committed, states, share.rows)
            sequence.committed = share.stop
            if share.stop < len(sequence.tokens):
                return Outcome(share)
        chooser = Chooser(sequence, logits[share.logits], share.tree, tokens)
        walked = walk(share.tree, chooser, sequence.generation.stop_ids, sequence.room)
        sequence.commit(walked, states, share.rows.start)
    except Exception as error:
        _log.exception("a share could not be settled")
        _undo(sequence)
        return Outcome(share, error=error)
    return Outcome(share, walked, chooser)


def _undo(sequence: Sequence) -> None:
    chosen = len(sequence.history) - len(sequence.tokens)
    for _ in range(chosen):
        sequence.history.pop()
    if sequence.guide is not None:
        sequence.guide.pop(chosen)
