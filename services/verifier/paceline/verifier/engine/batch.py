"""A step: one packed forward pass over blocks of many sequences, and acceptance of its trees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoder import Decoder, ForwardResult, GraphRunner
from paceline.decoder.graphs import table_row
from paceline.kernels import (
    MAX_TREE_NODES,
    Probe,
    ProbedBlock,
    Proposal,
    SamplingParams,
    TreeSegment,
    accept_or_resample,
    choose_token,
    choose_tokens,
    plan_trees,
    raw_logprobs,
    send,
)
from paceline.kv.selection import ScoreObserver
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import (
    Decode,
    EngineJob,
    FinishReason,
    HiddenStates,
    Prefill,
    Sequence,
    StepFailed,
    StepOutput,
)
from paceline.verifier.kv.base import SequenceKv


@dataclass(frozen=True)
class _Observed:
    """The block of a batch that one observer observes.

    Attributes:
        observer: The sequence's observer.
        block: Index of the block in the plan.
        nodes: Observed rows, counted inside the block.
        rows: The same rows, counted in the batch.
    """

    observer: ScoreObserver
    block: int
    nodes: tuple[int, ...]
    rows: tuple[int, ...]


class BatchObserver:
    """All observers of a forward pass; a :class:`paceline.decoder.AttentionObserver`."""

    def __init__(self) -> None:
        self._observed: list[_Observed] = []

    def __len__(self) -> int:
        """Number of observers."""
        return len(self._observed)

    def add(self, observer: ScoreObserver, block: int, segment: TreeSegment, first: int) -> None:
        """Add the observer of one sequence.

        Args:
            observer: The observer; its step begins.
            block: Index of the sequence's block in the plan.
            segment: That block.
            first: Its first row in the batch.
        """
        nodes = observer.nodes(segment)
        observer.begin(block, nodes, segment.start)
        rows = tuple(first + node for node in nodes)
        self._observed.append(_Observed(observer, block, nodes, rows))

    def probes(self, layer: int) -> Items[Probe]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        observers = [each.observer for each in self._observed if layer in each.observer.layers]
        return [probe for observer in observers for probe in observer.probes(layer)]

    def rows(self, layer: int) -> Items[int]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        return [row for each in self._querying(layer) for row in each.rows]

    def attended(self, layer: int, q: Tensor) -> None:
        """See :class:`paceline.decoder.AttentionObserver`."""
        querying = self._querying(layer)
        parts = q.split([len(each.rows) for each in querying])
        for each, part in zip(querying, parts, strict=True):
            each.observer.attended(layer, part)

    def scratch(self, windows: Items[int | None]) -> tuple[tuple[int, ...], list[ProbedBlock]]:
        """Returns what a captured graph has to store: layers, and blocks with scratch buffers.

        Args:
            windows: Sliding window of each layer of the model, or None.

        Returns:
            Nothing if one captured graph cannot serve all observers: it stores scores, not weights,
            of the same layers for all, and of layers without a window.
        """
        observed = {tuple(each.observer.layers) for each in self._observed}
        if len(observed) != 1:
            return (), []
        (layers,) = observed
        if any(windows[layer] is not None for layer in layers):
            return (), []
        blocks = []
        for each in self._observed:
            scratch = each.observer.scratch()
            if scratch is None:
                return (), []
            blocks.append(ProbedBlock(each.block, each.nodes, scratch))
        return layers, blocks

    def publish(self, q_heads: int) -> None:
        """Called when the pass of a model with so many query heads has ended."""
        for each in self._observed:
            each.observer.publish(q_heads)

    def _querying(self, layer: int) -> list[_Observed]:
        return [
            each
            for each in self._observed
            if each.observer.wants_queries and layer in each.observer.layers
        ]


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One job's part of a batch.

    Attributes:
        job: The job.
        tree: The drafted nodes that the scheduler admitted.
        stop: Position after the entry's last one. Unit: tokens.
        logits: Its rows of the batch's logits: the anchor's and one per node, or the last one of a
            prefill; none in the middle of a prefill.
        rows: Its rows of the batch.
        scored: Rows of the batch's logits that give the log-probabilities of the prompt's next
            tokens; none unless they are requested.
    """

    job: EngineJob
    tree: TokenTree
    stop: int
    logits: slice
    rows: slice
    scored: slice


