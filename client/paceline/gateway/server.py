"""The HTTP server of the gateway: its routes, and its life until a signal."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from paceline.client import Client, GenerationResult, PacelineError
from paceline.service.connections import ServerConnections
from paceline.service.interceptor import https_context
from paceline.service.metrics import MetricsEndpoint, new_registry, serve_metrics
from paceline.service.options import OptionsError, socket_path_of, split_address
from paceline.service.runtime import Stop, files_left
from paceline.service.tasks import keep_running

from . import messages_api, middleware
from .admission import Admission, Place
from .bodies import CHANGES, UNKNOWN_FIELDS, AnyBody, parse_request
from .errors import ApiError, bad_request
from .generation import GenerationJob, JobBuilder, TextEvent, generate_texts
from .infill import InfillRequest
from .infill_writer import InfillWriter
from .metrics import GatewayMetrics
from .models import Models
from .options import GatewayOptions
from .requests import ChatRequest, CompletionRequest
from .responses_api import ResponsesRequest, ResponsesWriter, errors_of_response
from .writers import (
    ChatWriter,
    CompletionWriter,
    EventStream,
    WholeResponse,
    Writer,
    kept_alive,
)

logger = logging.getLogger("paceline.gateway")

# A connection without a request, or with a part of its head only, is closed after this time. Longer
# than the 60 seconds after which load balancers usually close it. Unit: seconds.
IDLE_SECONDS = 75.0
_CANCEL_GRACE = 0.5  # time before requests that outlast the drain are cancelled, in seconds
_HEALTH_TIMEOUT = 5.0  # longest wait for the verifier in health checks, in seconds

_LOADED = {"value": "loaded"}  # the state of a model in `/v1/models`

_PAGE = Path(__file__).with_name("page")
_PAGE_FILES = frozenset(
    path.relative_to(_PAGE).as_posix() for path in _PAGE.rglob("*") if path.is_file()
)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    # Files of another version must not be mixed with this one's.
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


class Gateway:
    """Serves OpenAI's and Anthropic's API under `/v1`, and a page on `/`."""

    def __init__(
        self, models: Models, options: GatewayOptions, metrics: GatewayMetrics | None = None
    ) -> None:
        self._models = models
        self._options = options
        self._started = int(time.time())
        self._metrics = metrics
        self._jobs = JobBuilder(models, options)
        self.admission = Admission(options.max_requests, options.max_body_bytes)
        """Requests in flight. When it is closed, new ones are refused and health is 503."""
        self.connections = ServerConnections()  # the server's connections
        sites = middleware.Sites(options)
        self.app = web.Application(
            middlewares=[
                middleware.observe(metrics, access_log=options.access_log),
                middleware.in_form_of_path,
                sites.check(),
                self._refuse_while_draining,
                self._count,
                middleware.guard(options.api_key),
            ],
            client_max_size=options.max_body_bytes,
        )
        """The aiohttp application. Serve it with `handler_cancellation`, so that a disconnect stops
        the generation."""
        self.app.on_cleanup.append(lambda _: self._jobs.close())
        self.app.on_response_prepare.append(sites.add_headers)
        get, post = (partial(route, expect_handler=_expect) for route in (web.get, web.post))
        self.app.add_routes(
            [
                post("/v1/completions", self._completions),
                post("/v1/chat/completions", self._chat),
                post("/infill", self._infill),
                post("/v1/responses", self._responses),
                post(messages_api.PATH, self._messages),
                post(f"{messages_api.PATH}/count_tokens", self._count_tokens),
                get("/v1/models", self._list),
                get("/v1/models/{name:.+}", self._show),
                get("/health", self._health),
                get("/version", _version),
                get("/metrics", self._show_metrics),
                get("/", _page),
                get("/page/{file:.+}", _page),
            ]
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, CompletionRequest)
            job = await self._jobs.completion(body, place)
            writer = await place.work(CompletionWriter, job, body)
            return await self._respond(
                request, place, job, writer, stream=body.stream, only_prompts=body.max_tokens == 0
            )

    async def _infill(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, InfillRequest)
            job = await self._jobs.infill(body, place)
            return await self._respond(
                request, place, job, InfillWriter(job, body), stream=body.stream,
                only_prompts=body.n_predict == 0,
            )  # fmt: skip

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, ChatRequest)
            job = await self._jobs.chat(body, place)
            writer = ChatWriter(job, body.tool_use())
            return await self._respond(request, place, job, writer, stream=body.stream)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, ResponsesRequest)
            chat = await place.work(body.chat)
            with errors_of_response():
                job = await self._jobs.chat(chat, place)
            writer = ResponsesWriter(job, chat.tool_use(), body)
            return await self._respond(request, place, job, writer, stream=body.stream)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, messages_api.MessagesRequest)
            chat = await place.work(body.chat)
            job = await self._jobs.chat(chat, place)
            writer = messages_api.MessagesWriter(job, chat.tool_use())
            return await self._respond(request, place, job, writer, stream=body.stream)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        with self.admission.enter() as place:
            body = await self._read(request, place, messages_api.MessagesRequest, whole=True)
            chat = await place.work(body.chat)
            return web.json_response({"input_tokens": await self._jobs.count(chat, place)})

    async def _read(
        self, request: web.Request, place: Place, kind: type[AnyBody], *, whole: bool = False
    ) -> AnyBody:
        """Read and validate a request. Its unknown fields are noted in `request[UNKNOWN_FIELDS]`.
        Where the answer is always `whole`, no comments of a stream come before it.

        The content type must be JSON, which pages of other sites cannot send without CORS. Raises
        ApiError if the body is not a request of this kind, or does not arrive in time.
        """
        if request.content_type != "application/json":
            raise ApiError(415, "send the request as application/json")
        try:
            content = await place.read(request)
        except web.RequestPayloadError as error:
            raise bad_request(
                f"the body is not in its content or transfer encoding: {error}", None
            ) from None
        strict = self._options.strict
        body, request[UNKNOWN_FIELDS] = await place.work(
            parse_request, content, kind, strict=strict
        )
        if getattr(body, "stream", False) and not whole:
            place.patient = partial(kept_alive, request, self._options.keep_alive_seconds)
        return body

    async def _respond(
        self,
        request: web.Request,
        place: Place,
        job: GenerationJob,
        writer: Writer,
        *,
        stream: bool,
        only_prompts: bool = False,
    ) -> web.StreamResponse:
        """Generate the texts of a job and send them.

        `stream` sends each chunk as an event, `only_prompts` only what is known of the prompts.
        """
        request[CHANGES] = job.changes
        spent = request[middleware.SPENT] = [job.prompt_tokens, 0]
        count = self._metrics.text_counter() if self._metrics is not None else None
        response = (
            EventStream(request, writer, job.count, place, self._options.keep_alive_seconds)
            if stream
            else WholeResponse(request, writer, job.count, place)
        )

        async def receive(event: TextEvent) -> None:
            if count is not None:
                count(event)
            if only_prompts:
                if event.result is None:
                    return
                event = replace(event, result=_without_text(event.result))
            if event.chunk is not None:
                spent[1] += len(event.chunk.token_ids)
            await response.receive(event)

        return await response.send(generate_texts(place.client, job, receive))

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        if self._metrics is None:
            raise web.HTTPNotFound
        content, kind = self._metrics.text(request.headers.get("Accept", ""))
        return web.Response(body=content, headers={"Content-Type": kind})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """Return all models, in OpenAI's form and in Anthropic's."""
        names = await Place(self.admission).verifier(self._models.names())
        cards = [await self._card(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return web.json_response({"object": "list", "data": cards, **ends})

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._card(request.match_info["name"]))

    async def _card(self, asked: str) -> dict[str, Any]:
        """Return what is known of a model; if it is not loaded, what was known when it last was."""
        place = Place(self.admission)
        name = await self._jobs.name(asked, place)
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "paceline"}
        began = datetime.fromtimestamp(self._started, UTC).isoformat()
        card |= {"type": "model", "display_name": name, "created_at": began}
        if name in self._models.states:
            card["status"] = {"value": self._models.states[name]}  # as llama.cpp's server tells it
        drafters: Sequence[str] | None = None
        if card.get("status", _LOADED) == _LOADED:
            with place.held, suppress(ApiError):  # it may have been unloaded a moment ago
                client = await self._models.acquire(name, place.held, load=False)
                self._jobs.served[name] = await place.verifier(client.model())
                drafters = await _drafters(client)
        if (model := self._jobs.served.get(name)) is None:
            return card
        return card | {
            "max_model_len": model.facts.max_context,
            "batch_invariant": model.facts.batch_invariant,
            "batch_invariance_reason": model.facts.batch_invariance_reason,
            "chat_template": bool(self._options.chat_template or model.facts.chat_template),
            "drafters": model.drafters if drafters is None else drafters,
        }

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Answer 200 while new requests are accepted and a verifier is reachable, with its
        drafters, or while models can be loaded, with their states."""
        if self.admission.gate.closed:
            return web.json_response({"status": "draining"}, status=503)
        if not files_left():
            reason = "as many files are open as the limit allows: raise `ulimit -n`"
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                await self._models.names()
        except (PacelineError, TimeoutError) as error:
            reason = str(error) or "the verifier does not respond"
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        if states := self._models.states:
            return web.json_response({"status": "ok", "models": states})
        (client,) = self._models.clients
        return web.json_response({"status": "ok", "drafters": await _drafters(client)})

    @web.middleware
    async def _count(self, request: web.Request, handler: middleware.Handler) -> web.StreamResponse:
        """Count the connection of a request as used while it is answered."""
        peer = request.transport and request.transport.get_extra_info("peername")
        with self.connections.in_call(peer[1] if isinstance(peer, tuple) else 0):
            return await handler(request)

    @web.middleware
    async def _refuse_while_draining(
        self, request: web.Request, handler: middleware.Handler
    ) -> web.StreamResponse:
        """Refuse before anything else: what a request would wait for may be gone already."""
        if request.path.startswith(middleware.API_PATHS):
            self.admission.check_open()
        return await handler(request)


