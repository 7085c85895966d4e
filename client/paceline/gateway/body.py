"""What all request bodies share: null fields, unknown fields, and how a body is read."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from .errors import ApiError, bad_request, from_validation

UNKNOWN_FIELDS = web.RequestKey("unknown_fields", list)
"""Paths of fields of a request that were ignored, for the warning header."""

# Longest time for the arrival of a request's body. Unit: seconds.
_BODY_TIMEOUT = 30.0
# An escaped half of a character outside the basic plane.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Body(BaseModel):
    """An object of a request. A null field is an absent one; unknown fields are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def unknown(self, path: str = "") -> Iterator[str]:
        """Paths of fields that the schema does not have."""
        yield from (f"{path}{name}" for name in self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Body):
                    yield from each.unknown(f"{path}{name}.")


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_request(request: web.Request, kind: type[AnyBody], *, strict: bool) -> AnyBody:
    """Reads and validates a request. Unknown fields are noted in `request[UNKNOWN_FIELDS]`.

    The content type must be JSON, which pages of other sites cannot send without CORS.

    Args:
        request: The request.
        kind: Schema of its body.
        strict: Refuse unknown fields.

    Raises:
        ApiError: The body is not a request of this kind, or does not arrive in time.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "send the request as application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            content = await request.read()
    except TimeoutError:
        raise ApiError(408, "the request's body took too long", code="timeout") from None
    except web.RequestPayloadError as error:
        raise bad_request(
            f"the body is not in its content or transfer encoding: {error}", None
        ) from None
    try:
        body = kind.model_validate(_parsed(content))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise from_validation(error) from None
        raise bad_request(f"the body is not JSON: {error}", None) from None
    unknown = list(dict.fromkeys(body.unknown()))
    if unknown and strict:
        raise bad_request(f"unrecognized request argument: {unknown[0]}", unknown[0])
    request[UNKNOWN_FIELDS] = unknown
    return body


def _parsed(content: bytes) -> Any:
    """JSON without what Python reads beyond it, since answers repeat parts of requests.

    Raises:
        ValueError: It is not that.
    """
    value = json.loads(content, parse_constant=_no_number, parse_float=_finite)
    if _SURROGATE.search(content):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half a surrogate pair") from None
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value
