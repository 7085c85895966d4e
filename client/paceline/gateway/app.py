"""The routes of the gateway."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, web

from paceline.client import Client, PacelineError

from . import middleware
from .body import AnyBody, read_request
from .errors import ApiError
from .keys import Keyring
from .openapi import document
from .options import GatewayOptions
from .requests import ChatRequest, CompletionRequest
from .responses import ResponsesRequest
from .responses_writer import ResponsesWriter
from .tokens import DetokenizeRequest, TokenizeRequest, described, text_of, tokens_of
from .work import Worker

if TYPE_CHECKING:
    from .metrics import GatewayMetrics

# Longest wait for the verifier in health checks. Unit: seconds.
_HEALTH_TIMEOUT = 5.0

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
    """Serves OpenAI's API under `/v1`, what vLLM and llama.cpp add to it, and a page on `/`.

    Args:
        client: Client of the services; not closed.
        options: Checked options.
        metrics: Counts requests; None: no metrics.

    Attributes:
        app: The aiohttp application. Serve it with `handler_cancellation`, so that a disconnect
            stops the generation.
        gate: Requests in flight. When it is closed, new requests are refused and health is 503.
    """

    def __init__(
        self, client: Client, options: GatewayOptions, metrics: GatewayMetrics | None = None
    ) -> None:
        self._client = client
        self._options = options
        self._started = int(time.time())
        self._worker = Worker(client, options, metrics)
        self.gate = self._worker.gate
        self.app = web.Application(
            middlewares=[
                middleware.observe(metrics, access_log=options.access_log),
                middleware.guard(Keyring(options.keys)),
                middleware.share(options.cors_origins),
            ],
            client_max_size=options.max_body_bytes,
        )
        self.app.on_response_prepare.append(middleware.add_headers(options.cors_origins))
        get, post = (partial(route, expect_handler=_expect) for route in (web.get, web.post))
        self.app.add_routes(
            [
                post("/v1/completions", self._completions),
                post("/v1/chat/completions", self._chat),
                post("/v1/responses", self._responses),
                get("/v1/models", self._models),
                get("/v1/models/{name:.+}", self._model),
                post("/tokenize", self._tokenize),
                post("/detokenize", self._detokenize),
                get("/health", self._health),
                get("/version", _version),
                get("/openapi.json", _openapi),
                get("/", _page),
                get("/page/{file:.+}", _page),
            ]
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, CompletionRequest)
        work = await self._worker.completion(body)
        return await self._worker.respond(request, work, streams=body.stream)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, ChatRequest)
        work = await self._worker.chat(body)
        return await self._worker.respond(request, work, streams=body.stream)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, ResponsesRequest)
        chat = body.chat()
        asked, events = await self._worker.conversation(chat)
        work = self._worker.work(asked, events, ResponsesWriter(asked, chat.tool_use(), body))
        return await self._worker.respond(request, work, streams=body.stream)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [await self._card(None)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._card(request.match_info["name"]))

    async def _card(self, name: str | None) -> dict[str, Any]:
        """The served model and its drafters."""
        model = await self._worker.model(name)
        facts = model.facts
        return {
            "id": self._worker.model_name(model),
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": facts.max_context,
            "batch_invariant": facts.batch_invariant,
            "batch_invariance_reason": facts.batch_invariance_reason,
            "chat_template": bool(self._options.chat_template or facts.chat_template),
            "drafters": list(await self._worker.drafters() or ()),
        }

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, TokenizeRequest)
        model, chat = await self._worker.model(body.model), body.chat()
        if chat is None:
            tokens = await tokens_of(body, model)
        else:
            tokens = await self._worker.chat_prompt(model, chat)
        return web.json_response(described(body, model, tokens))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, DetokenizeRequest)
        return web.json_response(text_of(body, await self._worker.model(body.model)))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """200 while the verifier is reachable and new requests are accepted."""
        if self.gate.closed:
            return web.json_response({"status": "draining"}, status=503)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                await self._client.model()
        except (PacelineError, TimeoutError) as error:
            reason = str(error) or "the verifier does not respond"
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    async def _read(self, request: web.Request, kind: type[AnyBody]) -> AnyBody:
        return await read_request(request, kind, strict=self._options.strict)


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


async def _openapi(request: web.Request) -> web.StreamResponse:
    return web.json_response(document())


async def _page(request: web.Request) -> web.StreamResponse:
    """A file of the web page, which is restricted to connections to this gateway."""
    name = request.match_info.get("file", "index.html")
    if name not in _PAGE_FILES:
        raise web.HTTPNotFound
    return web.FileResponse(_PAGE / name, headers=_PAGE_HEADERS)
