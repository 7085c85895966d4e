"""The mapping from gRPC errors to exceptions of the client."""

import asyncio

import grpc
import pytest

from paceline import client as package
from paceline.client import InvalidRequestError, PacelineError, ServerError, UnavailableError
from paceline.client._errors import _BY_CODE, from_rpc_error, rpc_errors

from .fakes import status


def rpc_error(
    code: grpc.StatusCode, reason: str = "", retry_after: float | None = None
) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    if not reason:
        return grpc.aio.AioRpcError(code, empty, empty, details="plain")
    rich = status(code, reason, "what was wrong", retry_after)
    trailing = grpc.aio.Metadata(*rich.trailing_metadata)
    return grpc.aio.AioRpcError(code, empty, trailing, details=rich.details)


@pytest.mark.parametrize("code", list(_BY_CODE))
def test_every_code_has_its_exception(code: grpc.StatusCode) -> None:
    error = from_rpc_error(rpc_error(code, "WHY"))
    assert type(error) is _BY_CODE[code]
    assert (error.reason, error.message) == ("WHY", "what was wrong")
    assert error.metadata == {"k": "v"}
    assert error.retry_after is None
    assert "what was wrong" in str(error)


def test_retry_info_is_read() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL", 1.5))
    assert error.retry_after == 1.5


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


def test_nothing_else_is_touched() -> None:
    with pytest.raises(ZeroDivisionError), rpc_errors():
        raise ZeroDivisionError
    with pytest.raises(UnavailableError), rpc_errors():
        raise asyncio.InvalidStateError("finished")


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


def test_the_tree_of_exceptions() -> None:
    errors = [getattr(package, name) for name in package.__all__ if name.endswith("Error")]
    assert len(errors) == 12
    assert all(issubclass(error, PacelineError) for error in errors)
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(package.DeadlineError, TimeoutError)
    assert issubclass(package.TargetChangedError, package.PreconditionError)
    drawing = package._errors.__doc__ or ""
    assert all(error.__name__ in drawing for error in errors)