class Batch:
    """Collects query blocks, then runs them in one forward pass.

    Attributes:
        entries: One per job, in order.
        tokens: Packed tokens so far.
    """

    def __init__(self) -> None:
        self.entries: list[BatchEntry] = []
        self.tokens: list[int] = []
        self._blocks: list[TreeSegment] = []
        self._caches: list[SequenceKv] = []
        self._logit_rows: list[int] = []
        self._taps: set[int] = set()
        self._observer = BatchObserver()

    @classmethod
    def of(cls, entry: BatchEntry) -> Batch:
        """A batch of one entry of another batch."""
        batch = cls()
        if isinstance(entry.job, Decode):
            batch.add_decode(entry.job, entry.tree)
        elif isinstance(entry.job, Prefill):
            batch.add_prefill(entry.job, entry.stop)
        return batch

    def __len__(self) -> int:
        """Number of packed tokens."""
        return len(self.tokens)

    @property
    def attended(self) -> int:
        """KV positions attended to, summed over the packed tokens; half of a block's own."""
        blocks = self._blocks
        return sum(block.length * (block.start + (block.length + 1) // 2) for block in blocks)

    def add_decode(self, job: Decode, tree: TokenTree) -> None:
        """Add the block of a generation: the anchor and the tree under it."""
        sequence, nodes = job.sequence, 1 + len(tree)
        first, start = len(self._logit_rows), sequence.committed
        self._logit_rows.extend(range(len(self), len(self) + nodes))
        self._add_entry(job, tree, start + nodes, slice(first, first + nodes), slice(0, 0))
        parents = None if tree.is_chain else (-1, *(parent + 1 for parent in tree.parents))
        self._add_block(start, [sequence.tokens[-1], *tree.tokens], parents)
        index, block = len(self._blocks) - 1, self._blocks[-1]
        for observer in tuple(sequence.observers):
            self._observer.add(observer, index, block, len(self.tokens) - block.length)

    def add_prefill(self, prefill: Prefill, stop: int) -> None:
        """Add a part of a prefill: the text from its committed length to ``stop``."""
        sequence = prefill.sequence
        start, ends = sequence.committed, stop == len(sequence.tokens)
        scored = 0
        if sequence.generation.prompt_logprobs is not None:
            scored = max(0, min(stop, len(sequence.generation.prompt) - 1) - start)
        first = len(self._logit_rows)
        self._logit_rows.extend(range(len(self), len(self) + scored))
        chosen = len(self._logit_rows)
        if ends:
            self._logit_rows.append(len(self) + stop - start - 1)
        logits, prompt = slice(chosen, chosen + ends), slice(first, chosen)
        self._add_entry(prefill, EMPTY, stop, logits, prompt)
        for start in range(sequence.committed, stop, MAX_TREE_NODES):
            self._add_block(start, sequence.tokens[start : min(start + MAX_TREE_NODES, stop)])

    def forward(
        self, decoder: Decoder, graphs: GraphRunner | None = None
    ) -> tuple[Tensor, HiddenStates]:
        """Run the model, which writes the KV of all blocks.

        Args:
            decoder: The model.
            graphs: Its CUDA graphs; a batch that no graph can run is run without.

        Returns:
            Logits ``[rows, V]`` on the model's device, and the outputs of all layers whose hidden
            states any sequence keeps.
        """
        taps = sorted(self._taps)
        every = len(self._logit_rows) == len(self.tokens)
        rows = torch.empty(0, dtype=torch.int64)
        if not every:
            rows = send(torch.tensor(self._logit_rows, dtype=torch.int64), decoder.device)
        if graphs is not None:
            result = self._replay(decoder, graphs, taps)
            if result is not None:
                logits = result.logits if every else result.logits[rows]
                return logits, dict(zip(taps, result.taps, strict=True))
        result = decoder.forward(
            send(torch.tensor(self.tokens), decoder.device),
            plan_trees(self._blocks, device=decoder.device),
            self._caches,
            logit_rows=None if every else rows,
            taps=taps,
            observer=self._observer if len(self._observer) else None,
        )
        self._observer.publish(decoder.config.q_heads)
        return result.logits, dict(zip(taps, result.taps, strict=True))

    def _replay(
        self, decoder: Decoder, graphs: GraphRunner, taps: Items[int]
    ) -> ForwardResult | None:
        """Replay a CUDA graph; None if no graph can run the batch and observe its attention."""
        config = decoder.config
        layers, probed = self._observer.scratch(config.windows)
        if len(self._observer) and not probed:
            return None
        tables = [table_row(cache) for cache in self._caches]
        result = graphs.forward(self.tokens, self._blocks, tables, taps, layers, probed)
        if result is not None:
            self._observer.publish(config.q_heads)
        return result

    def _add_entry(
        self,
        job: EngineJob,
        tree: TokenTree,
        stop: int,
        logits: slice,
        scored: slice,
    ) -> None:
        sequence = job.sequence
        rows = slice(len(self), len(self) + stop - sequence.committed)
        self.entries.append(BatchEntry(job, tree, stop, logits, rows, scored))
        self._caches.append(sequence.segment)
        if sequence.generation.taps is not None:
            self._taps.update(sequence.generation.taps.layers)

    def _add_block(
        self, start: int, tokens: list[int], parents: tuple[int, ...] | None = None
    ) -> None:
        """Add a block of the newest entry."""
        self._blocks.append(TreeSegment(len(self._caches) - 1, start, parents, len(tokens)))
        self.tokens += tokens


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
    last = 1 + output.accepted[-1] if output.accepted else 0
    for observer in tuple(sequence.observers):
        observer.accepted(last)
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
