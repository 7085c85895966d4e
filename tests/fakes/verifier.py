"""A verifier with faults, over real gRPC on unix sockets.

The target is a hash of the text, or replies what a test says, with a byte tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.client._options import invalid_requests
from paceline.client._text import BYTE_OF
from paceline.sampling import token_ids
from paceline.v1 import drafter_pb2, sampling_pb2, tree_pb2, verifier_pb2, verifier_pb2_grpc

END = 256  # the token after all bytes
LETTERS = b"abcdefgh "

Reply = str | Sequence[int] | Callable[[str], str]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token i is byte i, with one special token after them."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer().to_str().encode()
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake target: one letter, a function of all tokens before it."""
    return LETTERS[zlib.crc32(array("I", tokens).tobytes(), seed % 2**32) % len(LETTERS)]


def continuation(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def status(
    code: grpc.StatusCode, reason: str, message: str, retry_after: float | None = None
) -> Any:
    """The status of a `ServiceError` with the metadata `k`."""
    from paceline.service import ServiceError  # which a client does without

    error = ServiceError(code, reason, message, retry_after=retry_after, k="v")
    return rpc_status.to_status(error.to_status())


# A status, "reset": the connection breaks, "end": the stream ends, or "restart": a reset by a
# process that loses its caches.
Fault = grpc.StatusCode | grpc.Status | str


@dataclass
class Cache:
    """One sequence on the fake verifier."""

    tokens: list[int]
    request: verifier_pb2.CreateCacheRequest
    position: int  # output tokens of the generation so far
    limit: int  # of output tokens
    reply: list[int] | None  # tokens still to be emitted, before the end; None: the hash
    finish_reason: int = 0
    streams: int = 0
    # All that this cache has emitted.
    emitted: verifier_pb2.RoundResult = field(default_factory=verifier_pb2.RoundResult)

    def step(self, result: verifier_pb2.RoundResult) -> int:
        """Emits one token into a result; returns it."""
        if self.reply is None:
            token = next_token(self.tokens, self.request.sampling.seed)
        else:
            token = self.reply.pop(0) if self.reply else END
        self.tokens.append(token)
        self.position += 1
        if token in (END, *self.request.stop_token_ids):
            self.finish_reason = sampling_pb2.FINISH_REASON_STOP
        elif self.position >= self.limit:
            self.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        for each in (result, self.emitted):
            each.tokens.append(token)
            each.finish_reason = self.finish_reason  # type: ignore[assignment]
            each.committed_length = len(self.tokens) - 1
            if self.request.logprobs or self.request.top_logprobs:
                each.logprobs.append(-float(token) if self.reply is None else 0.0)
            if self.request.top_logprobs:
                top = [token, *range(self.request.top_logprobs - 1)]
                each.top_logprobs.add(tokens=top, logprobs=[-float(t) for t in top])
        return token

    def after(self, position: int) -> verifier_pb2.RoundResult:
        result = verifier_pb2.RoundResult()
        result.CopyFrom(self.emitted)
        known = len(self.emitted.tokens) - (self.position - position)
        for values in (result.tokens, result.logprobs, result.top_logprobs):
            del values[:known]
        return result


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Implements the contract of the real one, with faults.

    `fault(position)` is called before each response with its tokens emitted, which a fault loses,
    and returns the fault or None.

    Args:
        reply: Continuation of every prompt: text, token ids, or a function from the prompt's text
            to that of the continuation; None: the hash.
    """

    def __init__(self, reply: Reply | None = None) -> None:
        if not (reply is None or callable(reply) or isinstance(reply, str)):
            with invalid_requests():
                reply = token_ids("reply", reply, "text, token ids or a function")
        self.reply = reply
        self.name = "fake"
        self.tokenizer = byte_tokenizer()
        self.json = TOKENIZER
        self.waiting: list[asyncio.Event] = []
        self.caches: dict[bytes, Cache] = {}
        self.made = 0
        self.instance = "first"
        self.fingerprint = "f" * 64
        self.next_fingerprint = ""
        self.batch_invariant = True
        self.numerics = "portable"
        self.draining = False
        self.others = 0
        self.max_context = 4096
        self.protocol_version: Any = verifier_pb2.PROTOCOL_VERSION_1
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_prefill = asyncio.Event()
        self.may_prefill.set()
        self.may_release = asyncio.Event()
        self.may_release.set()
        self.reused = 0
        self.full = 0
        self.retry_after: float | None = 0.01
        self.step_seconds = 0.0
        self.renewals = 0
        self.create_faults: list[grpc.Status] = []
        self.start_fault: grpc.StatusCode | None = None
        self.release_faults: list[grpc.StatusCode] = []
        self.starts: list[verifier_pb2.GenerateStart] = []
        self.creates: list[verifier_pb2.CreateCacheRequest] = []
        self.models_asked: list[verifier_pb2.GetModelRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.clients: list[tuple[str, str]] = []
        self.joined: list[verifier_pb2.JoinedService] = []
        self.local_sources: list[str] = []
        self.granted = 0
        self.steps = 0
        self.pauses = 0
        self.lossless = True
        self.merged = 1
        self.node_budget = 64
        self.no_draft = 0
        self.fallbacks: list[str] = []
        self.lease_ms = 30_000
        self.with_tokenizer = True
        self.chat_template = ""
        self.special_tokens: dict[str, str] = {}
        self.fault: Callable[[int], Fault | None] = lambda _: None

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until something that the fake counts is as wanted."""
        async with asyncio.timeout(60):
            while not condition():
                changed = asyncio.Event()
                self.waiting.append(changed)
                await changed.wait()

    def notify(self) -> None:
        for changed in self.waiting:
            changed.set()
        self.waiting.clear()

    async def all_released(self) -> None:
        """Waits until no cache is left: clients release them in the background."""
        await self.wait_for(lambda: not self.caches)

    def fail_at(self, *faults: tuple[int, Fault]) -> None:
        """One fault at or after each of these positions, which grow."""
        left = list(faults)
        self.fault = lambda position: left.pop(0)[1] if left and position >= left[0][0] else None

    def restart(self) -> None:
        """Loses all caches, as a new process does."""
        self.caches.clear()
        self.instance += "'"
        self.fingerprint = self.next_fingerprint or self.fingerprint

    def called(self, rpc: str, context: Any) -> None:
        self.clients.append((rpc, dict(context.invocation_metadata())["paceline-client"]))

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.models_asked.append(request)
        await self.may_answer.wait()
        self.metadata.append(dict(context.invocation_metadata()))
        digest = hashlib.sha256(self.json).hexdigest()
        wanted = not request.omit_tokenizer and request.known_tokenizer_digest != digest
        return verifier_pb2.GetModelResponse(
            name=self.name,
            protocol_version=self.protocol_version,
            vocab_size=257,
            max_context=self.max_context,
            chat_template=self.chat_template,
            special_tokens=self.special_tokens,
            eos_token_ids=[END],
            target_fingerprint=self.fingerprint,
            tokenizer_digest=digest if self.with_tokenizer else "",
            tokenizer_gzip=gzip.compress(self.json) if wanted and self.with_tokenizer else b"",
            max_tree_nodes=64,
            instance_id=self.instance,
            batch_invariant=self.batch_invariant,
            lease_ms=self.lease_ms,
            numerics=[
                verifier_pb2.RuleOfNumerics(
                    region="numerics",
                    implementation=self.numerics,
                    constants={"weights": "float32", "hidden": "float32", "kv": "float32"},
                )
            ],
            draining=self.draining,
            generations=len(self.caches) + self.others,
            drafter_services=self.joined,
            local_sources=self.local_sources,
        )

    async def CreateCache(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.called("CreateCache", context)
        self.creates.append(request)
        await self.may_prefill.wait()
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
        room = self.max_context - len(request.prompt_tokens)
        cache = self.caches[handle] = Cache(
            tokens,
            request,
            position=len(request.output_tokens),
            limit=min(request.max_new_tokens or room, room),
            reply=self.replied(request),
        )
        created = verifier_pb2.CacheCreated(
            handle=handle,
            read_grant=handle[::-1],
            lease_ms=self.lease_ms,
            prefill_us=1000,
            reused_tokens=7 if request.parent_handle else self.reused,
        )
        if request.HasField("prompt_logprobs"):
            created.prompt_logprobs.extend([0.0] * (len(request.prompt_tokens) - 1))
        cache.step(created.first)
        try:
            yield verifier_pb2.CreateCacheResponse(created=created)
            await asyncio.sleep(0.001)
        except BaseException:
            # As the real one: a call that is cancelled before its end leaves no cache.
            self.caches.pop(handle, None)
            self.notify()
            raise

    def replied(self, request: verifier_pb2.CreateCacheRequest) -> list[int] | None:
        """The tokens of the reply that come after the output so far."""
        reply = self.reply
        if callable(reply):
            reply = reply(self.tokenizer.decode(list(request.prompt_tokens)))
        if reply is None:
            return None
        tokens = self.tokenizer.encode(reply).ids if isinstance(reply, str) else list(reply)
        return tokens[len(request.output_tokens) :]

    async def Generate(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.called("Generate", context)
        first = await anext(requests)
        assert first.HasField("start")
        start, credits = first.start, [first.credits]
        self.starts.append(start)
        self.granted += first.credits
        self.notify()
        if self.start_fault is not None:
            await context.abort(self.start_fault, "scripted")
        cache = self.caches.get(start.handle)
        if cache is None:
            await context.abort_with_status(
                status(grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND", "no such cache")
            )
            return
        if start.position > cache.position:
            await context.abort_with_status(
                status(grpc.StatusCode.FAILED_PRECONDITION, "POSITION_AHEAD", "not emitted")
            )
        cache.streams += 1
        stream = cache.streams

        async def read_credits() -> None:
            async for request in requests:
                assert not request.HasField("start")
                credits[0] += request.credits
                self.granted += request.credits
                self.notify()

        reader = asyncio.create_task(read_credits())
        try:
            if start.position < cache.position:
                again = cache.after(start.position)
                yield _message(verifier_pb2.Round(position=start.position, result=again))
            while not cache.finish_reason:
                if not credits[0]:
                    self.pauses += 1
                    self.notify()
                    await self.wait_for(lambda: credits[0] > 0)
                if cache.streams != stream:
                    await context.abort_with_status(
                        status(grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED", "a newer stream")
                    )
                await asyncio.sleep(self.step_seconds)
                response = self.run(cache, start, credits[0])
                credits[0] -= response.steps
                self.steps += response.steps
                self.notify()
                match self.fault(response.position):
                    case None:
                        yield _message(response)
                    case "end":
                        return
                    case ("reset" | "restart") as fault:
                        if fault == "restart":
                            self.restart()
                        await context.abort(grpc.StatusCode.CANCELLED)
                    case grpc.StatusCode() as code:
                        await context.abort(code, "scripted")
                    case fault:
                        await context.abort_with_status(fault)
        finally:
            reader.cancel()

    def run(self, cache: Cache, start: Any, credits: int) -> verifier_pb2.Round:
        """One step with a tree, or as many without one as `merged` and the credits allow."""
        response = verifier_pb2.Round(
            position=cache.position,
            node_budget=self.node_budget,
            verify_us=int(self.step_seconds * 1e6),
            round_us=int(self.step_seconds * 1e6) + 100,
            fallbacks=self.fallbacks,
            fallback_message="scripted" if self.fallbacks else "",
        )
        self.fallbacks = []
        drafter, response.no_draft = self.drafting(cache, start)
        if not response.no_draft:
            response.steps = 1
            response.drafter = drafter
            response.draft_us = 10
            cache.request.sampling.seed += not self.lossless
            self.verify(cache, self.tree(cache, start.max_nodes or 64), response)
            return response
        for _ in range(min(self.merged, credits)):
            response.steps += 1
            cache.step(response.result)
            if cache.finish_reason:
                break
        return response

    def drafting(self, cache: Cache, start: Any) -> tuple[str, Any]:
        """Drafter of the next step as NAME@VERSION, or why there is no tree."""
        wanted = start.drafter if start.HasField("drafter") else None
        if wanted == "none" or (wanted is None and not self.joined):
            return "", verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER
        found = [
            f"{info.name}@{info.version}"
            for service in self.joined
            for info in service.drafters
            if (wanted or service.default_drafter) in (info.name, f"{info.name}@{info.version}")
        ]
        if not found:
            return "", verifier_pb2.NO_DRAFT_REASON_NOT_READY
        if self.no_draft:
            return "", self.no_draft
        if cache.position + 1 >= cache.request.max_new_tokens:
            return "", verifier_pb2.NO_DRAFT_REASON_LAST_TOKEN
        if not self.node_budget and not start.always_draft:
            return "", verifier_pb2.NO_DRAFT_REASON_NODE_BUDGET
        return found[0], 0

    def tree(self, cache: Cache, nodes: int) -> tree_pb2.TokenTree:
        """A chain of 4 correct tokens, each with a wrong sibling."""
        tokens, parents, last = [], [], -1
        for token in continuation(cache.tokens, 4, cache.request.sampling.seed):
            tokens += [255, token]
            parents += [last, last]
            last = len(tokens) - 1
        return tree_pb2.TokenTree(tokens=tokens[:nodes], parents=parents[:nodes])

    def verify(self, cache: Cache, tree: tree_pb2.TokenTree, response: Any) -> None:
        response.tree.CopyFrom(tree)
        response.checked_nodes = len(tree.tokens)
        node = -1
        while not cache.finish_reason:
            token = cache.step(response.result)
            children = [
                index
                for index, parent in enumerate(tree.parents)
                if parent == node and tree.tokens[index] == token
            ]
            if not children:
                break
            node = children[0]
            response.result.accepted_nodes.append(node)

    async def RenewLease(self, request: Any, context: Any) -> Any:
        self.called("RenewLease", context)
        self.renewals += 1
        self.notify()
        return verifier_pb2.RenewLeaseResponse(lease_ms=self.lease_ms)

    async def ReleaseCache(self, request: Any, context: Any) -> Any:
        self.called("ReleaseCache", context)
        await self.may_release.wait()
        if self.release_faults:
            await context.abort(self.release_faults.pop(), "scripted")
        released = self.caches.pop(request.handle, None) is not None
        self.notify()
        return verifier_pb2.ReleaseCacheResponse(released=released)


def joined(*names: str, method: str = "") -> verifier_pb2.JoinedService:
    """A service that has joined, with drafters of these names; the first is its default."""
    return verifier_pb2.JoinedService(
        drafters=[drafter_pb2.DrafterInfo(name=name, version="1", method=method) for name in names],
        default_drafter=names[0],
        carrier=verifier_pb2.CARRIER_SOCKET,
    )


def _message(round_: verifier_pb2.Round) -> verifier_pb2.GenerateResponse:
    return verifier_pb2.GenerateResponse(rounds=[round_])


class Service:
    """A servicer on a unix socket that can be stopped hard and started again."""

    def __init__(self, path: Path, register: Callable[[grpc.aio.Server], None]) -> None:
        self.address = f"unix:{path}"
        self.register = register
        self.server: grpc.aio.Server | None = None

    @property
    def running(self) -> bool:
        return self.server is not None

    async def start(self) -> None:
        self.server = grpc.aio.server()
        self.register(self.server)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None


def verifier_service(path: Path, verifier: FakeVerifier) -> Service:
    return Service(
        path,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server),
    )


@dataclass
class World:
    """A fake that runs, which a drafter service with the drafter `fake` has joined."""

    verifier: FakeVerifier
    service: Service

    @property
    def address(self) -> str:
        return self.service.address


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[World]:
    verifier = FakeVerifier()
    verifier.joined = [joined("fake")]
    service = verifier_service(folder / "v", verifier)
    await service.start()
    try:
        yield World(verifier, service)
    finally:
        await service.stop()
