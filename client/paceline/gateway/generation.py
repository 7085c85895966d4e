"""From a checked request to its texts, which are generated concurrently."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from paceline.client import (
    CapacityError,
    Chunk,
    Client,
    Generation,
    GenerationOptions,
    GenerationResult,
    Model,
    Prompt,
    TemplateProcess,
    TokenLogprob,
    checked_prompt,
)
from paceline.sampling import CONSTRAINTS
from paceline.service.limits import CONSTRAINT_BYTES
from paceline.telemetry.names import Span

from .admission import Place
from .answer_grammar import GrammarTooLong, answer_grammar
from .channels import marks_of
from .errors import ApiError, bad_request
from .infill import InfillRequest, fim_tokens, prompt_in_middle
from .models import Models
from .options import GatewayOptions
from .requests import (
    MAX_PROMPTS,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    text_of,
)
from .tool_calls import BLOCKS, THOUGHTS, end_of_open_thought

# Models that only their vendors run. Programs that are made for one ask for it whatever is served,
# and can only mean what is: another unknown name may be a mistake.
_HOSTED = re.compile(r"(claude|codex|chatgpt|gpt(?!-oss)|o\d|gemini)\b")

# Maximum number of texts of one request at once. More do not make a verifier's step more efficient.
_MAX_CONCURRENT = 64
_MAX_QUOTES = 1024  # texts with marks that are looked for; with more, marks are tokens alone
_MARKED = re.compile("|".join(map(re.escape, (*BLOCKS, *THOUGHTS))))


@dataclass(frozen=True)
class GenerationJob:
    """A request that was checked against the served model: what to generate."""

    model: Model
    prompts: Sequence[list[int]]  # token ids of each prompt
    choices: Sequence[dict[str, Any]]
    """Arguments of `Client.generate` for each of the n choices of a prompt."""
    stream_options: StreamOptions
    marks: frozenset[str] = frozenset()
    """Special tokens that its texts have, which separate the parts of an answer."""
    thought: str = ""  # the mark that ends the thought in which its texts begin; empty: in none
    receipt: bool = False  # whether the response has receipts
    model_name: str = ""  # name of the model in the response
    changes: str = ""
    """That another model answers, and what was done to messages so that the template shows them."""
    operation: str = Span.GENERATION  # name of its generations in traces

    @property
    def count(self) -> int:
        """Number of texts: prompt by prompt, each with its choices."""
        return len(self.prompts) * len(self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    def prompt_of(self, index: int) -> int:
        return index // len(self.choices)


@dataclass(frozen=True)
class TextEvent:
    """A chunk or the end of one text."""

    index: int  # index of the text: prompt by prompt, each with its n choices
    chunk: Chunk | None  # the next chunk; None at the end
    result: GenerationResult | None  # the result, in the last event of this text
    prompt_logprobs: Sequence[TokenLogprob]  # log-probabilities of the prompt, if requested


class JobBuilder:
    """Checks requests against the model that they are for."""

    def __init__(self, models: Models, options: GatewayOptions) -> None:
        self._models = models
        self._options = options
        self.served: dict[str, Model] = {}  # each model as it was last known, by name
        # One for short requests, one for long ones, which never hold up the short.
        self._templates = {long: TemplateProcess() for long in (False, True)}

    async def close(self) -> None:
        """End the processes that render chat templates."""
        for process in self._templates.values():
            await asyncio.to_thread(process.close)

    async def name(self, asked: str | None, place: Place) -> str:
        """Return the name of a served model, of the first one where a request has none. Raises
        ApiError if there is none of the request's name, unless that is of a model which only its
        vendor runs: it stands for the first one."""
        names = await place.verifier(self._models.names())
        if asked and asked not in names:
            if _HOSTED.match(asked) and not self._options.strict:
                return names[0]
            raise ApiError(
                404,
                f"there is no model {asked!r} here; this gateway serves "
                f"{', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return asked or names[0]

    async def model(self, asked: str | None, place: Place) -> tuple[str, Model]:
        """Return the model of a request, which `place` holds, and its name. Raises ApiError if
        there is none of this name, or it cannot be loaded."""
        name = await self.name(asked, place)
        await place.loaded(self._models.acquire(name, place.held))
        model = self.served[name] = await place.verifier(place.client.model())
        return name, model

    async def completion(self, body: CompletionRequest, place: Place) -> GenerationJob:
        name, model = await self.model(body.model, place)
        return _named(name, body, await place.work(self._completion, body, model))

    async def infill(self, body: InfillRequest, place: Place) -> GenerationJob:
        name, model = await self.model(body.model, place)
        return _named(name, body, await place.work(self._infill, body, model))

    async def chat(self, body: ChatRequest, place: Place) -> GenerationJob:
        name, model = await self.model(body.model, place)
        job = await place.work(self._chat, body, model, self._templates[place.long])
        return _named(name, body, job)

    async def count(self, body: ChatRequest, place: Place) -> int:
        """Return the number of tokens of a chat's prompt, which may be longer than the context."""
        _, model = await self.model(body.model, place)
        _, tokens = await place.work(self._prompt, body, model, self._templates[place.long])
        return len(tokens)

    def _prompt(
        self, body: ChatRequest, model: Model, templates: TemplateProcess
    ) -> tuple[Prompt, list[int]]:
        text = templates.render(
            model,
            [message.for_template() for message in body.messages],
            tools=[tool.for_template() for tool in body.tool_use().tools],
            template=self._options.chat_template,
            documents=body.documents,
            variables=body.variables(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        return text, model.tokens_of_rendered(text)

    def _completion(self, body: CompletionRequest, model: Model) -> GenerationJob:
        given = [checked_prompt(prompt) for prompt in body.prompts()]
        fim: dict[str, str] = {}
        if body.suffix:
            if body.echo or not all(isinstance(prompt, str) for prompt in given):
                raise bad_request("suffix needs prompts that are texts, and no echo", "suffix")
            fim = fim_tokens(model)
            given = [prompt_in_middle(fim, str(prompt), body.suffix) for prompt in given]
        prompts = [model.tokens(prompt) if isinstance(prompt, str) else prompt for prompt in given]
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens of 0 needs echo: nothing would be returned", "max_tokens")
        # The verifier always generates a token.
        limit = max(1, body.max_tokens)
        param = "max_tokens" if "max_tokens" in body.model_fields_set else None
        job = self._job("prompt", body, model, prompts, limit, param, body.logprobs, fim)
        if body.echo:
            job.choices[0]["prompt_logprobs"] = body.logprobs
        return job

    def _infill(self, body: InfillRequest, model: Model) -> GenerationJob:
        fim = fim_tokens(model)
        prefix = body.input_prefix + body.prompt
        text = prompt_in_middle(fim, prefix, body.input_suffix, body.input_extra)
        limit = None if body.n_predict < 0 else max(1, body.n_predict)
        prompts = [model.tokens(text)]
        return self._job("input_prefix", body, model, prompts, limit, "n_predict", None, fim)

    def _chat(self, body: ChatRequest, model: Model, templates: TemplateProcess) -> GenerationJob:
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: set it to true", "top_logprobs")
        text, prompt = self._prompt(body, model, templates)
        limit = body.max_completion_tokens or body.max_tokens
        given = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        job = self._job("messages", body, model, [prompt], limit, given, logprobs)
        use = body.tool_use()
        marks = marks_of(model.codec, use)
        continued = body.messages[-1].content if body.continue_final_message else ""
        thought = end_of_open_thought(text, text_of(continued or ""))
        common: dict[str, Any] = {"special_tokens": sorted(marks)}
        changes = text.changes
        grammar, constraint, eos = "", body.constraint(), list(model.facts.eos_token_ids)
        if model.codec is not None and eos and "grammar" not in constraint:
            told: str = text  # what the template says, without what others may quote
            sent = [message.for_template() for message in body.messages]
            sent += [tool.for_template() for tool in use.tools]
            quotes = set(filter(_MARKED.search, _texts_in(sent)))
            told = told if len(quotes) <= _MAX_QUOTES else ""
            for quote in quotes:
                for form in {quote, quote.strip(), json.dumps(quote, ensure_ascii=False)[1:-1]}:
                    told = told.replace(form, "")
            budget = body.thinking_token_budget
            try:
                grammar = answer_grammar(use, constraint, model.codec, eos, told, thought, budget)
            except GrammarTooLong:
                unbound = (
                    f"calls are not bound: their schemas have more than {CONSTRAINT_BYTES} bytes"
                )
                if constraint or budget is not None:
                    raise bad_request(unbound, "tools") from None
                changes = "; ".join(filter(None, (changes, unbound)))
            except ValueError as error:
                why = f"the parameters of a tool cannot be read as a JSON schema: {error}"
                raise bad_request(why, "tools") from None
        if grammar:
            common |= {**dict.fromkeys(CONSTRAINTS), "grammar": grammar}
        elif constraint:
            thought = ""  # what binds the whole text leaves no room for a thought
        return replace(
            job,
            choices=[{**choice, **common} for choice in job.choices],
            marks=marks,
            thought=thought,
            changes=changes,
            operation=Span.CHAT,
        )

    def _user(self, name: str) -> str:
        """Return whose text it is, for the verifier, which knows this gateway only."""
        facts = (self._options.api_key or "", name)
        return blake2b("\0".join(facts).encode(), digest_size=16).hexdigest() if any(facts) else ""

    def _job(
        self,
        param: str,
        body: GenerationRequest,
        model: Model,
        prompts: Sequence[list[int]],
        limit: int | None,
        limit_param: str | None,
        logprobs: int | None,
        fim: Mapping[str, str] = MappingProxyType({}),
    ) -> GenerationJob:
        """Return the job of a request.

        `param` is its field with the prompts, `limit` the maximum number of new tokens (None: a
        text may fill the context) and `limit_param` the field that has it (None: it is a default),
        `logprobs` the number of likeliest tokens to report (None: not even the log-probabilities of
        the emitted ones), `fim` the model's tokens for a text in the middle, which end it. A limit
        beyond the context is cut by the verifier, for each prompt.
        """
        count = len(prompts) * body.n
        if count > MAX_PROMPTS:
            raise bad_request(
                f"{len(prompts)} prompts with n={body.n} are {count} texts; a request may "
                f"have at most {MAX_PROMPTS}",
                "n",
            )
        max_prompt = max(map(len, prompts))
        context = model.facts.max_context
        room = context - max_prompt
        if room < 1:
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, the prompt has "
                f"{max_prompt} tokens, which leaves no room for an answer: shorten the prompt",
                param,
                "context_length_exceeded",
            )
        if self._options.strict and limit_param is not None and limit is not None and limit > room:
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, there is room "
                f"for {room} new ones after a prompt of {max_prompt}, not for {limit}: ask for "
                "fewer, or leave the limit out",
                limit_param,
                "context_length_exceeded",
            )
        common = {
            "max_new_tokens": min(limit or context, context),
            "logprobs": logprobs or logprobs is not None,
            "user": self._user(body.user or ""),
        }
        same = {**body.sampling(), **common}
        if model.codec is not None and fim:
            ends = map(model.codec.added_id, fim.values())
            same["stop_token_ids"] = [*same["stop_token_ids"], *ends]
        GenerationOptions(**same)  # checks them before a text begins
        if isinstance(same.get("json_schema"), dict):
            same["json_schema"] = json.dumps(same["json_schema"])  # once, not for each text
        choices = [{**same, "seed": body.seed_of(choice)} for choice in range(body.n)]
        return GenerationJob(model, prompts, choices, body.stream_options, receipt=body.receipt)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts within a value of JSON, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _texts_in(part)


