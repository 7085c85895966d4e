"""A verifier with faults for tests."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc

from .fake_target import DIGEST, END, TOKENIZER, next_token
from .statuses import status

Fault = grpc.StatusCode | grpc.Status | str
"""A status, "reset": the connection breaks, or "end": the stream ends."""


@dataclass
class Cache:
    """One sequence on the fake verifier."""

    tokens: list[int]
    request: verifier_pb2.CreateCacheRequest
    emitted: int
    round_id: int = 0
    round_result: verifier_pb2.RoundResult = field(default_factory=verifier_pb2.RoundResult)
    round_answer: verifier_pb2.VerifyResponse | None = None

    def step(self) -> tuple[int, int]:
        """Emits one token; returns it and the finish reason."""
        token = next_token(self.tokens, self.request.sampling.seed)
        self.tokens.append(token)
        self.emitted += 1
        if token in self.request.stop_token_ids:
            return token, sampling_pb2.FINISH_REASON_STOP
        if self.emitted >= self.request.max_new_tokens:
            return token, sampling_pb2.FINISH_REASON_LENGTH
        return token, sampling_pb2.FINISH_REASON_UNSPECIFIED


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Implements the contract of the real one, with faults.

    `fault(round_id, messages)` is called before each response with the number of responses sent in
    this round.
    """

    def __init__(self) -> None:
        self.caches: dict[bytes, Cache] = {}
        self.made = 0
        self.instance = "first"
        self.fingerprint = "f" * 64
        self.batch_invariant = True
        self.numerics = "portable"
        self.draining = False
        self.others = 0
        self.max_context = 4096
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.full = 0
        self.retry_after: float | None = 0.01
        self.step_seconds = 0.0
        self.renewals = 0
        self.strays = False
        self.create_faults: list[grpc.Status] = []
        self.release_faults: list[grpc.StatusCode] = []
        self.arrival = asyncio.Condition()
        self.rounds: list[verifier_pb2.VerifyRequest] = []
        self.creates: list[verifier_pb2.CreateCacheRequest] = []
        self.models_asked: list[verifier_pb2.GetModelRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.clients: list[tuple[str, str]] = []
        self.lease_ms = 30_000
        self.node_budget = 64
        self.with_tokenizer = True
        self.chat_template = ""
        self.fault: Callable[[int, int], Fault | None] = lambda *_: None

    def fail_once(self, round_id: int, messages: int, fault: Fault) -> None:
        """One fault before response number `messages` of a round."""
        left = [fault]
        self.fault = lambda now, sent: (
            left.pop() if left and (now, sent) == (round_id, messages) else None
        )

    def restart_once(self, round_id: int, messages: int, fingerprint: str | None = None) -> None:
        """A restart before response number `messages` of a round. It ends batch invariance."""
        self.fail_once(round_id, messages, "reset")
        fail = self.fault

        def fault(now: int, sent: int) -> Fault | None:
            what = fail(now, sent)
            if what:
                self.restart(fingerprint)
                self.batch_invariant = False
            return what

        self.fault = fault

    def restart(self, fingerprint: str | None = None) -> None:
        """Loses all caches, as a new process."""
        self.caches.clear()
        self.instance += "'"
        self.fingerprint = fingerprint or self.fingerprint

    async def wait_for_rounds(self, count: int) -> None:
        """Waits until so many rounds have arrived in all."""
        async with self.arrival:
            await self.arrival.wait_for(lambda: len(self.rounds) >= count)

    async def wait_for_renewals(self, count: int) -> None:
        """Waits until leases were renewed so many times in all."""
        async with self.arrival:
            await self.arrival.wait_for(lambda: self.renewals >= count)

    def _called(self, rpc: str, context: Any) -> None:
        self.clients.append((rpc, dict(context.invocation_metadata())["paceline-client"]))

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.models_asked.append(request)
        await self.may_answer.wait()
        self.metadata.append(dict(context.invocation_metadata()))
        wanted = not request.omit_tokenizer and request.known_tokenizer_digest != DIGEST
        return verifier_pb2.GetModelResponse(
            name="fake",
            vocab_size=257,
            max_context=self.max_context,
            chat_template=self.chat_template,
            eos_token_ids=[END],
            target_fingerprint=self.fingerprint,
            tokenizer_digest=DIGEST if self.with_tokenizer else "",
            tokenizer_gzip=gzip.compress(TOKENIZER) if wanted and self.with_tokenizer else b"",
            max_tree_nodes=64,
            instance_id=self.instance,
            batch_invariant=self.batch_invariant,
            lease_ms=self.lease_ms,
            numerics=self.numerics,
            draining=self.draining,
            generations=len(self.caches) + self.others,
        )

    async def CreateCache(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._called("CreateCache", context)
        self.creates.append(request)
        if self.draining:
            await context.abort_with_status(
                status(grpc.StatusCode.UNAVAILABLE, "DRAINING", "shutting down")
            )
        if self.create_faults:
            await context.abort_with_status(self.create_faults.pop())
        if self.full > 0:
            self.full -= 1
            await context.abort_with_status(
                status(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL", "no room", self.retry_after)
            )
        if request.parent_handle and request.parent_handle not in self.caches:
            await context.abort_with_status(
                status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_HANDLE", "no such parent")
            )
        tokens = [*request.prompt_tokens, *request.output_tokens]
        for done in (len(tokens) // 2, len(tokens)):
            yield verifier_pb2.CreateCacheResponse(
                progress=verifier_pb2.PrefillProgress(
                    prefilled_tokens=done, total_tokens=len(tokens)
                )
            )
        self.made += 1
        handle = hashlib.md5(f"{self.instance}{self.made}".encode()).digest()
        cache = self.caches[handle] = Cache(tokens, request, len(request.output_tokens))
        created = verifier_pb2.CacheCreated(
            handle=handle,
            read_grant=handle[::-1],
            lease_ms=self.lease_ms,
            prefill_us=1000,
            reused_tokens=7 if request.parent_handle else 0,
        )
        self._emit(cache, created.first)
        try:
            yield verifier_pb2.CreateCacheResponse(created=created)
            await asyncio.sleep(0.001)
        except BaseException:
            # As the real one: a call that is cancelled before its end leaves no cache.
            self.caches.pop(handle, None)
            raise

    def _emit(self, cache: Cache, result: Any) -> int:
        token, reason = cache.step()
        result.tokens.append(token)
        result.finish_reason = reason
        result.committed_length = len(cache.tokens) - 1
        if cache.request.logprobs or cache.request.top_logprobs:
            result.logprobs.append(-float(token))
        if cache.request.top_logprobs:
            top = [token, *range(cache.request.top_logprobs - 1)]
            result.top_logprobs.add(tokens=top, logprobs=[-float(t) for t in top])
        return reason

    async def Verify(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self._called("Verify", context)
        handle = b""
        async for request in requests:
            async with self.arrival:
                self.rounds.append(request)
                self.arrival.notify_all()
            handle = request.handle or handle
            cache = self.caches.get(handle)
            if cache is None:
                await context.abort_with_status(
                    status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_HANDLE", "no such cache")
                )
            messages = 0
            if self.strays:
                stray = verifier_pb2.RoundResult(tokens=[1, 2, 3])
                yield verifier_pb2.VerifyResponse(round_id=request.round_id + 100, result=stray)
            async for response in self._round(cache, request, context):
                fault = self.fault(request.round_id, messages)
                if fault == "reset":
                    await context.abort(grpc.StatusCode.CANCELLED)
                if fault == "end":
                    return
                if isinstance(fault, grpc.Status):
                    await context.abort_with_status(fault)
                if fault is not None:
                    await context.abort(fault, "scripted")
                yield response
                messages += 1

    async def _round(self, cache: Cache, request: Any, context: Any) -> AsyncIterator[Any]:
        again = request.round_id == cache.round_id
        if not again and request.round_id != cache.round_id + 1:
            await context.abort_with_status(
                status(grpc.StatusCode.FAILED_PRECONDITION, "STALE_ROUND", "stale round")
            )
        if again and cache.round_answer is not None:
            yield cache.round_answer
            return
        nodes = len(request.tree.tokens)
        parents = list(request.tree.parents)
        if len(parents) != nodes or any(not -1 <= p < i for i, p in enumerate(parents)):
            await context.abort_with_status(
                status(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_TREE", "bad parents")
            )
        if not again:
            cache.round_id, cache.round_answer = request.round_id, None
            cache.round_result = verifier_pb2.RoundResult()
        answer = verifier_pb2.VerifyResponse(
            round_id=request.round_id,
            node_budget=self.node_budget,
            checked_nodes=nodes,
            verify_us=int(self.step_seconds * 1e6),
        )
        if nodes:
            await asyncio.sleep(self.step_seconds)
            node, reason = -1, 0
            while not reason:
                reason = self._emit(cache, answer.result)
                token = answer.result.tokens[-1]
                node = next(
                    (
                        i
                        for i in range(nodes)
                        if parents[i] == node and request.tree.tokens[i] == token
                    ),
                    -2,
                )
                if node == -2:
                    break
                answer.result.accepted_nodes.append(node)
            answer.last = True
            cache.round_answer = answer
            yield answer
            return
        steps = max(request.free_run_steps, 1)
        if cache.round_result.tokens:
            answer.result.CopyFrom(cache.round_result)
            yield answer
        for step in range(len(cache.round_result.tokens), steps):
            await asyncio.sleep(self.step_seconds)
            answer.ClearField("result")
            reason = self._emit(cache, answer.result)
            cache.round_result.MergeFrom(answer.result)
            answer.last = bool(reason) or step == steps - 1
            if answer.last:
                cache.round_answer = verifier_pb2.VerifyResponse()
                cache.round_answer.CopyFrom(answer)
                cache.round_answer.result.CopyFrom(cache.round_result)
            yield answer
            if reason:
                return

    async def RenewLease(self, request: Any, context: Any) -> Any:
        self._called("RenewLease", context)
        async with self.arrival:
            self.renewals += 1
            self.arrival.notify_all()
        return verifier_pb2.RenewLeaseResponse(lease_ms=self.lease_ms)

    async def ReleaseCache(self, request: Any, context: Any) -> Any:
        self._called("ReleaseCache", context)
        if self.release_faults:
            await context.abort(self.release_faults.pop(), "scripted")
        released = self.caches.pop(request.handle, None) is not None
        return verifier_pb2.ReleaseCacheResponse(released=released)