async def _drafters(client: Client) -> list[str]:
    """Return names of drafters; none if no service answers: texts then have no drafts."""
    try:
        return [*await client.drafters()]
    except PacelineError:
        return []


def _without_text(result: GenerationResult) -> GenerationResult:
    """Return what is known of the prompt. The verifier always generates a token."""
    usage = replace(result.usage, completion_tokens=0)
    return replace(result, text="", token_ids=[], finish_reason="length", usage=usage)


async def _expect(request: web.Request) -> None:
    """Answer the Expect header. aiohttp's own answer repeats its bytes, which may not be text."""
    if request.version != HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        error = ApiError(417, "unknown Expect header, expected 100-continue or none")
        raise web.HTTPExpectationFailed(
            text=json.dumps(error.body), content_type="application/json"
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0


async def _version(request: web.Request) -> web.StreamResponse:
    return web.json_response({"version": version("paceline")})


async def _page(request: web.Request) -> web.StreamResponse:
    """Return a file of the web page, which is restricted to connections to this gateway."""
    name = request.match_info.get("file", "index.html")
    if name not in _PAGE_FILES:
        raise web.HTTPNotFound
    return web.FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether an error is not one of the caller's HTTP, which gets status 400."""
    broken = (HttpProcessingError, web.RequestPayloadError)
    return record.exc_info is None or not isinstance(record.exc_info[1], broken)


async def run_gateway(
    models: Models,
    options: GatewayOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop_event: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stop_event` is set.

    The first signal drains: health returns 503, new requests are refused, those in flight continue
    for at most `options.drain_seconds`. A second signal ends them at once, a third kills.

    Args:
        models: What is served; its clients are not closed.
        options: Checked options.
        on_ready: Called with the bound address ("127.0.0.1:41234") once requests are answered.
        stop_event: Drains like a signal.

    Raises:
        OptionsError: The address cannot be bound, or a TLS file is invalid.
        SystemExit: With 128 + signal number, after a second signal.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    stop = Stop(stop_event)
    context = https_context(options.metrics)
    metrics, endpoint = serve_gateway_metrics(options)
    gateway = Gateway(models, options, metrics)
    metrics.show(gateway.admission.gate, models)
    runner = web.AppRunner(
        gateway.app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CANCEL_GRACE,
        keepalive_timeout=IDLE_SECONDS,
    )
    with stop.on_signals():
        await runner.setup()
        try:
            address = await _listen(runner, options, context)
            logger.info("serving", extra={"address": address})
            if on_ready is not None:
                on_ready(address)
            closing = keep_running(
                "the limit on connections", lambda: gateway.connections.keep_few(address)
            )
            await stop.soft.wait()
            closing.cancel()
            logger.info("draining", extra={"drain_seconds": options.drain_seconds})
            gateway.admission.close()
            await stop.unless(stop.hard, _drain(gateway, options.drain_seconds))
        finally:
            for client in models.clients:
                why = next((status.reason for status in client.verifiers() if status.reason), "")
                client.fail("the gateway has ended" + (f": {why}" if why else ""))
            await runner.cleanup()
            gateway.admission.shut_down()
            if endpoint is not None:
                await asyncio.to_thread(endpoint.close)
            logger.info("stopped")
    if stop.hard.is_set():
        raise SystemExit(128 + stop.signal)


async def _drain(gateway: Gateway, seconds: float) -> None:
    try:
        await asyncio.wait_for(gateway.admission.gate.drained(), seconds)
    except TimeoutError:
        logger.warning("requests were still in flight after the drain time; cancelling them")


def serve_gateway_metrics(options: GatewayOptions) -> tuple[GatewayMetrics, MetricsEndpoint | None]:
    """Serve metrics, at an endpoint of their own if there is an address for it."""
    registry = new_registry()
    metrics = GatewayMetrics(registry)
    if options.metrics_address is None:
        return metrics, None
    return metrics, serve_metrics(options.metrics, registry)


async def _listen(
    runner: web.AppRunner, options: GatewayOptions, context: ssl.SSLContext | None
) -> str:
    """Bind; returns the address with the bound port."""
    path = socket_path_of(options.address)
    site: web.BaseSite
    if path is not None:
        site = web.UnixSite(runner, str(path), ssl_context=context)
    else:
        host, port = split_address(options.address)
        site = web.TCPSite(runner, host, port, ssl_context=context)
    try:
        await site.start()
    except OSError as error:
        raise OptionsError(f"cannot listen on {options.address}: {error.strerror}") from error
    if path is not None:
        # Only the user of this process may connect.
        path.chmod(0o600)
        return options.address
    return f"{options.address.rpartition(':')[0]}:{runner.addresses[0][1]}"
