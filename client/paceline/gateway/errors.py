"""Every error in OpenAI's form, and the one place where the client's become HTTP's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from paceline.client import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    TargetChangedError,
    UnavailableError,
)

logger = logging.getLogger("paceline.gateway")


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: what was wrong, what was expected, what to do.
        kind: OpenAI's `type`, such as "invalid_request_error".
        param: the parameter at fault, such as "messages"; None: none is.
        code: stable machine-readable reason; None: the status says it all.
        headers: HTTP headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A request that no service would take."""
    return ApiError(400, message, param=param, code=code)


def from_validation(error: ValidationError) -> ApiError:
    """The first place where a request is wrong, and everything that is wrong there."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    place = _place(found[0]["loc"])
    if found[0]["type"] == "extra_forbidden":
        return bad_request(f"unrecognized request argument: {place}", place)
    # A place where several types may stand has an error for each of them.
    wrong = dict.fromkeys(each["msg"] for each in found if _place(each["loc"]) == place)
    return bad_request(f"{place or 'the body'}: {', or: '.join(wrong)}", place or None)


def _place(words: tuple[int | str, ...]) -> str:
    """Where in the request; the types that were tried there are left out."""
    return ".".join(str(word) for word in words if word != "str" and "[" not in str(word))


def from_error(error: Exception) -> ApiError:
    """The answer to a failed generation; what is the gateway's own fault is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(error.message, None, _code(error))
    if isinstance(error, NotFoundError):
        return ApiError(404, error.message, code=_code(error))
    if isinstance(error, CapacityError):
        return ApiError(
            429,
            error.message,
            kind="rate_limit_error",
            code=_code(error) or "capacity",
            headers=_retry_after(error.retry_after),
        )
    if isinstance(error, UnavailableError | TargetChangedError):
        return ApiError(503, error.message, kind="server_error", code="service_unavailable")
    if isinstance(error, DeadlineError):
        return ApiError(504, error.message, kind="server_error", code="timeout")
    if isinstance(error, PacelineError):
        logger.error("a service failed: %s", error)
        return ApiError(500, error.message, kind="server_error", code=_code(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the gateway failed; its log says why", kind="server_error")


def from_http(error: web.HTTPException) -> ApiError:
    """What aiohttp itself refused: an unknown path, a wrong method, a body that is too long."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = "the request is longer than this gateway takes", "request_too_large"
    elif isinstance(error, web.HTTPNotFound):
        message, code = "there is nothing at this path", "unknown_url"
    else:
        message, code = error.reason, None
    allow = {name: value for name, value in error.headers.items() if name.lower() == "allow"}
    return ApiError(error.status, message, code=code, headers=allow)


def _code(error: PacelineError) -> str | None:
    return error.reason.lower() or None


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds or 1)))}
