"""The mapping from gRPC errors to exceptions of the client."""

import asyncio
from pathlib import Path

import grpc
import pytest
from fakes.verifier import Service, World, status

from paceline import client as package
from paceline.client import (
    Client,
    PacelineError,
    PreconditionError,
    RetryOptions,
    ServerError,
    UnavailableError,
    UnimplementedError,
)
from paceline.client._errors import from_rpc_error, rpc_errors


def rpc_error(
    code: grpc.StatusCode, reason: str = "", retry_after: float | None = None
) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    if not reason:
        return grpc.aio.AioRpcError(code, empty, empty, details="plain")
    rich = status(code, reason, "what was wrong", retry_after)
    trailing = grpc.aio.Metadata(*rich.trailing_metadata)
    return grpc.aio.AioRpcError(code, empty, trailing, details=rich.details)


def test_the_details_of_a_status_are_read() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL", 1.5))
    assert type(error) is package.CapacityError
    assert (error.reason, error.message, error.retry_after) == ("KV_FULL", "what was wrong", 1.5)
    assert error.metadata == {"k": "v"}


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED]
)
def test_a_reset_connection_is_not_a_fault_of_the_service(code: grpc.StatusCode) -> None:
    """Only an error with an ErrorInfo was sent by the service itself."""
    assert type(from_rpc_error(rpc_error(code))) is UnavailableError
    assert type(from_rpc_error(rpc_error(code, "STEP_FAILED"))) is ServerError


def test_invalid_trailers_do_not_hide_the_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, trailing, trailing, details="gone")
    assert type(from_rpc_error(error)) is package.NotFoundError


async def test_errors_name_the_service_its_address_and_what_to_do(
    world: World, short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Service(short_folder / "other", lambda _: None)
    await other.start()
    async with Client(other.address, cache_dir=None) as client:
        with pytest.raises(UnimplementedError, match=f"{other.address} is not a verifier.*swapped"):
            await client.generate("x")
    await other.stop()
    retry = RetryOptions(budget=0.01, first_delay=0.005)
    async with Client("127.0.0.1:9", cache_dir=None, retry=retry) as client:
        expected = "no verifier answers at 127.0.0.1:9: start one with `paceline serve MODEL`"
        with pytest.raises(UnavailableError, match=expected):
            await client.generate("x")
    (warning,) = [record.message for record in caplog.records if "trying again" in record.message]
    assert warning.endswith("trying again for up to 0.01 s")
    world.verifier.protocol_version = 7
    async with Client(world.address, cache_dir=None) as client:
        expected = (
            f"verifier at {world.address} speaks version 7 of the protocol, this client version 1"
        )
        with pytest.raises(PreconditionError, match=expected):
            await client.generate("x")


async def test_an_error_has_the_text_so_far(world: World, client: Client) -> None:
    generation = client.generate([1, 2], max_new_tokens=200)
    chunks = aiter(generation)
    chunk = await anext(chunks)
    generation.fail("stopped here")
    with pytest.raises(PacelineError) as raised:
        await generation
    assert raised.value.token_ids[: len(chunk.token_ids)] == list(chunk.token_ids)
    assert raised.value.text.startswith(chunk.text)


async def test_a_peers_cancellation_is_a_broken_stream_ours_is_not() -> None:
    with pytest.raises(UnavailableError), rpc_errors():
        raise asyncio.CancelledError

    waits = asyncio.Event()

    async def wait() -> None:
        with rpc_errors():
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
