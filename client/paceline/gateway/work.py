"""From a validated request to its generations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from paceline.client import Client, Model, PacelineError
from paceline.service.gate import Gate
from paceline.telemetry.tracing import continuing

from .answers import Work, stream, whole
from .chat import render
from .chat_writer import ChatWriter
from .completion_writer import CompletionWriter
from .errors import ApiError, bad_request
from .middleware import CALLER, SPENT
from .options import GatewayOptions
from .requests import MAX_PROMPTS, ChatRequest, CompletionRequest, GenerationRequest
from .texts import Event, generate_texts
from .writers import Asked, Writer

if TYPE_CHECKING:
    from .metrics import GatewayMetrics


class Worker:
    """Checks requests against the served model and runs them.

    Args:
        client: Client of the services.
        options: Options of the gateway.
        metrics: Counts texts; None: no metrics.

    Attributes:
        gate: Requests in flight. When it is closed, new requests are refused.
    """

    def __init__(
        self, client: Client, options: GatewayOptions, metrics: GatewayMetrics | None
    ) -> None:
        self._client = client
        self._options = options
        self._metrics = metrics
        self.gate = Gate()

    async def model(self, name: str | None) -> Model:
        """The served model.

        Raises:
            ApiError: It has another name than the request's.
        """
        model = await self._client.model()
        served = self.model_name(model)
        if name is not None and name != served:
            raise ApiError(
                404,
                f"there is no model {name!r} here; this gateway serves {served!r}",
                param="model",
                code="model_not_found",
            )
        return model

    def model_name(self, model: Model) -> str:
        """Name of the served model in requests and responses."""
        return self._options.model_name or model.facts.name

    async def drafters(self) -> tuple[str, ...] | None:
        """Names of drafters; None if their service is unreachable."""
        try:
            return await self._client.drafters()
        except PacelineError:
            return None

    async def completion(self, body: CompletionRequest) -> Work:
        """The work of a completion."""
        model = await self.model(body.model)
        prompts = [
            await model.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens of 0 needs echo: nothing would be returned", "max_tokens")
        scored = body.logprobs if body.echo else None
        echoes = [_text(model, prompt) for prompt in body.prompts()] if body.echo else None
        asked = self._asked(body, model, prompts)
        events = await self._generate(
            "prompt",
            body,
            asked,
            {"max_new_tokens": max(1, body.max_tokens), "logprobs": _logprobs(body.logprobs)},
            {"prompt_logprobs": scored},
        )
        if body.max_tokens == 0:
            events = _without_texts(events)
        return self.work(asked, events, CompletionWriter(asked, echoes))

    async def chat(self, body: ChatRequest) -> Work:
        """The work of a chat completion."""
        asked, events = await self.conversation(body)
        return self.work(asked, events, ChatWriter(asked, body.tool_use()))

    async def conversation(self, body: ChatRequest) -> tuple[Asked, AsyncGenerator[Event, None]]:
        """What a conversation asks for, and its texts."""
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: set it to true", "top_logprobs")
        model = await self.model(body.model)
        asked = self._asked(body, model, [await self.chat_prompt(model, body)])
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        arguments = {"max_new_tokens": limit, "logprobs": _logprobs(logprobs)}
        return asked, await self._generate("messages", body, asked, arguments, {})

    async def chat_prompt(self, model: Model, body: ChatRequest) -> list[int]:
        """Token ids of a conversation."""
        return await model.encode_rendered(render(model, self._options.chat_template, body))

    async def respond(
        self, request: web.Request, work: Work, *, streams: bool
    ) -> web.StreamResponse:
        """Runs work, and counts it towards the limits of its caller.

        Raises:
            ApiError: The gateway is full or drains, or a limit is reached.
        """
        if self.gate.closed:
            raise ApiError(
                503,
                "the gateway is shutting down: use another one",
                kind="server_error",
                code="service_unavailable",
                headers={"Connection": "close"},
            )
        request[CALLER].admit(self.gate.inside, self._options.max_requests)
        work = replace(work, events=_spending(work, request))
        with self.gate.enter(), continuing(request.headers):
            if streams:
                return await stream(request, work, self._options.keep_alive_seconds)
            return await whole(request, work)

    def work(self, asked: Asked, events: AsyncGenerator[Event, None], writer: Writer) -> Work:
        prompt_tokens = sum(map(len, asked.prompts))
        return Work(events, len(asked.prompts) * asked.choices, prompt_tokens, writer)

    def _asked(self, body: GenerationRequest, model: Model, prompts: Sequence[list[int]]) -> Asked:
        return Asked(
            model, body.model or self.model_name(model), prompts, body.n, body.stream_options
        )

    async def _generate(
        self,
        param: str,
        body: GenerationRequest,
        asked: Asked,
        arguments: dict[str, Any],
        first: dict[str, Any],
    ) -> AsyncGenerator[Event, None]:
        """The texts of a checked request.

        Args:
            param: Field with the prompts.
            body: The request.
            asked: Its prompts.
            arguments: More arguments of `Client.generate`; `max_new_tokens` may be None.
            first: Those of the first choice of each prompt.
        """
        count = len(asked.prompts) * body.n
        if count > MAX_PROMPTS:
            raise bad_request(
                f"{len(asked.prompts)} prompts with n={body.n} are {count} texts; a request may "
                f"have at most {MAX_PROMPTS}",
                "n",
            )
        longest = max(map(len, asked.prompts))
        context = asked.model.facts.max_context
        room = context - longest
        if room < 1:
            raise bad_request(
                f"a prompt of {longest} tokens leaves no room in the context of {context} tokens: "
                "shorten the prompt",
                param,
                "context_length_exceeded",
            )
        await self._check_drafter(body.drafter)
        arguments["max_new_tokens"] = min(arguments["max_new_tokens"] or room, room)
        choices = [{**body.sampling(choice), **arguments} for choice in range(body.n)]
        choices[0] |= first
        events = generate_texts(self._client, [list(each) for each in asked.prompts], choices)
        return events if self._metrics is None else self._metrics.counted(events)

    async def _check_drafter(self, name: str | None) -> None:
        """Refuses unknown drafters, with which a generation would silently run without drafts."""
        if name is None or name == "none":
            return
        known = await self.drafters()
        if known is not None and name not in known:
            raise ApiError(
                404,
                f"there is no drafter {name!r} here; there are: {', '.join(('none', *known))}",
                param="drafter",
                code="drafter_not_found",
            )


async def _spending(work: Work, request: web.Request) -> AsyncGenerator[Event, None]:
    """Counts the tokens of a request, for the limits of its key and for the access log."""
    spent = request[SPENT] = [work.prompt_tokens, 0]
    caller = request[CALLER]
    caller.spend(work.prompt_tokens)
    async with aclosing(work.events) as events:
        async for event in events:
            if event.chunk is not None:
                spent[1] += len(event.chunk.token_ids)
                caller.spend(len(event.chunk.token_ids))
            yield event


async def _without_texts(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Only what is known of the prompts. The verifier always generates a token."""
    async with aclosing(events):
        async for event in events:
            if event.result is not None:
                empty = replace(event.result.usage, completion_tokens=0)
                result = replace(
                    event.result, text="", token_ids=[], finish_reason="length", usage=empty
                )
                yield replace(event, chunk=None, result=result)


def _logprobs(count: int | None) -> bool | int:
    """`logprobs` of `Client.generate`."""
    return count or count is not None


def _text(model: Model, prompt: str | list[int]) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return model.codec.decode(prompt) if model.codec is not None else ""
