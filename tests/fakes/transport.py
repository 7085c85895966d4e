"""A transport without services, for tests of programs that use the client."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.client import NotFoundError
from paceline.client._options import invalid_requests
from paceline.client._text import BYTE_OF
from paceline.client._transport import GenerateStream
from paceline.sampling import token_ids
from paceline.v1 import sampling_pb2, verifier_pb2

# Maximum number of steps in one response.
_STEPS = 64

Reply = str | Sequence[int] | Callable[[str], str]


class MockTransport:
    """Replaces a verifier; without a drafter, so generations run plain steps.

        client = Client(transport=MockTransport("Hello there."))
        assert (await client.generate("Hi")).text == "Hello there."

    Args:
        reply: Continuation of every prompt: text, token ids, or a function from the prompt's text
            to that of the continuation.

    A token is a byte (0 to 255); `END` ends each continuation. `requests` lists the requests, and
    `open_caches` counts the caches that were not released.
    """

    END = 256

    def __init__(self, reply: Reply, context: int = 1 << 20) -> None:
        if not (callable(reply) or isinstance(reply, str)):
            with invalid_requests():
                reply = token_ids("reply", reply, "text, token ids or a function")
        self.reply: Reply = reply
        self.context = context
        self.tokenizer = _byte_tokenizer()
        self.json = self.tokenizer.to_str().encode()
        self.caches: dict[bytes, MockCache] = {}
        self.made = 0
        self.requests: list[verifier_pb2.CreateCacheRequest] = []

    address = ""

    def __repr__(self) -> str:
        return f"<MockTransport, {len(self.requests)} requests, {self.open_caches} open caches>"

    @property
    def open_caches(self) -> int:
        """Number of caches that were created and not released."""
        return len(self.caches)

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse:
        digest = hashlib.sha256(self.json).hexdigest()
        known = request.omit_tokenizer or request.known_tokenizer_digest == digest
        return verifier_pb2.GetModelResponse(
            name="mock",
            protocol_version=verifier_pb2.PROTOCOL_VERSION_1,
            vocab_size=self.END + 1,
            max_context=self.context,
            eos_token_ids=[self.END],
            target_fingerprint="mock",
            tokenizer_digest=digest,
            tokenizer_gzip=b"" if known else gzip.compress(self.json),
            max_tree_nodes=64,
            instance_id="mock",
            batch_invariant=True,
            lease_ms=30_000,
        )

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        self.requests.append(request)
        self.made += 1
        handle = self.made.to_bytes(16, "big")
        cache = self.caches[handle] = MockCache(
            self.continuation(request),
            request,
            len(request.output_tokens),
            self.context - len(request.prompt_tokens),
        )
        total = len(request.prompt_tokens) + len(request.output_tokens)
        yield verifier_pb2.CreateCacheResponse(
            progress=verifier_pb2.PrefillProgress(prefilled_tokens=total, total_tokens=total)
        )
        created = verifier_pb2.CacheCreated(handle=handle, read_grant=handle, first=cache.emit(1))
        created.lease_ms = 30_000
        if request.HasField("prompt_logprobs"):
            created.prompt_logprobs.extend([0.0] * (len(request.prompt_tokens) - 1))
        yield verifier_pb2.CreateCacheResponse(created=created)

    def generate(self) -> GenerateStream:
        return MockStream(self.caches)

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        pass

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        self.caches.pop(request.handle, None)

    async def close(self) -> None:
        self.caches.clear()

    def continuation(self, request: verifier_pb2.CreateCacheRequest) -> list[int]:
        reply = self.reply
        if callable(reply):
            reply = reply(self.tokenizer.decode(list(request.prompt_tokens)))
        tokens = self.tokenizer.encode(reply).ids if isinstance(reply, str) else list(reply)
        return [*tokens, self.END][len(request.output_tokens) :]


@dataclass
class MockCache:
    """Tokens still to be emitted for one prompt."""

    left: list[int]
    request: verifier_pb2.CreateCacheRequest
    emitted: int
    room: int

    def emit(self, steps: int) -> verifier_pb2.RoundResult:
        """The next tokens, at most `steps`, with log-probability 0."""
        result = verifier_pb2.RoundResult()
        stops = {MockTransport.END, *self.request.stop_token_ids}
        limit = min(self.request.max_new_tokens or self.room, self.room)
        while len(result.tokens) < steps and not result.finish_reason:
            token = self.left.pop(0) if self.left else MockTransport.END
            result.tokens.append(token)
            self.emitted += 1
            if token in stops:
                result.finish_reason = sampling_pb2.FINISH_REASON_STOP
            elif self.emitted >= limit:
                result.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        if self.request.logprobs or self.request.top_logprobs:
            result.logprobs.extend([0.0] * len(result.tokens))
        return result


class MockStream:
    """Emits the scripted tokens of one cache, as far as there are credits."""

    def __init__(self, caches: dict[bytes, MockCache]) -> None:
        self.caches = caches
        self.handle = b""
        self.credits = 0
        self.granted = asyncio.Event()

    async def write(self, request: verifier_pb2.GenerateRequest) -> None:
        if request.HasField("start"):
            self.handle = request.start.handle
        self.credits += request.credits
        self.granted.set()

    async def read(self) -> verifier_pb2.GenerateResponse:
        while not self.credits:
            self.granted.clear()
            await self.granted.wait()
        if self.handle not in self.caches:
            raise NotFoundError("the mock has no such cache")
        cache = self.caches[self.handle]
        position = cache.emitted
        result = cache.emit(min(self.credits, _STEPS))
        self.credits -= len(result.tokens)
        round_ = verifier_pb2.Round(
            position=position,
            result=result,
            steps=len(result.tokens),
            no_draft=verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER,
        )
        return verifier_pb2.GenerateResponse(rounds=[round_])

    def cancel(self) -> None:
        pass


def _byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token i is byte i, with one special token after them."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
