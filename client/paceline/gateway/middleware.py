"""What surrounds every request: key, id, CORS, errors, metrics and access log."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from aiohttp import web

from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import http_span, server_attributes

from . import messages_api
from .bodies import CHANGES, UNKNOWN_FIELDS
from .errors import ApiError, from_error, from_http
from .writers import DISCONNECTED, FAILED, error_after_comments

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Span

    from .metrics import GatewayMetrics
    from .options import GatewayOptions


REQUEST_ID = web.RequestKey("request_id", str)
SPENT = web.RequestKey("spent", list)  # tokens of the prompts and of the texts so far

API_PATHS = ("/v1/", "/infill")  # what the paths of requests for texts and models begin with
# Paths without a key: health checks, and what describes the gateway alone.
_OPEN_PATHS = ("/", "/health", "/version")
_LOCAL = frozenset(("localhost", "127.0.0.1", "[::1]"))
_HOST = re.compile(r"(?P<name>[^\[\]:/@\s]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
# Maximum number of names in a warning.
_NAMED = 32
_EXPOSED = "x-request-id, x-paceline-warning, retry-after"

_access = logging.getLogger("paceline.gateway.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def in_form_of_path(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give errors OpenAI's form, or Anthropic's."""
    # No variable keeps an error, and with its traceback the request's body.
    try:
        return await handler(request)
    except web.HTTPException as error:
        return await _answer(request, from_http(error))
    except Exception as error:
        return await _answer(request, from_error(error))


async def _answer(request: web.Request, error: ApiError) -> web.StreamResponse:
    is_message = request.path.startswith(messages_api.PATH)
    body = messages_api.error_body(error) if is_message else error.body
    if (streamed := await error_after_comments(request, error.status, body)) is not None:
        return streamed
    return web.json_response(body, status=error.status, headers=error.headers)


def guard(api_key: str | None) -> Middleware:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key is not None and not _open(request.path):
            key = request.headers.get("x-api-key")  # as Anthropic's clients send it
            given = request.headers.get("Authorization", f"Bearer {key}")
            if not hmac.compare_digest(given.encode(errors="replace"), expected):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return guarded


def observe(metrics: GatewayMetrics | None, *, access_log: bool) -> Middleware:
    """Give a request its id and its span, count it, and write its line of the access log."""

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
                if metrics is not None and request.path.startswith(API_PATHS):
                    metrics.ended(route, status, seconds)
                if access_log and not (_open(request.path) or request.path == "/metrics"):
                    _log(request, status, seconds)

    return observed


def _span(request: web.Request, route: str) -> AbstractContextManager[Span | None]:
    """Return the span of a request; none for pages and health checks."""
    if _open(request.path):
        return nullcontext()
    attributes = {
        Attribute.URL_PATH: request.rel_url.raw_path,
        Attribute.URL_SCHEME: request.scheme,
        **server_attributes(request.host),
    }
    return http_span(request.method, route, request.headers, attributes)


def _end(span: Span, status: int) -> None:
    """Set the status of a request's span; errors are the server's and broken connections."""
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
        request.rel_url.raw_path,  # as it was sent: decoded, it may hold control characters
        status,
        extra={
            "request_id": request[REQUEST_ID],
            "remote": request.remote or "-",
            "seconds": round(seconds, 4),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        },
    )


class Sites:
    """Which hosts' names requests may come under, and which pages may send them.

    A browser sends the name that a page's request is for in `Host`, and the page's own site in
    `Origin`; no page can change either.
    """

    def __init__(self, options: GatewayOptions) -> None:
        self._hosts = options.hosts
        self._origins = frozenset(options.cors_origins)
        # A page that a program of this machine serves is as trusted as the program.
        self._allows_local = options.api_key is None

    def check(self) -> Middleware:
        """Refuse requests of other sites, and answer the preflight requests of pages."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            for host in request.headers.getall("Host", ()):
                if self._hosts is not None and _name_of(host) not in self._hosts:
                    raise ApiError(
                        403,
                        f"requests for the host {host[:256]!r} are not answered: use localhost, or "
                        "start the gateway with --allowed-host, or with an API key",
                        code="host_not_allowed",
                    )
            origin = request.headers.get("Origin")
            if origin is None:
                return await handler(request)
            if not (self._allows(origin) or _is_own(origin, request)):
                raise ApiError(
                    403,
                    f"pages of the origin {origin[:256]!r} may not send requests: start the "
                    "gateway with --cors-origin to allow it",
                    code="origin_not_allowed",
                )
            asked = request.headers.get("Access-Control-Request-Method")
            if request.method != "OPTIONS" or asked is None:
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

        return checked

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the id, warnings and CORS headers to every response."""
        response.headers["x-request-id"] = request.get(REQUEST_ID, "")
        warnings = [changes] if (changes := request.get(CHANGES)) else []
        unknown = request.get(UNKNOWN_FIELDS)
        if unknown:
            names = ", ".join(re.sub(r"[^\x21-\x7e]", "?", name)[:64] for name in unknown[:_NAMED])
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            warnings.insert(0, f"ignored unknown fields: {names}{more}")
        if warnings:
            response.headers["x-paceline-warning"] = "; ".join(warnings)
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        response.headers["Vary"] = "Origin"

    def _allows(self, origin: str) -> bool:
        """Return whether pages of an origin may send requests and read the responses."""
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, separator, host = origin.partition("://")
        return (
            self._allows_local
            and bool(separator)
            and scheme in ("http", "https")
            and _name_of(host) in _LOCAL
        )


def _name_of(host: str) -> str:
    """Return the name in a `Host` header, in lower case and without the port; "" if it is none."""
    match = _HOST.fullmatch(host.strip())
    return match["name"].lower() if match else ""


def _is_own(origin: str, request: web.Request) -> bool:
    """Return whether an origin is the site of a request, as for this gateway's own page."""
    scheme, separator, host = origin.partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    site = request.headers.get("Host", "").lower()
    return bool(separator) and port is not None and host.lower() in (site, site.removesuffix(port))


def _open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith("/page/")


def _request_id(given: str) -> str:
    """Return the id that the caller gave, if it is one; else a new one."""
    return given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else f"req_{secrets.token_hex(12)}"
