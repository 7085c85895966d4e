"""The rounds of one generation: draft, verify, publish, until the text ends."""

from __future__ import annotations

from time import perf_counter

from paceline.telemetry.names import Span
from paceline.v1 import drafter_pb2, tree_pb2, verifier_pb2

from ._chunks import ChunkQueue
from ._context import GenerationContext
from ._drafter import DrafterSession
from ._output import Output, Undrafted
from ._stats import RoundStats
from ._verifier import VerifierSession

# Steps of a free run: where drafting is off or does not pay, where the drafter is not ready or
# late, and where it found nothing to draft.
_PLAIN_RUN, _WAITING_RUN, _EMPTY_RUN = 64, 16, 1

# What came out, the index of its round, and the tree that was verified or why there is none.
_Published = tuple[verifier_pb2.RoundResult, int, tree_pb2.TokenTree | None, Undrafted | None]


class Rounds:
    """The round loop of a generation.

    A round drafts if the verifier's node budget is positive; with ``eager``, every round drafts.
    The next tree is requested as soon as the tokens of a round are known. These tokens are
    detokenized and published while the verifier runs the next round, because that takes about as
    long as a fast drafter. No token depends on the decisions made here.
    """

    def __init__(
        self,
        verifier: VerifierSession,
        drafter: DrafterSession | None,
        output: Output,
        chunks: ChunkQueue,
        context: GenerationContext,
        *,
        eager: bool,
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._output = output
        self._chunks = chunks
        self._options, self._stats, self._trace = context.options, context.stats, context.trace
        self._eager = eager
        limit = context.facts.max_tree_nodes
        self._most_nodes = min(context.options.max_nodes or limit, limit)
        self._node_budget = self._most_nodes
        self._committed = 0
        self._steps = 0
        self._tree_requested = False
        self._undrafted: Undrafted = "no_drafter"
        self._round_began = perf_counter()
        self._grant = b""
        self._unpublished: _Published | None = None

    async def run(self) -> int:
        """Generates until the output's finish_reason is set.

        Returns the number of prompt tokens whose KV came from another cache.
        """
        began = perf_counter()
        created = await self._verifier.cache.create()
        self._stats.first_token_ms = (perf_counter() - began) * 1000
        if created.HasField("node_budget"):
            self._node_budget = created.node_budget
        await self._accept(created.first)
        self._publish(created.first, 0)
        try:
            while not self._output.finish_reason:
                if self._chunks.full:
                    await self._wait_for_reader()
                tree = await self._drafted_tree()
                if tree is None:
                    self._publish_waiting()
                    if not self._output.finish_reason:
                        await self._free_run()
                else:
                    await self._verify(tree)
        finally:
            self._publish_waiting()
        return created.reused_tokens

    async def _verify(self, tree: drafter_pb2.DraftTree) -> None:
        """Runs a round with a tree."""
        await self._verifier.start(tree.tree, 0)
        self._publish_waiting()
        if self._output.finish_reason:
            return  # a stop string: the tokens of this round come after it
        response = await self._verifier.receive()
        seconds = perf_counter() - self._round_began
        result = response.result
        assert self._drafter is not None
        if self._verifier.rejection is not None:
            self._drafter.record_invalid("invalid_tree", self._verifier.rejection.message)
        elif not self._verifier.recovered:
            self._drafter.record_verified(tree)
        entry = RoundStats(
            drafted=0 if self._verifier.rejection else len(tree.tree.tokens),
            accepted=len(result.accepted_nodes),
            emitted=len(result.tokens),
            round_ms=seconds * 1000,
            draft_ms=tree.draft_us / 1000,
            verify_ms=response.verify_us / 1000,
            queue_ms=(tree.queue_us + response.queue_us) / 1000,
            checked=response.checked_nodes,
            node_budget=response.node_budget,
            kv_bytes=tree.kv_bytes,
        )
        self._end_round(entry, response)
        self._node_budget = response.node_budget
        self._unpublished = (result, len(self._stats.rounds), tree.tree, None)
        await self._accept(result)

    async def _free_run(self) -> None:
        """Runs a round without a tree; publishes the tokens of its steps as they arrive."""
        self._tree_requested = False
        undrafted = self._undrafted
        began = perf_counter()
        emitted, verify_us, queue_us = 0, 0, 0
        left = self._options.max_new_tokens - len(self._output.token_ids)
        await self._verifier.start(None, min(self._steps, left))
        last = False
        while not last and not self._output.finish_reason:
            response = await self._verifier.receive()
            result, last = response.result, response.last
            emitted += len(result.tokens)
            verify_us += response.verify_us
            queue_us += response.queue_us
            if last:
                entry = RoundStats(
                    drafted=0,
                    accepted=0,
                    emitted=emitted,
                    round_ms=(perf_counter() - began) * 1000,
                    draft_ms=0.0,
                    verify_ms=verify_us / 1000,
                    queue_ms=queue_us / 1000,
                    node_budget=response.node_budget,
                )
                self._end_round(entry, response)
                self._node_budget = response.node_budget
            self._unpublished = (result, len(self._stats.rounds) + (not last), None, undrafted)
            await self._accept(result, plan=last)
            if not self._tree_requested:
                self._publish_waiting()

    def _end_round(self, entry: RoundStats, response: verifier_pb2.VerifyResponse) -> None:
        self._stats.add(entry)
        if self._trace is not None:
            self._trace.end_round(len(self._stats.rounds), entry, response)

    async def _accept(self, result: verifier_pb2.RoundResult, *, plan: bool = True) -> None:
        """Appends tokens to the output and, unless it is finished, starts the next round."""
        self._output.append(result)
        self._committed = result.committed_length
        if len(self._output.token_ids) >= self._options.max_new_tokens:
            self._output.finish_reason = self._output.finish_reason or "length"
        if plan and not self._output.finish_reason:
            await self._plan()

    async def _plan(self) -> None:
        """Chooses a tree or a free run for the next round, and requests the tree."""
        self._round_began = perf_counter()
        if self._trace is not None:
            self._trace.begin(Span.ROUND)
        self._tree_requested = False
        self._steps = _PLAIN_RUN
        if self._drafter is None:
            return
        nodes = min(self._node_budget, self._most_nodes)
        if self._eager:
            nodes = nodes or self._most_nodes
        if nodes == 0:
            self._undrafted = "node_budget"
            return  # a free run, which the verifier ends when drafting may start again
        self._follow_grant(self._drafter)
        left = self._options.max_new_tokens - len(self._output.token_ids)
        self._steps = _WAITING_RUN
        # The last token of a round is the verifier's own, so a path ends one token earlier.
        self._undrafted = "not_ready" if left > 1 else "last_token"
        if left > 1:
            self._tree_requested = await self._drafter.request_tree(
                nodes, left - 1, self._committed
            )

    def _follow_grant(self, drafter: DrafterSession) -> None:
        grant = self._verifier.cache.read_grant
        if self._grant and grant != self._grant:
            drafter.reattach(grant)
        else:
            drafter.attach(grant)
        self._grant = grant

    async def _drafted_tree(self) -> drafter_pb2.DraftTree | None:
        """The requested tree, if it arrives in time and has nodes."""
        if not self._tree_requested or self._drafter is None:
            return None
        tree = await self._drafter.receive_tree()
        self._undrafted = "late" if tree is None else "empty"
        if tree is None:
            return None
        self._steps = _EMPTY_RUN
        return tree if tree.tree.tokens else None

    def _publish_waiting(self) -> None:
        """Publishes the tokens of the last drafted round, if they were not published yet."""
        if self._unpublished is not None:
            waiting, self._unpublished = self._unpublished, None
            self._publish(*waiting)

    def _publish(
        self,
        result: verifier_pb2.RoundResult,
        index: int,
        tree: tree_pb2.TokenTree | None = None,
        undrafted: Undrafted | None = None,
    ) -> None:
        chunk = self._output.publish(result, index, tree, undrafted)
        if chunk.token_ids or chunk.text:
            self._chunks.put(chunk)

    async def _wait_for_reader(self) -> None:
        """Waits until the reader has taken chunks, and renews the lease of the cache meanwhile."""
        while not await self._chunks.wait_for_room(self._verifier.cache.lease_seconds / 6):
            await self._verifier.cache.renew()
        self._round_began = perf_counter()
