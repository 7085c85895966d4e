"""Tiny models, a verifier served in the test's own loop, and a client that sends any tree."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import grpc
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.service import ServerOptions, run_server
from paceline.tree import EMPTY, TokenTree
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier import VerifierService, build_service
from paceline.verifier import service as service_module
from paceline.verifier.kv.layout import KvLayout

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
VOCAB = 61
LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32)
CONTEXT = 2048
Drafter = Callable[[list[int], random.Random], TokenTree | int]
"""Gives a tree for a text, or a number of free-run steps."""


def text(seed: int, length: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def make_model(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, **changes: Any
) -> Path:
    """A random model with spread-out logits, so that its argmax does not depend on rounding."""
    import transformers

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "tie_word_embeddings": family == "Qwen3",
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": None,
        **changes,
    }
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@dataclass
class Client:
    """A thin client of one verifier."""

    service: VerifierService
    stub: Any
    channel: Any
    address: str

    async def create(self, prompt: list[int], **fields: Any) -> verifier_pb2.CacheCreated:
        """Create a cache and read its stream to the end."""
        created, _ = await self.create_watched(prompt, **fields)
        return created

    async def create_watched(self, prompt: list[int], **fields: Any) -> tuple[Any, list[Any]]:
        """The same, with the progress messages."""
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=prompt, **fields)
        progress, created = [], None
        async for message in self.stub.CreateCache(request):
            assert created is None, "created comes last"
            if message.WhichOneof("event") == "progress":
                progress.append(message.progress)
            else:
                created = message.created
        assert created is not None
        return created, progress

    async def generate(
        self,
        prompt: list[int],
        drafter: Drafter,
        *,
        seed: int = 0,
        release: bool = True,
        **fields: Any,
    ) -> list[int]:
        """Emitted tokens of a whole generation, drafted for by ``drafter``."""
        rng = random.Random(seed)
        created = await self.create(prompt, **fields)
        result = created.first
        tokens = list(result.tokens)
        stream = self.stub.Verify()
        number = 0
        while not result.finish_reason:
            number += 1
            draft = drafter([*prompt, *tokens], rng)
            await stream.write(Round.drafted(created.handle, number, draft))
            while True:
                answer = await stream.read()
                assert answer is not grpc.aio.EOF, await stream.details()
                result = answer.result
                check_accepted(draft, result)
                tokens += result.tokens
                assert answer.round_id == number
                assert result.committed_length == len(prompt) + len(tokens) - 1
                if answer.last:
                    break
        await stream.done_writing()
        if release:
            await self.release(created.handle)
        return tokens

    async def verify(self, request: Any) -> list[Any]:
        """All responses to one round, on a stream of its own."""
        stream = self.stub.Verify()
        await stream.write(request)
        await stream.done_writing()
        return [response async for response in stream]

    async def free_run(self, handle: bytes, number: int = 1, steps: int = CONTEXT) -> list[int]:
        """Tokens of a free run."""
        responses = await self.verify(Round.of(handle, number, free_run_steps=steps))
        return [token for response in responses for token in response.result.tokens]

    async def refusal(self, request: Any) -> tuple[grpc.StatusCode, str]:
        """Status and reason of a round that fails."""
        stream = self.stub.Verify()
        await stream.write(request)
        error = await failure(stream)
        return error.code(), reason_of(error)

    async def release(self, handle: bytes) -> bool:
        """Release a cache."""
        answer = await self.stub.ReleaseCache(verifier_pb2.ReleaseCacheRequest(handle=handle))
        return bool(answer.released)


def check_accepted(draft: TokenTree | int, result: Any) -> None:
    """Check that accepted nodes are a path from the anchor and hold the emitted tokens."""
    tokens, accepted = list(result.tokens), list(result.accepted_nodes)
    if isinstance(draft, int):
        assert not accepted
        return
    assert [draft.parents[node] for node in accepted] == [-1, *accepted][: len(accepted)]
    assert [draft.tokens[node] for node in accepted] == tokens[: len(accepted)]
    extra = len(tokens) - len(accepted)
    assert extra == 1 or (extra == 0 and result.finish_reason)


class Round:
    """Builds VerifyRequests."""

    @staticmethod
    def of(handle: bytes, number: int, tree: TokenTree = EMPTY, **fields: Any) -> Any:
        """A round with a tree."""
        return verifier_pb2.VerifyRequest(
            handle=handle, round_id=number, tree=tree.to_proto(), **fields
        )

    @staticmethod
    def drafted(handle: bytes, number: int, draft: TokenTree | int) -> Any:
        """A round with what a drafter returned."""
        if isinstance(draft, int):
            return Round.of(handle, number, free_run_steps=draft)
        return Round.of(handle, number, draft)


@contextlib.asynccontextmanager
async def serving(target: Path, socket: Path, **options: Any) -> AsyncIterator[Client]:
    """A verifier on a unix socket in this loop; checked for leaks at the end.

    Unless the options say otherwise, it verifies every node and no prompt reuses the KV of an ended
    text. It does not collect the garbage of
    the test process at its start, which takes longer than all the rest.
    """
    with patch.object(service_module, "gc", Mock()):
        async with _served(target, socket, **options) as client:
            yield client


@contextlib.asynccontextmanager
async def _served(target: Path, socket: Path, **options: Any) -> AsyncIterator[Client]:
    service = build_service(target, **{"schedule": "off", "prefix_caching": False, **options})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        run_server(
            service,
            ServerOptions(address=f"unix:{socket}", drain_seconds=0.01),
            on_ready=ready.set_result,
            stop_event=stop,
        )
    )
    try:
        await asyncio.wait([server, ready], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        address = ready.result()
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            yield Client(service, verifier_pb2_grpc.VerifierServiceStub(channel), channel, address)
    finally:
        stop.set()
        await server
        service.store.check_integrity()
        assert len(service.store) == 0


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a failed call."""
    return str(details_of(error, error_details_pb2.ErrorInfo).reason)


def details_of(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The first detail of a kind."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    raise AssertionError(f"no {kind.__name__} in {status}")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a unary call or a stream ends with."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded, expected an error")


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def paused_engine(client: Client, after: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """Pause the engine after some more steps, until the end of the body.

    Yields a function that waits until the engine is paused.
    """
    decoder: Any = client.service.engine._decoder
    forward, left = decoder.forward, iter(range(after))
    is_paused, resume = threading.Event(), threading.Event()

    def step(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            is_paused.set()
            assert resume.wait(60), "the engine was not resumed"
        return forward(*args, **kwargs)

    async def paused() -> None:
        assert await asyncio.to_thread(is_paused.wait, 60), "the engine did not reach the step"

    decoder.forward = step
    try:
        yield paused
    finally:
        resume.set()
        decoder.forward = forward
