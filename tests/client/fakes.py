"""A verifier and a drafter over real gRPC whose model is a hash of the text."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import zlib
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.client import MockTransport
from paceline.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    sampling_pb2,
    tree_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)

END = MockTransport.END
TOKENIZER = MockTransport("")._json
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()
LETTERS = b"abcdefgh "


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake target: one letter, a function of all tokens before it."""
    return LETTERS[zlib.crc32(array("I", tokens).tobytes(), seed % 2**32) % len(LETTERS)]


def continuation(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    """What every generation must emit."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def status(
    code: grpc.StatusCode, reason: str, message: str, retry_after: float | None = None
) -> Any:
    """A rich status as the real services send it."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="paceline", metadata={"k": "v"})]
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=message, details=packed)
    )


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
    """Keeps the contract of the real one, and breaks where a test says so.

    `fault(round_id, messages)` is called before each answer with the number of answers sent in
    this round; it may raise, or return False to drop the stream without a word.
    """

    def __init__(self) -> None:
        self.caches: dict[bytes, Cache] = {}
        self.made = 0
        self.instance = "first"
        self.fingerprint = "f" * 64
        self.full = 0
        self.retry_after: float | None = 0.01
        self.step_seconds = 0.0
        self.prefill_seconds = 0.0
        self.renewals = 0
        self.strays = False
        self.release_faults: list[grpc.StatusCode] = []
        self.arrival = asyncio.Condition()
        self.rounds: list[verifier_pb2.VerifyRequest] = []
        self.creates: list[verifier_pb2.CreateCacheRequest] = []
        self.models_asked: list[verifier_pb2.GetModelRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.lease_ms = 30_000
        self.node_budget = 64
        self.with_tokenizer = True
        self.fault: Callable[[int, int], grpc.StatusCode | str | None] = lambda *_: None

    def restart(self, fingerprint: str | None = None) -> None:
        """Forgets everything, as a new process would."""
        self.caches.clear()
        self.instance += "'"
        self.fingerprint = fingerprint or self.fingerprint

    async def wait_for_rounds(self, count: int) -> None:
        """Returns when so many rounds have arrived in all."""
        async with self.arrival:
            await self.arrival.wait_for(lambda: len(self.rounds) >= count)

    async def wait_for_renewals(self, count: int) -> None:
        """Returns when leases were renewed so many times in all."""
        async with self.arrival:
            await self.arrival.wait_for(lambda: self.renewals >= count)

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.models_asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        wanted = not request.omit_tokenizer and request.known_tokenizer_digest != DIGEST
        return verifier_pb2.GetModelResponse(
            name="fake",
            vocab_size=257,
            max_context=4096,
            eos_token_ids=[END],
            target_fingerprint=self.fingerprint,
            tokenizer_digest=DIGEST if self.with_tokenizer else "",
            tokenizer_gzip=gzip.compress(TOKENIZER) if wanted and self.with_tokenizer else b"",
            max_tree_nodes=64,
            instance_id=self.instance,
            batch_invariant=True,
            lease_ms=self.lease_ms,
        )

    async def CreateCache(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.creates.append(request)
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
            await asyncio.sleep(self.prefill_seconds / 2)
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
        yield verifier_pb2.CreateCacheResponse(created=created)
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            # As the real one: whoever leaves this call early has no use for the cache.
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
        async with self.arrival:
            self.renewals += 1
            self.arrival.notify_all()
        return verifier_pb2.RenewLeaseResponse(lease_ms=self.lease_ms)

    async def ReleaseCache(self, request: Any, context: Any) -> Any:
        if self.release_faults:
            await context.abort(self.release_faults.pop(), "scripted")
        released = self.caches.pop(request.handle, None) is not None
        return verifier_pb2.ReleaseCacheResponse(released=released)


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts with the target's own function, spoilt in the way a test names."""

    def __init__(self) -> None:
        self.mode = "good"
        self.seconds = 0.0
        self.attaches: list[drafter_pb2.DraftAttach] = []
        self.asked = 0
        self.out_of_step = 0

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        text: list[int] = []
        seed = 0
        async for request in requests:
            if request.HasField("attach"):
                self.attaches.append(request.attach)
                if self.mode == "refusing":
                    await context.abort_with_status(
                        status(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TARGET", "not for it")
                    )
                text = list(request.attach.tokens)
                seed = request.attach.sampling.seed
                name = request.attach.drafter or "fake"
                yield drafter_pb2.DraftResponse(
                    attached=drafter_pb2.DraftAttached(drafter=name, version="1", max_nodes=32)
                )
                continue
            self.asked += 1
            ask = request.round
            text.extend(ask.new_tokens)
            self.out_of_step += len(text) != ask.total_length
            if self.mode == "dying" and self.asked % 3 == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
            if self.mode == "silent":
                continue
            await asyncio.sleep(self.seconds)
            if self.mode == "stray":
                stray = tree_pb2.TokenTree(tokens=[1, 2], parents=[-1])
                yield drafter_pb2.DraftResponse(
                    tree=drafter_pb2.DraftTree(round_id=ask.round_id + 100, tree=stray)
                )
            tree = self.tree(text, seed, ask.node_budget)
            yield drafter_pb2.DraftResponse(
                tree=drafter_pb2.DraftTree(
                    round_id=ask.round_id, tree=tree, draft_us=10, version="1"
                )
            )

    def tree(self, text: list[int], seed: int, budget: int) -> tree_pb2.TokenTree:
        """A chain of 4 right tokens, each with a wrong sister, or what the mode says."""
        chain = continuation(text, 4, seed)
        match self.mode:
            case "empty":
                return tree_pb2.TokenTree()
            case "wrong":
                return tree_pb2.TokenTree(tokens=[1] * 8, parents=[-1] * 8)
            case "huge":
                return tree_pb2.TokenTree(tokens=[1] * 10_000, parents=[-1] * 10_000)
            case "lengths":
                return tree_pb2.TokenTree(tokens=chain, parents=[-1])
            case "forward":
                return tree_pb2.TokenTree(tokens=chain, parents=[1, 2, 3, 4])
        tokens, parents, last = [], [], -1
        for token in chain:
            tokens += [255, token]
            parents += [last, last]
            last = len(tokens) - 1
        return tree_pb2.TokenTree(tokens=tokens[:budget], parents=parents[:budget])


class Service:
    """A servicer on a unix socket that can be stopped hard and started again."""

    def __init__(self, path: Path, register: Callable[[grpc.aio.Server], None]) -> None:
        self.address = f"unix:{path}"
        self._register = register
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        self._register(self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


@dataclass
class World:
    """Both fakes, running."""

    verifier: FakeVerifier
    drafter: FakeDrafter
    verifier_service: Service
    drafter_service: Service

    @property
    def addresses(self) -> tuple[str, str]:
        return self.verifier_service.address, self.drafter_service.address


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[World]:
    verifier, drafter = FakeVerifier(), FakeDrafter()
    world = World(
        verifier,
        drafter,
        Service(
            folder / "v",
            lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(
                verifier, server
            ),
        ),
        Service(
            folder / "d",
            lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, server),
        ),
    )
    await world.verifier_service.start()
    await world.drafter_service.start()
    try:
        yield world
    finally:
        await world.drafter_service.stop()
        await world.verifier_service.stop()
