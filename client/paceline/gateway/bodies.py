"""Reads the bodies of requests."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from .errors import ApiError, from_validation

# A request's body arrives within this time, or its connection is not worth keeping. Unit: seconds.
_BODY_TIMEOUT = 30.0

AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


async def read(request: web.Request, kind: type[AnyRequest]) -> AnyRequest:
    """The request's body.

    Only JSON by name: a page of another site cannot make a browser send that unasked.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "send the request as application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "the request's body took too long", code="timeout") from None
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
