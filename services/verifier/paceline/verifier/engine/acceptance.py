"""Acceptance: the tokens that a step emits, and the KV that it keeps.

On the CPU each sequence is walked with its logits. On a GPU the tokens after all rows are chosen at
once: the history of a row is the text and its path in the tree. The KV of the accepted paths moves
there too, and hidden states stay there. Then the host waits once for what it reads, and walks with
the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.device import device_of
from paceline.kernels import (
    Edits,
    Proposal,
    SamplingRules,
    accept_or_resample,
    best_candidates,
    choose_token,
    choose_tokens,
    edit_rows,
    edits,
    raw_logprobs,
    send,
)
from paceline.sources.recycle import WIDTH
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.batch import BatchEntry
from paceline.verifier.engine.job import (
    CachedSequence,
    ConstraintFailed,
    Decode,
    EngineJob,
    Prefill,
    StepFailed,
)
from paceline.verifier.engine.report import FinishReason, StepOutput
from paceline.verifier.grammar import GrammarError, is_allowed, masked
from paceline.verifier.kv.base import HiddenStates, host_bytes
from paceline.verifier.kv.pool import PagedKv, TapPages

if TYPE_CHECKING:
    from paceline.verifier.engine.local import LocalGuesses

_log = logging.getLogger(__name__)

_NO_ROWS = slice(0, 0)


class MaskLate(Exception):
    """A token waits for the mask of a grammar."""


class Sampler:
    """Chooses the tokens of one walk, and computes their log-probabilities on request. Calling it
    raises ``MaskLate``: nothing is chosen.

    Every token it returns is emitted, so it enters the sequence's history at once. With rejection
    sampling the token after a node that has a child is the child's if it is accepted, else a
    replacement, so that a walk compares tokens in both modes.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        logits: Tensor,
        tree: TokenTree = EMPTY,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Make a sampler for one step of a sequence.

        ``logits`` are of the anchor and the tree's nodes, ``[1 + nodes, V]`` on the CPU.
        ``tokens`` has the token after each row, where the device chose them; logits are needed then
        for log-probabilities only.
        """
        self._sequence = sequence
        self._logits = logits
        self._tokens = tokens
        sampling = sequence.text.sampling
        self._argmax = sampling.greedy and not sampling.penalised
        # Without filters a token that the grammar refuses takes no part in the choice of another.
        self._independent = not sampling.rejection and (sampling.greedy or not sampling.filtered)
        self._chain = tree if sampling.rejection else EMPTY
        self.logprobs: list[float] = []  # raw log-probability of each token; empty unless requested
        # Likeliest (token, log-probability) pairs at each position; empty unless requested.
        self.top_logprobs: list[list[tuple[int, float]]] = []

    def __call__(self, node: int) -> int:
        """Return the token after ``node`` (-1: the anchor)."""
        request, history = self._sequence.request, self._sequence.history
        guide = self._sequence.guide
        token = self._choose(node) if self._tokens is None else self._tokens[node + 1]
        history.push(token)
        if guide is not None:
            guide.push(token)
        if request.top_logprobs is not None:
            row = self._logits[node + 1]
            logprob, top = raw_logprobs(row, token, request.top_logprobs)
            self.logprobs.append(logprob)
            if request.top_logprobs:
                self.top_logprobs.append(top)
        return token

    def _choose(self, node: int) -> int:
        guide, logits = self._sequence.guide, self._logits[node + 1]
        if guide is None:
            return self._choose_among(node, logits)
        if self._independent:
            token = self._choose_among(node, logits)
            if guide.accepts((token,)) == 1:  # a mask of all tokens takes ten times as long
                return token
        allowed = guide.allowed()
        if allowed is None:
            guide.check()
            raise MaskLate
        return self._choose_among(node, masked(logits, allowed))

    def _choose_among(self, node: int, logits: Tensor) -> int:
        """Choose the token after ``node`` among tokens with finite logits."""
        if self._argmax:
            # numpy's argmax returns the lowest of equal values too, in a twentieth of torch's time.
            return int(logits.float().numpy().argmax())
        if node + 1 < len(self._chain):
            return self._accept_or_resample(node + 1, logits)
        history = self._sequence.history
        return choose_token(logits, self._sequence.text.sampling, len(history), history)

    def _accept_or_resample(self, node: int, logits: Tensor) -> int:
        """Return the token at the position of a drafted ``node``, by rejection sampling."""
        sampling, history = self._sequence.text.sampling, self._sequence.history
        drafted, proposal = self._chain.tokens[node], _proposal(self._chain, node)
        return accept_or_resample(logits, sampling, len(history), history, drafted, proposal)


def _proposal(chain: TokenTree, node: int) -> Proposal:
    """Return the distribution that a node was drawn from."""
    return chain.proposals[node] if chain.proposals else Proposal.certain(chain.tokens[node])


def score_prompt(
    sequence: CachedSequence, logits: Tensor
) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row of logits, ``[rows, V]`` of consecutive positions from the committed length on,
    the raw log-probability of the prompt's next token, and the likeliest tokens with theirs."""
    first, top = sequence.committed + 1, sequence.request.prompt_logprobs or 0
    tokens = sequence.tokens[first : first + len(logits)]
    return [raw_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True)]


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

    Raises:
        MaskLate: ``choose`` raised it for the first token. A later one is left to the next step.
    """
    tokens: list[int] = []
    accepted: list[int] = []
    finish: FinishReason | None = None
    node: int | None = -1
    while node is not None and finish is None:
        try:
            token = choose(node)
        except MaskLate:
            if not tokens:
                raise
            del accepted[-1]  # its KV is computed by the next step
            break
        tokens.append(token)
        node = tree.child(node, token)
        if node is not None:
            accepted.append(node)
        if token in stop_ids:
            finish = FinishReason.STOP
        elif len(tokens) == limit:
            finish = FinishReason.LENGTH
    return StepOutput(tokens, accepted, finish, checked=len(tree))


@dataclass(frozen=True)
class _Read:
    """What the host reads of one entry."""

    logits: Tensor  # logits of its rows, on the CPU; empty if none are needed
    scored: Tensor  # logits of the rows that give the prompt's log-probabilities, on the CPU
    # The token after each of its rows, chosen on the device; None: by the walk.
    tokens: Sequence[int] | None = None
    # The likeliest tokens after each of its rows and their log-probabilities, selected on the
    # device; None if they are selected from `logits`.
    candidates: tuple[Tensor, Tensor] | None = None


def accept_batch(
    entries: Sequence[BatchEntry],
    logits: Tensor,
    states: Mapping[int, Tensor],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[StepOutput | None]:
    """Accept the tokens of every entry of a batch, by its logits ``[rows, V]`` and outputs of
    tapped layers. A GPU is waited for once, after ``meanwhile`` was called. Returns the output of
    each entry: None in the middle of a prefill, and for a job that failed or may be tried again.
    Raises any error of the device; all sequences are as before then."""
    if not device_of(logits.device).runs_beside:
        reads = [_Read(logits[entry.logits], logits[entry.scored]) for entry in entries]
        kept: HiddenStates = {layer: host_bytes(rows) for layer, rows in states.items()}
    else:
        reads, kept = _read(entries, logits, states, meanwhile), {}
    return [
        _or_fail(entry.job, partial(_accept, entry, read, kept))
        for entry, read in zip(entries, reads, strict=True)
    ]


def _or_fail(job: EngineJob, accept: Callable[[], StepOutput | None]) -> StepOutput | None:
    try:
        return accept()
    except GrammarError as error:
        job.fail(ConstraintFailed(f"no token could be chosen: {error}"))
    except Exception as error:
        _log.exception("acceptance failed for one sequence")
        job.fail(StepFailed(f"no token could be chosen: {error}"))
    return None


def _accept(entry: BatchEntry, read: _Read, states: HiddenStates) -> StepOutput | None:
    """Commit the tokens of one entry to its sequence, and return what the step emitted; None in the
    middle of a prefill. Raises any error if no token could be chosen: text and history are as
    before the step."""
    job, sequence = entry.job, entry.job.sequence
    if isinstance(job, Prefill):
        sequence.record(sequence.committed, states, entry.rows)
        job.prompt_logprobs += score_prompt(sequence, read.scored)
        sequence.committed = entry.stop
        if entry.stop < len(sequence.tokens):
            return None
    return _emit(entry, read, states)


def _emit(entry: BatchEntry, read: _Read, states: HiddenStates) -> StepOutput | None:
    """As :func:`_accept`, once the KV of a prompt is there. None for a job that may be tried again,
    when the mask that it waits for is there."""
    job, sequence = entry.job, entry.job.sequence
    sampler = Sampler(sequence, read.logits, entry.tree, read.tokens)
    with nullcontext(True) if sequence.guide is None else sequence.guide.turn() as ready:
        try:
            if not ready:
                raise MaskLate
            output = walk(entry.tree, sampler, sequence.text.stop_ids, sequence.text.room)
            output = replace(output, logprobs=sampler.logprobs, top_logprobs=sampler.top_logprobs)
            sequence.commit(output, states, entry.rows.start, moved=read.tokens is not None)
        except MaskLate:
            if read.tokens is None:  # keep the anchor's row alone: a tree changes no token
                row = entry.rows.start
                entry = replace(entry, tree=EMPTY, rows=slice(0, 1))
                read = _Read(read.logits[:1].clone(), read.scored[:0])
                states = {layer: np.array(rows[row : row + 1]) for layer, rows in states.items()}
            job.retry = partial(_or_fail, job, partial(_emit, entry, read, states))
            return None
        except Exception:
            sequence.forget_uncommitted()
            raise
    if (guesses := _recycling(entry)) is not None:
        guesses.checked(entry.tree, *(read.candidates or best_candidates(read.logits, WIDTH)))
    last = 1 + output.accepted[-1] if output.accepted else 0
    for observer in tuple(sequence.observers):
        observer.accepted(last)
    return output


def _recycling(entry: BatchEntry) -> LocalGuesses | None:
    """Return guesses of an entry that recycle what its rows find likely; None if it has none."""
    guesses = entry.job.local if isinstance(entry.job, Decode) else None
    return None if guesses is None or guesses.recycled is None else guesses


def _read(
    entries: Sequence[BatchEntry],
    logits: Tensor,
    states: Mapping[int, Tensor],
    meanwhile: Callable[[], None],
) -> list[_Read]:
    """Choose tokens, move KV and keep states on the device; then wait for what the host needs.

    Where a grammar fails, the tokens are chosen by the walk.
    """
    rows = _Rows()
    chosen = [rows.add(entry) for entry in entries]
    # Rows of each entry whose logits the host reads, and those whose likeliest tokens it does.
    needed = [
        entry.logits
        if part is None or entry.job.sequence.request.top_logprobs is not None
        else _NO_ROWS
        for entry, part in zip(entries, chosen, strict=True)
    ]
    recycled = [
        entry.logits if part is not None and _recycling(entry) is not None else _NO_ROWS
        for entry, part in zip(entries, chosen, strict=True)
    ]
    needed += [entry.scored for entry in entries]
    copied = _select(needed, logits)
    tokens = rows.choose(logits) if rows.params else None
    likely = _select(recycled, logits)
    best = () if likely is None else best_candidates(likely.float(), WIDTH)
    _keep(entries, chosen, tokens, states)
    meanwhile()
    wanted = [tensor for tensor in (tokens, copied, *best) if tensor is not None]
    on_host = device_of(logits.device).receive(wanted)
    numbers = [] if tokens is None else on_host.pop(0).tolist()
    none = torch.empty(0, logits.shape[1])
    parts = _split(none if copied is None else on_host.pop(0), needed)
    candidates = list(zip(*(_split(tensor, recycled) for tensor in on_host), strict=True))
    return [
        _Read(
            parts[index],
            parts[len(entries) + index],
            None if part is None else numbers[part],
            candidates[index] if recycled[index] is not _NO_ROWS else None,
        )
        for index, part in enumerate(chosen)
    ]


def _select(parts: Sequence[slice], logits: Tensor) -> Tensor | None:
    """Return the logits of some rows, on their device; None if there are no rows."""
    rows = [row for part in parts for row in range(part.start, part.stop)]
    if not rows:
        return None
    if rows == list(range(len(logits))):
        return logits
    return logits[send(torch.tensor(rows, dtype=torch.int64), logits.device)]


def _split(rows: Tensor, parts: Sequence[slice]) -> Sequence[Tensor]:
    """Split the selected rows into the rows of each part."""
    split: Sequence[Tensor] = rows.split([part.stop - part.start for part in parts])
    return split


def _keep(
    entries: Sequence[BatchEntry],
    chosen: Sequence[slice | None],
    tokens: Tensor | None,
    states: Mapping[int, Tensor],
) -> None:
    """Move the KV of the accepted paths of all trees behind their anchors', and keep states."""
    trees: list[tuple[PagedKv, int, TokenTree, int]] = []
    kept: list[tuple[TapPages, int, slice, int | None]] = []
    columns = 0
    for entry, part in zip(entries, chosen, strict=True):
        sequence, column = entry.job.sequence, None
        kv = sequence.kv
        assert isinstance(kv, PagedKv), "a GPU has no other"
        if part is not None and not entry.tree.is_chain:
            trees.append((kv, len(sequence.tokens) - 1, entry.tree, part.start))
            column, columns = columns, columns + 1 + len(entry.tree)
        if kv.taps is not None:
            kept.append((kv.taps, sequence.committed, entry.rows, column))
    moved = None
    if trees:
        assert tokens is not None
        moved = trees[0][0].pool.keep_accepted(trees, tokens)
    if kept:
        kept[0][0].pool.record(kept, states, moved)


