"""Rich statuses as the real services send them."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


def status(
    code: grpc.StatusCode, reason: str, message: str, retry_after: float | None = None
) -> Any:
    """A rich status as the real services send it."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="paceline", metadata={"k": "v"})]
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=message, details=packed)
    )
