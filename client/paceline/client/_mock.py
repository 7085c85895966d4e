"""A transport without services, for tests of programs that use the client."""

from __future__ import annotations

import gzip
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.v1 import sampling_pb2, verifier_pb2

from ._errors import NotFoundError, UnavailableError
from ._text import BYTE_OF
from ._transport import VerifyStream

Reply = str | Sequence[int] | Callable[[str], str]


class MockTransport:
    """Replaces a verifier; without a drafter, so generations run plain decoding steps.

        client = Client(transport=MockTransport("Hello there."))
        assert (await client.generate("Hi")).text == "Hello there."

    Args:
        reply: Continuation of every prompt: text, token ids, or a function from the prompt's text
            to that of the continuation.

    A token is a byte (0 to 255); `END` ends each continuation. `requests` lists the requests, and
    `open_caches` counts the caches that were not released.
    """

    END = 256

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._tokenizer = _byte_tokenizer()
        self._json = self._tokenizer.to_str().encode()
        self._caches: dict[bytes, _Cache] = {}
        self._made = 0
        self.requests: list[verifier_pb2.CreateCacheRequest] = []

    address = ""

    @property
    def open_caches(self) -> int:
        """Number of caches that were created and not released."""
        return len(self._caches)

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse:
        digest = hashlib.sha256(self._json).hexdigest()
        known = request.omit_tokenizer or request.known_tokenizer_digest == digest
        return verifier_pb2.GetModelResponse(
            name="mock",
            vocab_size=self.END + 1,
            max_context=1 << 20,
            eos_token_ids=[self.END],
            target_fingerprint="mock",
            tokenizer_digest=digest,
            tokenizer_gzip=b"" if known else gzip.compress(self._json),
            max_tree_nodes=64,
            instance_id="mock",
            batch_invariant=True,
            lease_ms=30_000,
        )

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        self.requests.append(request)
        self._made += 1
        handle = self._made.to_bytes(16, "big")
        cache = self._caches[handle] = _Cache(self._continuation(request), request)
        total = len(request.prompt_tokens) + len(request.output_tokens)
        yield verifier_pb2.CreateCacheResponse(
            progress=verifier_pb2.PrefillProgress(prefilled_tokens=total, total_tokens=total)
        )
        created = verifier_pb2.CacheCreated(handle=handle, read_grant=handle, first=cache.emit(1))
        created.lease_ms = 30_000
        if request.HasField("prompt_logprobs"):
            created.prompt_logprobs.extend([0.0] * (len(request.prompt_tokens) - 1))
        yield verifier_pb2.CreateCacheResponse(created=created)

    def verify(self) -> VerifyStream:
        return _MockVerifyStream(self._caches)

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        pass

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        self._caches.pop(request.handle, None)

    async def close(self) -> None:
        self._caches.clear()

    def _continuation(self, request: verifier_pb2.CreateCacheRequest) -> list[int]:
        reply = self._reply
        if callable(reply):
            reply = reply(self._tokenizer.decode(list(request.prompt_tokens)))
        tokens = self._tokenizer.encode(reply).ids if isinstance(reply, str) else list(reply)
        return [*tokens, self.END][len(request.output_tokens) :]


@dataclass
class _Cache:
    """Tokens still to be emitted for one prompt."""

    left: list[int]
    request: verifier_pb2.CreateCacheRequest
    emitted: int = 0

    def emit(self, steps: int) -> verifier_pb2.RoundResult:
        """The next tokens, at most `steps`, with log-probability 0."""
        result = verifier_pb2.RoundResult()
        stops = {MockTransport.END, *self.request.stop_token_ids}
        most = self.request.max_new_tokens or 1 << 62
        while len(result.tokens) < steps and not result.finish_reason:
            token = self.left.pop(0) if self.left else MockTransport.END
            result.tokens.append(token)
            self.emitted += 1
            if token in stops:
                result.finish_reason = sampling_pb2.FINISH_REASON_STOP
            elif self.emitted + len(self.request.output_tokens) >= most:
                result.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        if self.request.logprobs or self.request.top_logprobs:
            result.logprobs.extend([0.0] * len(result.tokens))
        return result


class _MockVerifyStream:
    """Responds to each round with the scripted tokens."""

    def __init__(self, caches: dict[bytes, _Cache]) -> None:
        self._caches = caches
        self._handle = b""
        self._responses: deque[verifier_pb2.VerifyResponse] = deque()

    async def write(self, request: verifier_pb2.VerifyRequest) -> None:
        self._handle = request.handle or self._handle
        if self._handle not in self._caches:
            return
        cache = self._caches[self._handle]
        self._responses.append(
            verifier_pb2.VerifyResponse(
                round_id=request.round_id,
                result=cache.emit(max(request.free_run_steps, 1)),
                last=True,
            )
        )

    async def read(self) -> verifier_pb2.VerifyResponse:
        if self._responses:
            return self._responses.popleft()
        if self._handle not in self._caches:
            raise NotFoundError("the mock has no such cache")
        raise UnavailableError("the mock got no round")

    def cancel(self) -> None:
        self._responses.clear()


def _byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token i is byte i, with one special token after them."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
