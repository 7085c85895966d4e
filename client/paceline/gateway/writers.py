"""Responses in OpenAI's formats, with `seed` and `speculation` added, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from paceline.client import Chunk, Detokenizer, GenerationResult, Stats, TextCodec, TokenLogprob
from paceline.prefixes import CHUNK_TOKENS

from .admission import Place
from .channels import Answer
from .errors import ApiError, from_error
from .generation import GenerationJob, TextEvent
from .requests import CompletionRequest, ToolUse
from .tool_calls import Call, Part, Reasoning

FAILED = web.RequestKey("failed", int)  # HTTP status of the error that ended a request's stream
_STREAM = web.RequestKey("stream", web.StreamResponse)  # the response to a request that streams
DISCONNECTED = 499  # status of a caller that is gone, in metrics and log, as in nginx

# Longest time in which a caller reads nothing. Its text, which holds memory of the verifier, ends
# then. Unit: seconds.
STALLED_SECONDS = 60.0
_PIECE = 1 << 16  # size of the pieces in which a whole response is sent, in bytes
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment in a stream
_WAITING = 64  # parts of texts that wait to be sent as events, beyond which generations wait too


Json = dict[str, Any]
T = TypeVar("T")


@dataclass
class GeneratedText:
    """One text of a request, as far as it is known."""

    chunks: list[Chunk] = field(default_factory=list)
    result: GenerationResult | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()


class Writer(ABC):
    """Formats the response to one request: whole, or as events of a stream."""

    last = b""  # what a stream ends with
    calls = False  # whether texts are searched for calls, which may take long
    keep_alive = _KEEP_ALIVE  # what is sent where nothing else is for some time

    @abstractmethod
    def whole(self, texts: Sequence[GeneratedText]) -> Json:
        """Return the response as a whole."""

    @abstractmethod
    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """Return the first events of a text."""

    @abstractmethod
    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        """Return the events of chunks that arrived together, at least one."""

    @abstractmethod
    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """Return the last events of a text."""

    @abstractmethod
    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        """Return events after all texts."""

    def failed(self, error: ApiError) -> list[Json]:
        """Return the events of an error after the first event, the last ones of a stream."""
        return [error.body]


class ChoicesWriter(Writer):
    """What both kinds of completion share: choices, and events with one choice each."""

    last = b"data: [DONE]\n\n"
    object = ""
    object_of_event = ""
    prefix = ""

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._codec = job.model.codec
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        """Return the event with `usage`, if it was asked for."""
        if not self._job.stream_options.include_usage:
            return []
        used = usage(self._job, results, self._reasoning_tokens())
        return [self._head(self.object_of_event, [], used)]

    def _reasoning_tokens(self) -> int:
        """Return the tokens of the thoughts of all texts."""
        return 0

    def _head(self, kind: str, choices: list[Json], used: Json | None) -> Json:
        fingerprint = self._job.model.facts.target_fingerprint[:12]
        head = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._job.model_name,
            "system_fingerprint": f"fp_{fingerprint}",
            "choices": choices,
        }
        # With usage at the end, OpenAI's earlier events have an empty one.
        return head | {"usage": used} if used or self._job.stream_options.include_usage else head

    def whole(self, texts: Sequence[GeneratedText]) -> Json:
        results = [text.result for text in texts if text.result is not None]
        choices = [
            {"index": index, **self._choice(index, text, result), **told(self._job, result)}
            for index, (text, result) in enumerate(zip(texts, results, strict=True))
        ]
        used = usage(self._job, results, self._reasoning_tokens())
        return self._head(self.object, choices, used)

    @abstractmethod
    def _choice(self, index: int, text: GeneratedText, result: GenerationResult) -> Json:
        """Return a whole choice."""

    def _event(self, index: int, body: Json, logprobs: Json | None = None) -> Json:
        choice = {"index": index, **body, "logprobs": logprobs or None, "finish_reason": None}
        return self._head(self.object_of_event, [choice], None)

    def _last_event(self, index: int, body: Json, reason: str, result: GenerationResult) -> Json:
        event = self._event(index, body)
        event["choices"][0] |= {"finish_reason": reason, **told(self._job, result)}
        return event

    def _with_rounds(self, event: Json, chunks: Sequence[Chunk]) -> Json:
        if self._job.stream_options.include_rounds:
            event["choices"][0]["rounds"] = [self._round(chunk) for chunk in chunks]
        return event

    def _round(self, chunk: Chunk) -> Json:
        tree = None
        if chunk.tree is not None and self._codec is not None:
            tree = {
                "tokens": [self._codec.token_text(token) for token in chunk.tree.tokens],
                "parents": chunk.tree.parents,
                "accepted": chunk.tree.accepted,
            }
        return {
            "index": chunk.round,
            "steps": chunk.steps,
            "tokens": len(chunk.token_ids),
            "token_ids": chunk.token_ids,
            "pieces": chunk.pieces,
            "proposed_by": chunk.proposed_by,
            "tree": tree,
            "undrafted": chunk.undrafted,
        }


class PartsWriter(Writer):
    """Formats one answer as a list of parts, each of which begins and ends: blocks or items."""

    def __init__(self, job: GenerationJob, use: ToolUse) -> None:
        self._job, self.calls = job, bool(use.tools)
        self._answer = Answer(use, job.marks, job.thought)
        self._open = ""  # type of the part that is not complete

    def whole(self, texts: Sequence[GeneratedText]) -> Json:
        (text,) = texts
        assert text.result is not None
        self._write(self._answer.push(text.chunks))
        self._write(self._answer.flush())
        self._close()
        return self._body(text.result)

    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        return self._write(self._answer.push(chunks))

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        return []  # the last events have the usage

    @abstractmethod
    def _write(self, parts: Sequence[Part]) -> list[Json]:
        """Add what was generated; returns the events of it."""

    @abstractmethod
    def _close(self) -> list[Json]:
        """End the part that is open, if one is; returns the events of its end."""

    @abstractmethod
    def _body(self, result: GenerationResult | None) -> Json:
        """Return the whole answer with all parts so far; `result` is None before its end."""


def told(job: GenerationJob, result: GenerationResult) -> Json:
    """Return the seed of a text, and its receipt, if it was asked for."""
    receipt = {"receipt": result.receipt.to_json()} if job.receipt and result.receipt else {}
    return {"seed": result.seed, **receipt}


def usage(job: GenerationJob, results: Sequence[GenerationResult], reasoning: int = 0) -> Json:
    """Return tokens, each prompt counted once, and speculation statistics of all texts. `reasoning`
    is the number of tokens of thoughts."""
    prompt, stats = job.prompt_tokens, Stats()
    for result in results:
        stats.merge(result.stats)
    completion = sum(result.usage.completion_tokens for result in results)
    first_choices = results[:: len(job.choices)]
    # Whole chunks: with the exact number, a text that somebody else sent could be guessed token by
    # token.
    cached = sum(result.usage.reused_tokens // CHUNK_TOKENS for result in first_choices)
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached * CHUNK_TOKENS},
        "completion_tokens": completion,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
        "speculation": stats.summary(),
    }


class CompletionWriter(ChoicesWriter):
    object = object_of_event = "text_completion"
    prefix = "cmpl"

    def __init__(self, job: GenerationJob, body: CompletionRequest) -> None:
        super().__init__(job)
        self._echoes = [self._text(prompt) for prompt in body.prompts()] if body.echo else None
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, text: GeneratedText, result: GenerationResult) -> Json:
        prompt = self._prompt(index, text.prompt_logprobs)
        logprobs = _joined([prompt, self._joined_logprobs(index, text.chunks)])
        return {
            "text": self._echo(index) + result.text,
            "logprobs": logprobs or None,
            "finish_reason": result.finish_reason,
        }

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        logprobs = self._prompt(index, prompt_logprobs)
        return [self._event(index, {"text": self._echo(index)}, logprobs)]

    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        text = "".join(chunk.text for chunk in chunks)
        logprobs = self._joined_logprobs(index, chunks)
        return [self._with_rounds(self._event(index, {"text": text}, logprobs), chunks)]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        return [self._last_event(index, {"text": ""}, result.finish_reason, result)]

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._codec.decode(prompt) if self._codec is not None else ""

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[self._job.prompt_of(index)]

    def _prompt(self, index: int, entries: Sequence[TokenLogprob]) -> Json:
        """Return the log-probabilities of an echoed prompt, whose first token has none."""
        self._offsets[index] = len(self._echo(index))
        asked = self._job.choices[0].get("prompt_logprobs") is not None
        if not asked or self._codec is None:
            return {}
        tokens, detokenizer = (
            self._job.prompts[self._job.prompt_of(index)],
            Detokenizer(self._codec),
        )
        pieces = [detokenizer.push(token) for token in tokens]
        return of_completion(tokens, [None, *entries], pieces, self._codec, 0)

    def _joined_logprobs(self, index: int, chunks: Sequence[Chunk]) -> Json:
        return _joined([self._logprobs(index, chunk) for chunk in chunks])

    def _logprobs(self, index: int, chunk: Chunk) -> Json:
        offset = self._offsets[index]
        self._offsets[index] = offset + len(chunk.text)
        if not chunk.logprobs or self._codec is None:
            return {}
        return of_completion(chunk.token_ids, chunk.logprobs, chunk.pieces, self._codec, offset)


class ChatWriter(ChoicesWriter):
    """`/v1/chat/completions`."""

    object, object_of_event = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, job: GenerationJob, use: ToolUse) -> None:
        super().__init__(job)
        self._use, self.calls = use, bool(use.tools)
        self._answers: dict[int, Answer] = {}

    def _reasoning_tokens(self) -> int:
        return sum(answer.reasoning_tokens for answer in self._answers.values())

    def _begin(self, index: int) -> Answer:
        answer = self._answers[index] = Answer(self._use, self._job.marks, self._job.thought)
        return answer

    def _choice(self, index: int, text: GeneratedText, result: GenerationResult) -> Json:
        answer = self._begin(index)
        parts = answer.push(text.chunks) + answer.flush()
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [self._call(part) for part in parts if isinstance(part, Call)]
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "message": message,
            "logprobs": self._logprobs(result.logprobs) or None,
            "finish_reason": _reason(result, answer),
        }

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        self._begin(index)
        return [self._event(index, {"delta": {"role": "assistant", "content": ""}})]

    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        """Return an event for each part of the text; the first has the log-probabilities. There is
        none for a text that is held back, such as a call that is not complete."""
        deltas = self._deltas(index, self._answers[index].push(chunks))
        logprobs = self._logprobs([entry for chunk in chunks for entry in chunk.logprobs])
        if not (deltas or logprobs or self._job.stream_options.include_rounds):
            return []
        first, *others = deltas or [{}]
        event = self._event(index, {"delta": first}, logprobs)
        rest = [self._event(index, {"delta": delta}) for delta in others]
        return [self._with_rounds(event, chunks), *rest]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """Return the rest of the text, and the finish reason."""
        answer = self._answers[index]
        events = [
            self._event(index, {"delta": delta}) for delta in self._deltas(index, answer.flush())
        ]
        reason = _reason(result, answer)
        return [*events, self._last_event(index, {"delta": {}}, reason, result)]

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[Json]:
        number = self._answers[index].calls - sum(isinstance(part, Call) for part in parts)
        deltas: list[Json] = []
        for part in parts:
            if isinstance(part, str):
                deltas.append({"content": part})
            elif isinstance(part, Reasoning):
                deltas.append({"reasoning_content": part.text})
            else:
                deltas.append({"tool_calls": [{"index": number, **self._call(part)}]})
                number += 1
        return deltas

    def _call(self, call: Call) -> Json:
        kind, given = "function", {"arguments": call.arguments}
        if call.name in self._use.custom:
            kind, given = "custom", {"input": call.input}
        return {"id": call.id, "type": kind, kind: {"name": call.name, **given}}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> Json:
        return of_chat(entries, self._codec) if entries and self._codec is not None else {}


def _joined(parts: Sequence[Json]) -> Json:
    """Return the lists of all parts that have some, one after the other."""
    parts = [part for part in parts if part]
    return {key: [value for part in parts for value in part[key]] for key in (parts or [{}])[0]}


def _reason(result: GenerationResult, answer: Answer) -> str:
    return "tool_calls" if answer.calls and result.finish_reason == "stop" else result.finish_reason


def of_chat(entries: Sequence[TokenLogprob], codec: TextCodec) -> Json:
    def fields(token: int, logprob: float) -> Json:
        text, raw = codec.token_text(token), list(codec.token_bytes(token))
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {
            **fields(entry.token_id, entry.logprob),
            "top_logprobs": [fields(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def of_completion(
    tokens: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    pieces: Sequence[str],
    codec: TextCodec,
    offset: int,
) -> Json:
    """Return the form of completions. `entries` and `pieces` belong to the tokens; the entry of a
    prompt's first token is None. `offset` is the number of characters before the tokens."""

    def likeliest(entry: TokenLogprob) -> dict[str, float]:
        # As in OpenAI's API, the likeliest comes first, and the token itself is always included.
        # Among tokens with equal text, the likeliest one is kept.
        logprobs: dict[str, float] = {}
        candidates = [*entry.top, (entry.token_id, entry.logprob)]
        for token, logprob in sorted(candidates, key=lambda pair: -pair[1]):
            logprobs.setdefault(codec.token_text(token), logprob)
        return logprobs

    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": [codec.token_text(token) for token in tokens],
        "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
        "top_logprobs": [None if entry is None else likeliest(entry) for entry in entries],
        "text_offset": offsets[: len(entries)],
    }


