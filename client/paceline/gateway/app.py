"""The routes of the gateway."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from paceline.client import Client, Model, PacelineError
from paceline.service.gate import Gate
from paceline.telemetry.tracing import continuing

from .answers import FAILED, Work, stream, whole
from .chat import render
from .errors import ApiError, bad_request, from_error, from_http
from .options import GatewayOptions
from .requests import MAX_CHOICES, ChatRequest, CompletionRequest, StreamOptions, read_request
from .responses import Json, Kind, Writer
from .texts import generate_texts

if TYPE_CHECKING:
    from .metrics import GatewayMetrics

# Status of disconnected clients in the metrics, as in nginx.
_DISCONNECTED = 499
# Longest wait for the verifier in health checks. Unit: seconds.
_HEALTH_TIMEOUT = 5.0

_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Serves `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and a page on `/`.

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
        self._metrics = metrics
        self._started = int(time.time())
        self.gate = Gate()
        self.app = web.Application(
            middlewares=[self._counted, self._guard], client_max_size=options.max_body_bytes
        )
        self.app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
                web.get("/", _page),
            ]
        )

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts requests of the API and their status."""
        if self._metrics is None or not request.path.startswith("/v1/"):
            return await handler(request)
        began = time.perf_counter()
        status = _DISCONNECTED
        try:
            response = await handler(request)
            status = request.get(FAILED, response.status)
            return response
        finally:
            route = request.match_info.route.resource
            path = route.canonical if route is not None else ""
            self._metrics.ended(path, status, time.perf_counter() - began)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the API key, and returns every error in OpenAI's form."""
        try:
            if request.path.startswith("/v1/"):
                self._check_key(request)
            return await handler(request)
        except web.HTTPException as error:
            failure = from_http(error)
        except Exception as error:
            failure = from_error(error)
        return web.json_response(failure.body, status=failure.status, headers=failure.headers)

    def _check_key(self, request: web.Request) -> None:
        key = self._options.api_key
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

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

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [await self._card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        card = await self._card()
        self._check_model(request.match_info["name"], card["id"])
        return web.json_response(card)

    async def _card(self) -> Json:
        """The served model and its drafters."""
        facts = (await self._client.model()).facts
        return {
            "id": self._options.model_name or facts.name,
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": facts.max_context,
            "batch_invariant": facts.batch_invariant,
            "batch_invariance_reason": facts.batch_invariance_reason,
            "drafters": list(await self._drafters() or ()),
        }

    async def _drafters(self) -> tuple[str, ...] | None:
        """Names of drafters; None if their service is unreachable."""
        try:
            return await self._client.drafters()
        except PacelineError:
            return None

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_request(request, CompletionRequest)
        model = await self._requested_model(body.model)
        prompts = [
            await model.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        if body.echo and body.logprobs is not None:
            raise bad_request("echo cannot be combined with logprobs: omit one of them", "echo")
        echoes = [_text(model, prompt) if body.echo else "" for prompt in body.prompts()]
        work = await self._work(
            "prompt", body, model, prompts, body.max_tokens, body.logprobs, echoes
        )
        return await self._respond(request, body, work)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_request(request, ChatRequest)
        model = await self._requested_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: set it to true", "top_logprobs")
        template, variables = self._options.chat_template, body.chat_template_kwargs
        prompt = await model.encode_rendered(render(model, template, body.messages, variables))
        limit = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        work = await self._work("messages", body, model, [prompt], limit, logprobs, [""])
        return await self._respond(request, body, work)

    async def _requested_model(self, name: str) -> Model:
        model = await self._client.model()
        self._check_model(name, self._options.model_name or model.facts.name)
        return model

    def _check_model(self, name: str, served: str) -> None:
        if name != served:
            raise ApiError(
                404,
                f"there is no model {name!r} here; this gateway serves {served!r}",
                param="model",
                code="model_not_found",
            )

    async def _work(
        self,
        param: str,
        body: CompletionRequest | ChatRequest,
        model: Model,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        echoes: Sequence[str],
    ) -> Work:
        """Checks a request against the served model, and prepares its generations."""
        count = len(prompts) * body.n
        if count > MAX_CHOICES:
            raise bad_request(
                f"{len(prompts)} prompts with n={body.n} are {count} texts; a request may have at "
                f"most {MAX_CHOICES}",
                "n",
            )
        longest = max(map(len, prompts))
        room = model.facts.max_context - longest
        if room < 1:
            raise bad_request(
                f"a prompt of {longest} tokens leaves no room in the context of "
                f"{model.facts.max_context} tokens: shorten the prompt",
                param,
                "context_length_exceeded",
            )
        await self._check_drafter(body.drafter)
        choices = [
            {
                **body.sampling(choice),
                "max_new_tokens": min(max_tokens or room, room),
                "logprobs": logprobs or logprobs is not None,
            }
            for choice in range(body.n)
        ]
        kind: Kind = "completion" if isinstance(body, CompletionRequest) else "chat"
        writer = Writer(kind, body.model, model, [len(prompt) for prompt in prompts], echoes)
        events = generate_texts(self._client, prompts, choices)
        if self._metrics is not None:
            events = self._metrics.counted(events)
        return Work(events, count, writer)

    async def _check_drafter(self, name: str | None) -> None:
        """Refuses unknown drafters, with which a generation would silently run without drafts."""
        if name is None or name == "none":
            return
        known = await self._drafters()
        if known is not None and name not in known:
            raise ApiError(
                404,
                f"there is no drafter {name!r} here; there are: {', '.join(('none', *known))}",
                param="drafter",
                code="drafter_not_found",
            )

    async def _respond(
        self, request: web.Request, body: CompletionRequest | ChatRequest, work: Work
    ) -> web.StreamResponse:
        if self.gate.closed:
            raise ApiError(
                503,
                "the gateway is shutting down: use another one",
                kind="server_error",
                code="service_unavailable",
                headers={"Connection": "close"},
            )
        if self.gate.inside >= self._options.max_requests:
            raise ApiError(
                429,
                f"{self.gate.inside} requests are in flight: retry later",
                kind="rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        with self.gate.enter(), continuing(request.headers):
            if body.stream:
                return await stream(request, work, body.stream_options or StreamOptions())
            return await whole(work)


async def _page(request: web.Request) -> web.StreamResponse:
    """The web page, restricted to connections to this gateway."""
    return web.FileResponse(_PAGE, headers={"Content-Security-Policy": _PAGE_POLICY})


def _text(model: Model, prompt: str | list[int]) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return model.codec.decode(prompt) if model.codec is not None else ""
