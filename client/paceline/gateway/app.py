"""The routes: what each request asks for, and its answer whole or streamed."""

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
from .bodies import read
from .chat import render
from .errors import ApiError, bad_request, from_error, from_http
from .options import GatewayOptions
from .requests import MAX_CHOICES, ChatRequest, CompletionRequest, StreamOptions
from .responses import Json, Kind, Writer
from .texts import Texts

if TYPE_CHECKING:
    from .metrics import GatewayMetrics

# What the metrics call the status of a request whose caller hung up.
_HUNG_UP = 499
# Whether the verifier answers is told within this time. Unit: seconds.
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
        client: generates; its owner closes it.
        options: checked options.
        metrics: counts requests; None: nobody does.

    Attributes:
        app: to be served by aiohttp, with `handler_cancellation`, so that a caller who hangs up
            stops the generation.
        gate: what is in flight; closed, new requests are refused and health says so.
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
        """Tells the metrics how requests of the API end."""
        if self._metrics is None or not request.path.startswith("/v1/"):
            return await handler(request)
        began = time.perf_counter()
        status = _HUNG_UP
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
        """Lets those with the key in, and answers every error in OpenAI's form."""
        try:
            if request.path.startswith("/v1/"):
                self._check_key(request)
            return await handler(request)
        except web.HTTPException as error:
            refusal = from_http(error)
        except Exception as error:
            refusal = from_error(error)
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)

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
        """200 while the verifier answers and new requests are taken."""
        if self.gate.closed:
            return web.json_response({"status": "draining"}, status=503)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                await self._client.model()
        except (PacelineError, TimeoutError) as error:
            reason = str(error) or "the verifier does not answer"
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [await self._card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        card = await self._card()
        self._check_name(request.match_info["name"], card["id"])
        return web.json_response(card)

    async def _card(self) -> Json:
        """The served model, and which drafters there are for it."""
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
        """Names of drafters; None while nobody can tell."""
        try:
            return await self._client.drafters()
        except PacelineError:
            return None

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, CompletionRequest)
        model = await self._named_model(asked.model)
        prompts = [
            await model.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in asked.prompts()
        ]
        if asked.echo and asked.logprobs is not None:
            raise bad_request("echo cannot be had with logprobs: leave one of them out", "echo")
        echoes = [_echo(model, prompt) if asked.echo else "" for prompt in asked.prompts()]
        work = await self._work(
            "prompt", asked, model, prompts, asked.max_tokens, asked.logprobs, echoes
        )
        return await self._answer(request, asked, work)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, ChatRequest)
        model = await self._named_model(asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise bad_request("top_logprobs needs logprobs: set it to true", "top_logprobs")
        template, variables = self._options.chat_template, asked.chat_template_kwargs
        prompt = await model.encode_rendered(render(model, template, asked.messages, variables))
        most = asked.max_completion_tokens or asked.max_tokens
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        work = await self._work("messages", asked, model, [prompt], most, logprobs, [""])
        return await self._answer(request, asked, work)

    async def _named_model(self, name: str) -> Model:
        model = await self._client.model()
        self._check_name(name, self._options.model_name or model.facts.name)
        return model

    def _check_name(self, asked: str, served: str) -> None:
        if asked != served:
            raise ApiError(
                404,
                f"there is no model {asked!r} here; this gateway serves {served!r}",
                param="model",
                code="model_not_found",
            )

    async def _work(
        self,
        param: str,
        asked: CompletionRequest | ChatRequest,
        model: Model,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        echoes: Sequence[str],
    ) -> Work:
        """Checks what only the served model can tell, and says what to generate."""
        count = len(prompts) * asked.n
        if count > MAX_CHOICES:
            raise bad_request(
                f"{len(prompts)} prompts with n={asked.n} are {count} texts; at most {MAX_CHOICES} "
                "may be asked for at once",
                "n",
            )
        room = model.facts.max_context - max(map(len, prompts))
        if room < 1:
            raise bad_request(
                f"the context of {model.facts.max_context} tokens has no room for an answer to "
                f"{max(map(len, prompts))} tokens: shorten the prompt",
                param,
                "context_length_exceeded",
            )
        await self._check_drafter(asked.drafter)
        wanted: bool | int = logprobs or logprobs is not None
        choices = [
            {
                **asked.sampling(choice),
                "max_new_tokens": min(max_tokens or room, room),
                "logprobs": wanted,
            }
            for choice in range(asked.n)
        ]
        kind: Kind = "completion" if isinstance(asked, CompletionRequest) else "chat"
        writer = Writer(kind, asked.model, model, [len(prompt) for prompt in prompts], echoes)
        events = Texts(self._client, prompts, choices).events()
        if self._metrics is not None:
            events = self._metrics.watched(events)
        return Work(events, count, writer)

    async def _check_drafter(self, name: str | None) -> None:
        """A name that nobody has would cost speed only, but not tell its sender so."""
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

    async def _answer(
        self, request: web.Request, asked: CompletionRequest | ChatRequest, work: Work
    ) -> web.StreamResponse:
        if self.gate.closed:
            raise ApiError(
                503,
                "the gateway is shutting down: try another one",
                kind="server_error",
                code="service_unavailable",
                headers={"Connection": "close"},
            )
        if self.gate.inside >= self._options.max_requests:
            raise ApiError(
                429,
                f"{self.gate.inside} requests are in flight already: come again in a moment",
                kind="rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        with self.gate.enter(), continuing(request.headers):
            if asked.stream:
                return await stream(request, work, asked.stream_options or StreamOptions())
            return await whole(work)


async def _page(request: web.Request) -> web.StreamResponse:
    """The web page, which may talk to this gateway and to nobody else."""
    return web.FileResponse(_PAGE, headers={"Content-Security-Policy": _PAGE_POLICY})


def _echo(model: Model, prompt: str | list[int]) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return model.codec.decode(prompt) if model.codec is not None else ""
