"""Rich statuses as the real services send them."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_status import rpc_status

from paceline.service import ServiceError


def status(
    code: grpc.StatusCode, reason: str, message: str, retry_after: float | None = None
) -> Any:
    """The status of a `ServiceError` with the metadata `k`."""
    error = ServiceError(code, reason, message, retry_after=retry_after, k="v")
    return rpc_status.to_status(error.to_status())