async def kept_alive(request: web.Request, seconds: float, answer: Awaitable[T]) -> T:
    """Return what is awaited before a stream has its first event, such as a model that is loaded;
    each `seconds` of it, a comment is sent. An error after one is sent by
    :func:`error_after_comments`."""
    task = asyncio.ensure_future(answer)
    try:
        with suppress(ConnectionResetError):  # which cancels the request
            while not (await asyncio.wait({task}, timeout=seconds))[0]:
                await _send(request, _event_stream(request), _KEEP_ALIVE)
        return await task
    finally:
        task.cancel()


async def error_after_comments(
    request: web.Request, status: int, body: Json
) -> web.StreamResponse | None:
    """Send the error of a request as the last event of its stream; None if nothing was sent yet."""
    response: web.StreamResponse | None = request.get(_STREAM)
    if response is None or not response.prepared:
        return None
    request[FAILED] = status
    with suppress(ConnectionResetError):
        await _send(request, response, _as_sse([body]))
    return response


def _event_stream(request: web.Request) -> web.StreamResponse:
    """Return the response to a request whose texts are streamed."""
    if _STREAM not in request:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        request[_STREAM] = web.StreamResponse(headers=headers)
    return request[_STREAM]


class WholeResponse:
    """Collects `count` texts, and sends one response."""

    def __init__(self, request: web.Request, writer: Writer, count: int, place: Place) -> None:
        self._request, self._writer, self._place = request, writer, place
        self._texts = [GeneratedText() for _ in range(count)]

    async def receive(self, event: TextEvent) -> None:
        text = self._texts[event.index]
        text.prompt_logprobs = event.prompt_logprobs
        if event.chunk is not None:
            text.chunks.append(event.chunk)
        text.result = event.result

    async def send(self, texts: Coroutine[Any, Any, None]) -> web.StreamResponse:
        """Run `texts`, which calls `receive`, and send the response."""
        await texts
        content = await self._place.work(self._content)
        response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
        response.content_length = len(content)
        with suppress(ConnectionResetError):
            for begin in range(0, len(content), _PIECE):
                await _send(self._request, response, content[begin : begin + _PIECE])
        return response

    def _content(self) -> bytes:
        return json.dumps(self._writer.whole(self._texts)).encode()


