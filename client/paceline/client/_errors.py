"""Every exception of the client, and the one place where gRPC's become ours.

PacelineError
├── InvalidRequestError    a bad parameter, prompt or tree (also a ValueError)
├── NotFoundError          an unknown cache handle or drafter
├── PreconditionError      a lapsed lease, or a drafter made for another target
│   └── TargetChangedError the verifier came back with another model
├── CapacityError          the verifier's KV is full; `retry_after` says when to come again
├── UnavailableError       a service cannot be reached, or is draining
├── DeadlineError          the deadline passed (also a TimeoutError)
├── AuthError              token or certificate refused
├── UnimplementedError     the service does not offer this call
├── ServerError            a fault inside a service
└── ClientClosedError      the client was closed
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


class PacelineError(Exception):
    """Base of all errors. Carries what the service said about the fault.

    Attributes:
        message: what was wrong, what was expected, what to do.
        reason: stable machine-readable reason of `google.rpc.ErrorInfo`; empty when the error did
            not come from a Paceline service.
        metadata: the service's further facts about the fault.
        retry_after: seconds after which the service asks to come again, or None.
    """

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
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after = retry_after


class InvalidRequestError(PacelineError, ValueError):
    """A parameter, a prompt or a tree that no service would take."""


class NotFoundError(PacelineError):
    """A cache handle or a drafter that the service does not know."""


class PreconditionError(PacelineError):
    """The state of a service forbids the call: a lapsed lease, a drafter for another target."""


class TargetChangedError(PreconditionError):
    """The verifier restarted with another model in mid-generation: the text cannot go on."""


class CapacityError(PacelineError):
    """The verifier has no room; `retry_after` tells when to come again, if ever."""


class UnavailableError(PacelineError):
    """A service cannot be reached, its connection broke, or it is draining."""


class DeadlineError(PacelineError, TimeoutError):
    """The deadline of the generation passed."""


class AuthError(PacelineError):
    """The token or certificate was refused."""


class UnimplementedError(PacelineError):
    """The service does not offer this call."""


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
# What gRPC reports when a connection is reset in mid-stream. A service's own INTERNAL error carries
# an ErrorInfo, these do not.
_BROKEN_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}


def from_rpc_error(error: grpc.aio.AioRpcError) -> PacelineError:
    """The client's exception for a failed call, with its ErrorInfo and RetryInfo read."""
    code, text = error.code(), error.details() or "no details"
    info, retry_after = _details(error)
    if info is None and code in _BROKEN_CODES:
        return UnavailableError(f"the connection broke ({code.name}): {text}")
    return _BY_CODE.get(code, ServerError)(
        text,
        reason=info.reason if info else "",
        metadata=dict(info.metadata) if info else {},
        retry_after=retry_after,
    )


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    info, retry_after = None, None
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # A proxy may write what it likes: the code still counts.
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    info = error_details_pb2.ErrorInfo()
                    detail.Unpack(info)
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    retry = error_details_pb2.RetryInfo()
                    detail.Unpack(retry)
                    retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    return info, retry_after


class _RpcErrors:
    """Context manager around a gRPC call: lets only this module's exceptions out.

    A status CANCELLED sent by the peer surfaces in grpc.aio as `asyncio.CancelledError`. Unless the
    running task really was cancelled, that is a broken connection.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if isinstance(error, grpc.aio.AioRpcError):
            raise from_rpc_error(error) from None
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise UnavailableError("the peer cancelled the call") from None
        if isinstance(error, (asyncio.InvalidStateError, grpc.aio.UsageError)):
            raise UnavailableError(f"the call is over: {error}") from None


rpc_errors = _RpcErrors()
