"""What surrounds every request: key, id, CORS, errors, metrics and access log."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from aiohttp import web

from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import http_span, server_attributes

from .errors import ApiError, from_error, from_http
from .requests import UNKNOWN_FIELDS
from .writers import DISCONNECTED, FAILED

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Span

    from .metrics import GatewayMetrics


REQUEST_ID = web.RequestKey("request_id", str)
SPENT = web.RequestKey("spent", list)
"""Tokens of the prompts and of the texts so far."""

# Paths without a key: health checks, and what describes the gateway alone.
_OPEN_PATHS = ("/", "/health", "/version")
_EXPOSED = "x-request-id, x-paceline-warning, retry-after"

_access = logging.getLogger("paceline.gateway.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(api_key: str | None) -> Middleware:
    """Checks the API key, if there is one, and returns every error in OpenAI's form."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if api_key is not None and not _open(request.path) and request.method != "OPTIONS":
                given = request.headers.get("Authorization", "").encode(errors="replace")
                if not hmac.compare_digest(given, expected):
                    raise ApiError(
                        401,
                        "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                        code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
            return await handler(request)
        except web.HTTPException as error:
            failure = from_http(error)
        except Exception as error:
            failure = from_error(error)
        return web.json_response(failure.body, status=failure.status, headers=failure.headers)

    return guarded


def observe(metrics: GatewayMetrics | None, *, access_log: bool) -> Middleware:
    """Gives a request its id and its span, counts it, and writes its line of the access log."""

    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request.headers.get("x-request-id", ""))
        began = time.perf_counter()
        status = DISCONNECTED
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        with _span(request, route) as span:
            try:
                response = await handler(request)
                status = request.get(FAILED, response.status)
                return response
            finally:
                seconds = time.perf_counter() - began
                if span is not None:
                    _end(span, status)
                if metrics is not None and request.path.startswith("/v1/"):
                    metrics.ended(route, status, seconds)
                if access_log and not _open(request.path):
                    _log(request, status, seconds)

    return observed


def _span(request: web.Request, route: str) -> AbstractContextManager[Span | None]:
    """The span of a request; none for pages and health checks."""
    if _open(request.path):
        return nullcontext()
    attributes = {
        Attribute.URL_PATH: request.path,
        Attribute.URL_SCHEME: request.scheme,
        **server_attributes(request.host),
    }
    return http_span(request.method, route, request.headers, attributes)


def _end(span: Span, status: int) -> None:
    """Sets the status of a request's span; errors are the server's and broken connections."""
    span.set_attribute(Attribute.HTTP_STATUS, status)
    if status >= DISCONNECTED:
        from opentelemetry.trace import StatusCode

        span.set_attribute(Attribute.ERROR_TYPE, str(status))
        span.set_status(StatusCode.ERROR)


def _log(request: web.Request, status: int, seconds: float) -> None:
    prompt, completion = request.get(SPENT, (0, 0))
    _access.info(
        "%s %s %d",
        request.method,
        request.path,
        status,
        extra={
            "request_id": request[REQUEST_ID],
            "remote": request.remote or "-",
            "seconds": round(seconds, 4),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        },
    )


def allow_origins(origins: Sequence[str]) -> Middleware:
    """Answers the preflight requests of pages from these origins; "*": of any page."""

    @web.middleware
    async def allowing(request: web.Request, handler: Handler) -> web.StreamResponse:
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

    return allowing


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
