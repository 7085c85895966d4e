"""Tiny models, a verifier served in the test's own loop, and a client that sends any tree."""

import asyncio
import contextlib
import random
import string
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import grpc
import pytest
import tiny_models
import torch
from calls import refusal, started
from fakes.exchange import Drafter, DrafterService
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.decoder import Decoder
from paceline.service import ServerOptions, run_server
from paceline.v1 import drafter_pb2, verifier_pb2, verifier_pb2_grpc
from paceline.verifier import VerifierService, build_service
from paceline.verifier import service as service_module
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.segment import SegmentMemory

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
VOCAB = 61
PROMPT = [3, 1, 4, 1, 5]
LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32)
MEMORY = SegmentMemory(LAYOUT, 1 << 30)
CONTEXT = 2048
CARRIERS = pytest.mark.parametrize("socket", [True, False], ids=["socket", "stream"])


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def make_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random model with spread-out logits, so that its argmax does not depend on rounding."""
    shape = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "head_dim": 16,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
        "tie_word_embeddings": family == "Qwen3", "eos_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    return tiny_models.make_model(folder, family, **shape | changes)


Serve = Callable[..., contextlib.AbstractAsyncContextManager["Client"]]
"""Starts a verifier of the Llama, or of the model that is named first, with options."""


def tokenizer() -> Tokenizer:
    """The end, then one token a character: what JSON needs, and more."""
    characters = dict.fromkeys('{}[]":, ' + string.digits + string.ascii_lowercase + "ABCDEFGH-+.")
    vocabulary = {"<end>": 0, **{c: i for i, c in enumerate(characters, 1)}}
    space = vocabulary.pop(" ")
    built = Tokenizer(models.BPE(vocab={**vocabulary, "\u0120": space}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<end>"])
    assert built.get_vocab_size() <= VOCAB
    return built


TOKENIZER = tokenizer()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Client:
    service: VerifierService
    stub: Any
    channel: Any
    address: str
    drafter_service: DrafterService

    @property
    def socket_path(self) -> str:
        return self.service.exchange.path

    async def create(self, prompt: list[int], **fields: Any) -> verifier_pb2.CacheCreated:
        """Create a cache and read its stream to the end."""
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=prompt, **fields)
        *progress, last = [message async for message in self.stub.CreateCache(request)]
        assert not any(each.HasField("created") for each in progress), "created comes last"
        return last.created

    async def run(
        self, prompt: list[int], drafter: str | None = "none", **fields: Any
    ) -> tuple[list[int], list[Any], verifier_pb2.CacheCreated]:
        """Tokens and rounds of a whole generation, and what was said of its cache."""
        names = ("isolated", "max_nodes", "always_draft")
        begin = {name: fields.pop(name) for name in names if name in fields}
        created = await self.create(prompt, drafter=drafter, **fields)
        rounds = await self.responses(created.handle, drafter=drafter, **begin)
        await self.release(created.handle)
        return [*created.first.tokens, *tokens_of(rounds)], rounds, created

    async def generate(
        self, prompt: list[int], drafter: Drafter | None, *, seed: int = 0, **fields: Any
    ) -> list[int]:
        """Emitted tokens of a whole generation, drafted for by ``drafter`` in every step."""
        name = "none" if drafter is None else await self.drafter_service.add(drafter, seed)
        created = await self.create(prompt, drafter=name, **fields)
        tokens = list(created.first.tokens)
        if not created.first.finish_reason:
            async for answer in self.stream(created.handle, drafter=name):
                result = answer.result
                assert answer.position == len(tokens)
                check_accepted(answer)
                tokens += result.tokens
                assert result.committed_length == len(prompt) + len(tokens) - 1
        if drafter is not None:
            self.drafter_service.remove(name)
        await self.release(created.handle)
        return tokens

    async def begin(
        self, handle: bytes, *, position: int = 1, drafter: str | None = "none", credits: int = 0,
        **fields: Any,
    ) -> Any:  # fmt: skip
        """A Generate call whose first message was sent; it waits for each tree a minute."""
        fields = {"always_draft": True, "draft_timeout_ms": 60_000, **fields}
        call = self.stub.Generate()
        start = verifier_pb2.GenerateStart(
            handle=handle, position=position, drafter=drafter, **fields
        )
        await call.write(verifier_pb2.GenerateRequest(start=start, credits=credits))
        return RoundCall(call)

    async def stream(
        self, handle: bytes, *, position: int = 1, drafter: str | None = "none",
        credits: int = 1 << 30, **fields: Any,
    ) -> AsyncGenerator[Any]:  # fmt: skip
        call = await self.begin(
            handle, position=position, drafter=drafter, credits=credits, **fields
        )
        try:
            async for round_ in call:
                yield round_
            assert await call.code() == grpc.StatusCode.OK
        finally:
            call.cancel()

    async def responses(self, handle: bytes, position: int = 1, **fields: Any) -> list[Any]:
        return [each async for each in self.stream(handle, position=position, **fields)]

    async def rest(self, handle: bytes, position: int = 1, **fields: Any) -> list[int]:
        return tokens_of(await self.responses(handle, position, **fields))

    async def steps(self, handle: bytes, count: int, position: int = 1, **fields: Any) -> list[Any]:
        """Rounds of so many steps, or to the end; then the stream is ended."""
        responses = []
        stream = self.stream(handle, position=position, credits=count, **fields)
        async with contextlib.aclosing(stream):
            while count > 0 and (response := await anext(stream, None)) is not None:
                responses.append(response)
                count -= response.steps
        return responses

    async def refusal(
        self, handle: bytes, position: int = 1, **fields: Any
    ) -> tuple[grpc.StatusCode, str]:
        """Status and reason of a Generate stream that fails."""
        return await refusal(self.rest(handle, position, **fields))

    async def reader(self, *layers: int, window: int = 0) -> str:
        """Announce a drafter that reads hidden states; returns its name."""
        name = f"reads {layers} {window}"
        info = drafter_pb2.DrafterInfo(
            name=name, version="1", traffic_share=1.0, hidden_state_layers=layers,
            hidden_state_window=window,
        )  # fmt: skip
        service = self.drafter_service
        await service.joining()
        await service.update([info, *(each for each in service.infos if each.name != name)])
        return name

    def new_drafter_service(self, *, socket: bool = True, name: str = "test") -> DrafterService:
        """Another drafter service, which has not joined yet."""
        return DrafterService(self.service, self.channel, socket=socket, name=name)

    async def release(self, handle: bytes) -> bool:
        answer = await self.stub.ReleaseCache(verifier_pb2.ReleaseCacheRequest(handle=handle))
        return bool(answer.released)


def check_accepted(answer: verifier_pb2.Round) -> None:
    """Check that accepted nodes are a path from the anchor and hold the emitted tokens."""
    result, tree = answer.result, answer.tree
    tokens, accepted = list(result.tokens), list(result.accepted_nodes)
    if not tree.tokens:
        assert not accepted
        return
    assert [tree.parents[node] for node in accepted] == [-1, *accepted][: len(accepted)]
    assert [tree.tokens[node] for node in accepted] == tokens[: len(accepted)]
    extra = len(tokens) - len(accepted)
    assert extra == 1 or (extra == 0 and result.finish_reason)


def tokens_of(responses: Iterable[Any]) -> list[int]:
    return [token for each in responses for token in each.result.tokens]


def fallbacks_of(responses: Iterable[Any]) -> list[str]:
    return [reason for each in responses for reason in each.fallbacks]


class RoundCall:
    """A Generate call that reads round by round, whatever travels in one message."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.rounds: deque[Any] = deque()
        self.read_rounds: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    async def read(self) -> Any:
        """The next round; grpc.aio.EOF at the end."""
        while not self.rounds:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                return message
            self.rounds.extend(message.rounds)
        self.read_rounds.append(self.rounds.popleft())
        return self.read_rounds[-1]

    async def step(self) -> Any:
        """The round of one more step."""
        await self.write(verifier_pb2.GenerateRequest(credits=1))
        return await self.read()

    async def __aiter__(self) -> AsyncGenerator[Any]:
        while (round_ := await self.read()) is not grpc.aio.EOF:
            yield round_


