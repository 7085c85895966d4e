"""Errors in OpenAI's form, and the mapping from exceptions of the client."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.client import (
    CapacityError,
    ClientClosedError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    TargetChangedError,
    UnavailableError,
)

# What pydantic calls an object of JSON.
_PYTHON_OBJECT = re.compile(
    "valid dictionary(?: or (?:instance of [\\w\\[\\]]+|object to extract fields from))?"
)

logger = logging.getLogger("paceline.gateway")


_MAX_MESSAGE = 2000  # of an error, in characters


@dataclass(eq=False)
class ApiError(Exception):
    status: int  # HTTP status
    message: str  # what was wrong, what was expected, what to do
    kind: str = field(default="invalid_request_error", kw_only=True)  # OpenAI's `type`
    param: str | None = field(default=None, kw_only=True)
    """The invalid parameter, such as "messages", if it is one."""
    code: str | None = field(default=None, kw_only=True)
    """Machine-readable reason, if there is one besides the status."""
    headers: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """HTTP headers of the response."""

    @property
    def body(self) -> dict[str, Any]:
        # Both may repeat texts of the request.
        message, param = self.message[:_MAX_MESSAGE], self.param and self.param[:_MAX_MESSAGE]
        error = {"message": message, "type": self.kind, "param": param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_validation(error: ValidationError) -> ApiError:
    """Return all errors of the first invalid field of a request."""
    errors = _meant(error.errors(include_url=False, include_input=False, include_context=False))
    path = _path(errors[0]["loc"])
    # A field of several types has an error for each of them.
    messages = (detail["msg"] for detail in errors if _path(detail["loc"]) == path)
    wrong = dict.fromkeys(_PYTHON_OBJECT.sub("valid object", message) for message in messages)
    return bad_request(f"{path or 'the body'}: {', or: '.join(wrong)}", path or None)


def _meant(errors: Sequence[ErrorDetails], start: int = 0) -> Sequence[ErrorDetails]:
    """Return the errors but for types that the first invalid field was not meant to have.

    The type that a value was meant to have is the one that it comes nearest to: the type with the
    deepest error, among those the one with the fewest, and then with the latest.
    """
    first = errors[0]["loc"]
    places = (index for index in range(start, len(first)) if _is_type(first[index]))
    place = next(places, None)
    if place is None:
        return errors
    types: dict[int | str, list[ErrorDetails]] = {}
    for error in errors:
        if error["loc"][:place] == first[:place]:
            types.setdefault(error["loc"][place] if len(error["loc"]) > place else "", []).append(
                error
            )
    nearness = {
        kind: (max(len(error["loc"]) for error in group), -len(group), _indices(group[0]["loc"]))
        for kind, group in types.items()
    }
    meant = [
        error
        for kind, group in types.items()
        if nearness[kind] == max(nearness.values())
        for error in group
    ]
    return _meant(meant, place + 1)


def _indices(words: tuple[int | str, ...]) -> list[int]:
    return [word for word in words if isinstance(word, int)]


def _path(words: tuple[int | str, ...]) -> str:
    """Return the field's path, without the types that pydantic tried."""
    names = [str(word) for word in words if not _is_type(word)]
    if names[:1] == ["response_format"]:  # whose kind is a part of pydantic's path
        del names[1:2]
    return ".".join(names)


def _is_type(word: int | str) -> bool:
    """Return whether a part of a path is a type that pydantic tried: fields have no capitals."""
    if not isinstance(word, str):
        return False
    return word in ("str", "constrained-str") or "[" in word or word[:1].isupper()


def from_error(error: Exception) -> ApiError:
    """Return the response to a failed generation. Logs internal errors."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, PacelineError):
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "internal error: see the gateway's log", kind="server_error")
    message, reason = error.message, error.reason.lower() or None
    match error:
        case InvalidRequestError():
            return bad_request(message, error.metadata.get("param"), reason)
        case NotFoundError():
            return ApiError(404, message, param=error.metadata.get("param"), code=reason)
        case CapacityError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after or 1)))}
            code = reason or "capacity"
            return ApiError(429, message, kind="rate_limit_error", code=code, headers=headers)
        case UnavailableError() | TargetChangedError() | ClientClosedError():
            return ApiError(503, message, kind="server_error", code="service_unavailable")
        case DeadlineError():
            return ApiError(504, message, kind="server_error", code="timeout")
    logger.error("a service failed: %s", error)
    return ApiError(500, message, kind="server_error", code=reason)


def from_http(error: web.HTTPException) -> ApiError:
    """Return the response to an unknown path, a wrong method or a body that is too long."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = "the request is longer than --max-body", "request_too_large"
    elif isinstance(error, web.HTTPNotFound):
        message, code = "there is nothing at this path", "unknown_url"
    else:
        message, code = error.reason, None
    allow = {name: value for name, value in error.headers.items() if name.lower() == "allow"}
    return ApiError(error.status, message, code=code, headers=allow)
