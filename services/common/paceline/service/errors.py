"""The exception that servicers raise, and its form on the wire."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "paceline"
# Trailing metadata holds the text twice, and peers accept 8 KiB of it in total.
MAX_MESSAGE_CHARS = 1500
MAX_METADATA_CHARS = 200


class _Constructor:
    """Makes errors of one status code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def __call__(
        self, reason: str, message: str, retry_after: float | None = None, **metadata: str
    ) -> ServiceError:
        return ServiceError(self._code, reason, message, retry_after=retry_after, **metadata)


class ServiceError(Exception):
    """The failure of a call, as sent to its caller.

    The runtime turns it into a `google.rpc.Status` with an `ErrorInfo` (domain "paceline") and, if
    `retry_after` is set, a `RetryInfo`. Servicers raise it instead of calling `abort`.

    Args:
        code: gRPC status code, not OK.
        reason: stable UPPER_SNAKE_CASE name that programs may compare.
        message: what was wrong, what was expected, what to do. No secrets.
        retry_after: seconds after which the same call may succeed; None: not known.
        metadata: further facts for programs, sent as strings.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        retry_after: float | None = None,
        **metadata: str,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.retry_after, self.metadata = retry_after, metadata

    invalid_argument = _Constructor(grpc.StatusCode.INVALID_ARGUMENT)
    """The request is wrong in any state of the service."""
    not_found = _Constructor(grpc.StatusCode.NOT_FOUND)
    """What the request names does not exist, or belongs to another caller."""
    failed_precondition = _Constructor(grpc.StatusCode.FAILED_PRECONDITION)
    """The state does not allow it; repeating the same call does not help."""
    resource_exhausted = _Constructor(grpc.StatusCode.RESOURCE_EXHAUSTED)
    """A limit is reached; the call may succeed `retry_after` seconds later."""
    unavailable = _Constructor(grpc.StatusCode.UNAVAILABLE)
    """This process does not accept the call now; another one, or a retry, may."""
    aborted = _Constructor(grpc.StatusCode.ABORTED)
    """Another call took over."""
    unauthenticated = _Constructor(grpc.StatusCode.UNAUTHENTICATED)
    """The caller sent no valid credentials."""
    unimplemented = _Constructor(grpc.StatusCode.UNIMPLEMENTED)
    """The method is not implemented."""
    internal = _Constructor(grpc.StatusCode.INTERNAL)
    """An error of the service itself."""

    def to_status(self) -> status_pb2.Status:
        """The rich status to send. Long texts are truncated, lone surrogates replaced."""
        info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=self.reason)
        for key, value in self.metadata.items():
            info.metadata[key] = _clean(value, MAX_METADATA_CHARS)
        details = [_pack(info)]
        if self.retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(max(0.0, self.retry_after) * 1000))
            details.append(_pack(retry))
        return status_pb2.Status(
            code=self.code.value[0],
            message=_clean(self.message, MAX_MESSAGE_CHARS),
            details=details,
        )


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _clean(text: str, limit: int) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