@contextlib.asynccontextmanager
async def serving(target: Path, socket: Path, **options: Any) -> AsyncIterator[Client]:
    """A verifier on a unix socket in this loop; checked for leaks at the end.

    Unless the options say otherwise, it verifies every node, guesses nothing itself, and no prompt
    reuses the KV of an ended text. It does not collect the garbage of the test process at its
    start, which takes longer than all the rest.
    """
    defaults = {"kv_bytes": 1 << 28, "schedule": "off", "prefix_caching": False, "sources": ()}
    service = build_service(target, **{**defaults, **options})
    place = ServerOptions(address=f"unix:{socket}", drain_seconds=0.01)
    long = [("grpc.max_send_message_length", -1)]
    async with contextlib.AsyncExitStack() as server:
        with patch.object(service_module, "gc", Mock()):
            address, *_ = await server.enter_async_context(started(run_server, service, place))
        async with grpc.aio.insecure_channel(address, options=long) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            async with DrafterService(service, channel) as drafters:
                yield Client(service, stub, channel, address, drafters)
    service.store.check_integrity()
    assert len(service.store) == 0


@contextlib.contextmanager
def paused_engine(after: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """Pause the engine after some more steps, until the end of the body.

    Yields a function that waits until the engine is paused.
    """
    forward, left = Decoder.forward, iter(range(after))
    is_paused, resume = threading.Event(), threading.Event()

    def step(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            is_paused.set()
            assert resume.wait(60), "the engine was not resumed"
        return forward(*args, **kwargs)

    async def paused() -> None:
        assert await asyncio.to_thread(is_paused.wait, 60), "the engine did not reach the step"

    with patch.object(Decoder, "forward", step):
        try:
            yield paused
        finally:
            resume.set()
