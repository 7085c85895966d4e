"""What surrounds every request: its id, CORS, errors, metrics and the access log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from .answers import DISCONNECTED, FAILED
from .body import UNKNOWN_FIELDS
from .errors import from_error, from_http
from .keys import Caller, Keyring

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from .metrics import GatewayMetrics

REQUEST_ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)
SPENT = web.RequestKey("spent", list)
"""Tokens of the prompts and of the texts so far."""

# Paths without a key: health checks, and what describes the gateway alone.
_OPEN_PATHS = ("/", "/health", "/version", "/openapi.json")
_EXPOSED = "x-request-id, x-paceline-warning, retry-after"

_access = logging.getLogger("paceline.gateway.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(keyring: Keyring) -> Middleware:
    """Checks the API key, and returns every error in OpenAI's form."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not _open(request.path) and request.method != "OPTIONS":
                authorization = request.headers.get("Authorization", "")
                request[CALLER] = keyring.find(authorization)
            return await handler(request)
        except web.HTTPException as error:
            failure = from_http(error)
        except Exception as error:
            failure = from_error(error)
        return web.json_response(failure.body, status=failure.status, headers=failure.headers)

    return guarded


def observe(metrics: GatewayMetrics | None, *, access_log: bool) -> Middleware:
    """Gives a request its id, counts it, and writes its line of the access log."""

    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request.headers.get("x-request-id", ""))
        began = time.perf_counter()
        status = DISCONNECTED
        try:
            response = await handler(request)
            status = request.get(FAILED, response.status)
            return response
        finally:
            seconds = time.perf_counter() - began
            route = request.match_info.route.resource
            if metrics is not None and request.path.startswith("/v1/"):
                metrics.ended(route.canonical if route is not None else "", status, seconds)
            if access_log:
                _log(request, status, seconds)

    return observed


def _log(request: web.Request, status: int, seconds: float) -> None:
    prompt, completion = request.get(SPENT, (0, 0))
    caller = request.get(CALLER)
    _access.info(
        "%s %s %d",
        request.method,
        request.path,
        status,
        extra={
            "request_id": request[REQUEST_ID],
            "key": caller.name if caller is not None else "-",
            "remote": request.remote or "-",
            "seconds": round(seconds, 4),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        },
    )


def share(origins: Sequence[str]) -> Middleware:
    """Answers the preflight requests of pages from these origins; "*": of any page."""

    @web.middleware
    async def shared(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not _allowed(request, origins):
            return await handler(request)
        headers = request.headers.get("Access-Control-Request-Headers", "")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": headers,
                "Access-Control-Max-Age": "600",
            },
        )

    return shared


def add_headers(
    origins: Sequence[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal that adds the id, warnings and CORS headers to every response."""

    async def added(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-request-id"] = request.get(REQUEST_ID, "")
        unknown = request.get(UNKNOWN_FIELDS)
        if unknown:
            names = ", ".join(re.sub(r"[^\x21-\x7e]", "?", name)[:64] for name in unknown[:16])
            response.headers["x-paceline-warning"] = f"ignored unknown fields: {names}"
        if _allowed(request, origins):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        if origins:
            response.headers["Vary"] = "Origin"

    return added


def _allowed(request: web.Request, origins: Sequence[str]) -> bool:
    origin = request.headers.get("Origin")
    return origin is not None and ("*" in origins or origin in origins)


def _open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith("/page/")


def _request_id(given: str) -> str:
    """The id that the caller gave, if it is one; else a new one."""
    return given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else f"req_{secrets.token_hex(12)}"
