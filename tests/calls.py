"""Servers in the test's loop, how calls to them end, and conditions that they make true."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@asynccontextmanager
async def started(
    serve: Callable[..., Any], *given: Any, **options: Any
) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[None]]]:
    """Run `run_server` or `run_gateway` until the body ends: its address, the event that stops it
    before, and its task."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    options |= {"on_ready": ready.set_result, "stop_event": stop}
    server = asyncio.create_task(serve(*given, **options))
    await asyncio.wait([server, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        if not server.done():
            yield ready.result(), stop, server
    finally:
        stop.set()
        await server


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def eventually(true: Callable[[], bool], what: str, seconds: float = 180) -> None:
    """Poll a condition that other processes make true, and that has no event. Blocking."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        time.sleep(0.02)


async def remaining(call: Any) -> list[Any]:
    """Responses of a call up to its end."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a unary call or a stream ends with."""
    try:
        if hasattr(call, "read"):
            await remaining(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded, expected an error")


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and reason of the error that a call ends with."""
    error = await failure(call)
    return error.code(), reason_of(error)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a failed call."""
    return str(details_of(error, error_details_pb2.ErrorInfo).reason)


def details_of(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None, error
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    raise AssertionError(f"no {kind.__name__} in {status}")
