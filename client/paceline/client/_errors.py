"""The exceptions of the client, and their mapping from gRPC errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# The status of a stream whose connection is reset. Unlike these, errors of a service include an
# ErrorInfo.
_BROKEN_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}


class PacelineError(Exception):
    """Base of all errors of the client."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        """What was wrong, what was expected, what to do."""
        self.reason = reason
        """Reason of the service's `google.rpc.ErrorInfo`; empty if the error is not from a Paceline
        service."""
        self.metadata = metadata or {}
        """Metadata of the `ErrorInfo`."""
        self.retry_after = retry_after
        """When to retry, or None. Unit: seconds."""
        self.text = ""
        """Text that the generation had until it failed."""
        self.token_ids: list[int] = []
        """Its tokens."""


class InvalidRequestError(PacelineError, ValueError):
    """An invalid parameter, prompt or tree."""


class NotFoundError(PacelineError):
    """An unknown cache handle or drafter."""


class PreconditionError(PacelineError):
    """The state of a service forbids the call: an expired lease, a drafter for another target."""


class TargetChangedError(PreconditionError):
    """The verifier restarted with another model, which cannot continue the text."""


class CapacityError(PacelineError):
    """The verifier's KV cache is full. Without `retry_after` the request is too long for it."""


class UnavailableError(PacelineError):
    """A service cannot be reached, its connection broke, or it is draining."""


class DeadlineError(PacelineError, TimeoutError):
    """The deadline of the generation passed."""


class AuthError(PacelineError):
    """The token or certificate was refused."""


class UnimplementedError(PacelineError):
    """The service does not implement the call."""


class ServerError(PacelineError):
    """A fault inside a service."""


class ClientClosedError(PacelineError):
    """The client was closed before or during the call."""


_BY_CODE: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: AuthError,
    grpc.StatusCode.PERMISSION_DENIED: AuthError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


def from_rpc_error(
    error: grpc.aio.AioRpcError, kind: str = "service", address: str = ""
) -> PacelineError:
    """Return the exception of a failed call, with the content of its ErrorInfo and RetryInfo.

    `kind` is what was called: "verifier" or "drafter".
    """
    code, text = error.code(), error.details() or "no details"
    info, retry_after = _details(error)
    where = f"{kind} at {address}"
    if info is None and code in _BROKEN_CODES:
        return UnavailableError(f"the connection to the {where} broke ({code.name}): {text}")
    if info is None and code is grpc.StatusCode.UNAVAILABLE:
        cause = text.rpartition("last error: ")[2]
        start = "`paceline serve MODEL`"
        if kind == "drafter":  # which the command starts only where it has something to do
            start = "`paceline serve MODEL --drafter ngram`, or another drafter"
        return UnavailableError(
            f"no {kind} answers at {address}: start one with {start}, or give the address of "
            f"another ({cause})"
        )
    if info is None and code is grpc.StatusCode.UNIMPLEMENTED:
        return UnimplementedError(
            f"the service at {address} is not a {kind}: are the addresses of verifier and drafter "
            "swapped?"
        )
    return _BY_CODE.get(code, ServerError)(
        text,
        reason=info.reason if info else "",
        metadata=dict(info.metadata) if info else {},
        retry_after=retry_after,
    )


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Return ErrorInfo and retry delay in seconds, each None if the error has none."""
    info, retry_after = None, None
    status: Any = None
    with suppress(DecodeError, ValueError):  # A proxy may send other content.
        status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo.FromString(detail.value)
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    return info, retry_after


@contextmanager
def rpc_errors(kind: str = "service", address: str = "") -> Iterator[None]:
    """Let a gRPC call raise exceptions of this module only, as a context manager.

    Takes what is called and its address, for the messages. grpc.aio raises
    `asyncio.CancelledError` for a status CANCELLED of the peer. Unless the running task was
    cancelled, that is a broken connection.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, kind, address) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError(f"the {kind} at {address} cancelled the call") from None
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        raise UnavailableError(f"the call has ended: {error}") from None