def _named(name: str, body: CommonRequest, job: GenerationJob) -> GenerationJob:
    """Return the job with the name of its model, which is told if the request has another one."""
    instead = f"{name} answers for {body.model}" if body.model not in (None, "", name) else ""
    return replace(job, model_name=name, changes="; ".join(filter(None, (instead, job.changes))))


async def generate_texts(
    client: Client, job: GenerationJob, receive: Callable[[TextEvent], Awaitable[None]]
) -> None:
    """Generate all choices of all prompts concurrently, in the order of the prompts.

    The first choice of a prompt is prefilled, the others fork its cache. Where the verifier has no
    memory for another prompt, it waits for one of the same request to end. Cancelling it stops all
    generations. An error of one, or of `receive`, stops the others and is raised.

    `receive` is called with the events of each text in order, for several texts concurrently.
    """
    waiting = deque(range(len(job.prompts)))
    working = max(1, min(len(job.prompts), _MAX_CONCURRENT // len(job.choices)))

    async def report(
        index: int, generation: Generation, parent: Generation, began: asyncio.Event
    ) -> None:
        async with aclosing(aiter(generation)) as chunks:
            async for chunk in chunks:
                began.set()
                await receive(TextEvent(index, chunk, None, parent.prompt_logprobs))
        result = await generation
        began.set()
        await receive(TextEvent(index, None, result, parent.prompt_logprobs))

    async def generate(number: int, began: asyncio.Event) -> None:
        """Generate all choices of a prompt."""
        prompt, first = job.prompts[number], number * len(job.choices)
        parent = client.generate(prompt, keep_cache=len(job.choices) > 1, **job.choices[0])
        parent.operation = job.operation

        async def fork(choice: int) -> None:
            await began.wait()
            generation = client.generate(prompt, parent=parent, **job.choices[choice])
            generation.operation = job.operation
            await report(first + choice, generation, parent, began)

        try:
            forks = (fork(choice) for choice in range(1, len(job.choices)))
            await _run_all(report(first, parent, parent, began), *forks)
        finally:
            await parent.aclose()

    async def work() -> None:
        nonlocal working
        try:
            while waiting:
                number, began = waiting.popleft(), asyncio.Event()
                try:
                    await generate(number, began)
                except CapacityError:
                    if began.is_set() or working == 1:
                        raise
                    waiting.appendleft(number)
                    break  # no memory: fewer at once from now on
        finally:
            working -= 1

    await _run_all(*(work() for _ in range(working)))


async def _run_all(*work: Coroutine[Any, Any, None]) -> None:
    """Run all concurrently. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