class EventStream:
    """Sends `count` texts as server-sent events. An error after the first of them is an event too.

    What arrives in one turn of the event loop is sent together, because each write wakes the
    caller: the rounds of some time travel in one message of the verifier.

    After each `keep_alive_seconds` without an event a comment is sent, so that proxies keep the
    connection during a long prefill, or a long call of a function.
    """

    def __init__(
        self,
        request: web.Request,
        writer: Writer,
        count: int,
        place: Place,
        keep_alive_seconds: float,
    ) -> None:
        self._request, self._writer, self._place = request, writer, place
        self._keep_alive_seconds = keep_alive_seconds
        self._results: list[GenerationResult | None] = [None] * count
        self._opened = set[int]()
        self._arrived: list[TextEvent] = []
        self._flushing: asyncio.Task[None] | None = None
        self._sent = asyncio.Event()
        self._sending = asyncio.Lock()
        self._response = _event_stream(request)

    async def receive(self, event: TextEvent) -> None:
        self._arrived.append(event)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
            # Nobody asks for the error of a request that was cancelled.
            self._flushing.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._flushing.done() or len(self._arrived) > _WAITING:
            await self._flushed()

    async def send(self, texts: Coroutine[Any, Any, None]) -> web.StreamResponse:
        """Run `texts`, which calls `receive`, and end the stream."""
        quiet = asyncio.create_task(self._keep_alive())
        try:
            await texts
            await self._flushed()
            results = [result for result in self._results if result is not None]
            total = await self._place.work(self._writer.total, results)  # of a million rounds maybe
            await self._send(_as_sse(total) + self._writer.last)
        except Exception as error:
            with suppress(Exception):
                await self._flushed()  # what arrived before the error
            async with self._sending:
                quiet.cancel()
            if not self._response.prepared:
                raise
            if not isinstance(error, ConnectionResetError):
                failure = from_error(error)
                self._request[FAILED] = failure.status
                await self._send(_as_sse(self._writer.failed(failure)))
        finally:
            quiet.cancel()
            if self._flushing is not None:
                self._flushing.cancel()
        return self._response

    async def _keep_alive(self) -> None:
        with suppress(ConnectionResetError):  # which cancels the request
            while True:
                self._sent.clear()
                try:
                    async with asyncio.timeout(self._keep_alive_seconds):
                        await self._sent.wait()
                except TimeoutError:
                    await self._send(self._writer.keep_alive)

    async def _flushed(self) -> None:
        """Wait until what arrived is sent. Raises what `receive` raises."""
        if self._flushing is not None:
            await asyncio.shield(self._flushing)  # a text that is cancelled keeps nothing back

    async def _flush(self) -> None:
        while self._arrived:
            by_text: dict[int, list[TextEvent]] = {}
            for event in self._arrived:
                by_text.setdefault(event.index, []).append(event)
            self._arrived.clear()
            events = [event for texts in by_text.values() for event in await self._events(texts)]
            if events:
                await self._send(_as_sse(events))
        self._flushing = None  # unless it failed

    async def _events(self, arrived: Sequence[TextEvent]) -> list[Json]:
        """Return the events of what arrived of one text."""
        index, events = arrived[0].index, list[Json]()
        if index not in self._opened:
            self._opened.add(index)
            opening = partial(self._writer.opening, index, arrived[0].prompt_logprobs)
            # An echoed prompt may have thousands of log-probabilities.
            events += await self._place.work(opening) if arrived[0].prompt_logprobs else opening()
        more = partial(self._more, index, arrived)
        return events + (await self._place.work(more) if self._writer.calls else more())

    def _more(self, index: int, arrived: Sequence[TextEvent]) -> list[Json]:
        """Return the events of chunks and of the end of a text."""
        events = list[Json]()
        chunks = [event.chunk for event in arrived if event.chunk is not None]
        if chunks:
            events += self._writer.chunks(index, chunks)
        if (result := arrived[-1].result) is not None:
            self._results[index] = result
            events += self._writer.ending(index, result)
        return events

    async def _send(self, content: bytes) -> None:
        async with self._sending:  # of several texts, the first one prepares the response
            await _send(self._request, self._response, content)
        self._sent.set()


def _as_sse(events: Sequence[Json]) -> bytes:
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    return "".join(lines).encode()


async def _send(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Send a part of a response. Raises ConnectionResetError if the caller is gone, or reads
    nothing."""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            if not response.prepared:
                await response.prepare(request)
            await response.write(content)
    except TimeoutError:
        request[FAILED] = DISCONNECTED
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the caller reads nothing") from None