@dataclass
class _Rows:
    """Rows whose tokens are chosen on the device."""

    rows: list[int] = field(default_factory=list)
    params: list[SamplingRules] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    edited: dict[int, Edits] = field(default_factory=dict)
    masks: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    drafted: dict[int, tuple[int, Proposal]] = field(default_factory=dict)

    def add(self, entry: BatchEntry) -> slice | None:
        """Add the rows of an entry; returns where they are, or None if the walk must choose."""
        sequence, first = entry.job.sequence, len(self.rows)
        sampling = sequence.text.sampling
        count = entry.logits.stop - entry.logits.start
        if not count:
            return None
        contexts: dict[int, tuple[Edits, NDArray[np.uint8] | None]] = {}
        if sampling.penalised or sequence.guide is not None:
            turn = nullcontext(True) if sequence.guide is None else sequence.guide.turn()
            try:
                with turn as ready:
                    if not ready:
                        return None
                    _add_contexts(contexts, sequence, entry.tree, -1)
            except (GrammarError, MaskLate):
                return None
            except Exception as error:
                _log.warning("tokens are chosen one by one: %s", error)
                return None
        for node, (change, mask) in contexts.items():
            self.edited[first + 1 + node] = change
            if mask is not None:
                self.masks[first + 1 + node] = mask
        if sampling.rejection:
            for node, token in enumerate(entry.tree.tokens):
                self.drafted[first + node] = token, _proposal(entry.tree, node)
        self.rows += range(entry.logits.start, entry.logits.stop)
        self.params += [sampling] * count
        depths = (0, *entry.tree.depths)[:count]
        self.positions += [len(sequence.tokens) + depth for depth in depths]
        return slice(first, first + count)

    def choose(self, logits: Tensor) -> Tensor:
        """Return the token after each row, int64 ``[n]`` on the device, by the batch's logits."""
        device = logits.device
        if len(self.rows) < len(logits):
            logits = logits[send(torch.tensor(self.rows), device)]
        if self.edited:
            logits = logits.to(torch.float32, copy=True)
        if self.masks:
            masked = send(torch.tensor([*self.masks]), device)
            packed = send(torch.from_numpy(np.stack([*self.masks.values()])), device)
            bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
            refused = bits.flatten(1)[:, : logits.shape[1]] == 0
            logits[masked] = logits[masked].masked_fill(refused, -torch.inf)
        if self.edited:
            edit_rows(logits, [*self.edited], [*self.edited.values()])
        return choose_tokens(logits, self.params, self.positions, self.drafted)


def _add_contexts(
    contexts: dict[int, tuple[Edits, NDArray[np.uint8] | None]],
    sequence: CachedSequence,
    tree: TokenTree,
    node: int,
) -> None:
    """Penalties and grammar mask after a node (-1: the anchor) and those below it. Raises
    ``MaskLate``: there is no time for a mask.

    Nodes that cannot be accepted, because a stop token or the grammar is above them, are left out.
    """
    history, guide, text = sequence.history, sequence.guide, sequence.text
    mask = None if guide is None else guide.allowed()
    if guide is not None and mask is None:
        raise MaskLate  # or there is none, where it may never be needed
    contexts[node] = edits(text.sampling, history), mask
    for child in tree.children(node):
        token = tree.tokens[child]
        refused = mask is not None and not is_allowed(mask, token)
        if refused or token in text.stop_ids:
            continue
        if guide is not None:
            guide.push(token)
        history.push(token)
        try:
            _add_contexts(contexts, sequence, tree, child)
        finally:
            history.pop()
            if guide is not None:
                guide.pop(1)
