"""Sending responses: whole, or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .errors import from_error
from .texts import Event
from .writers import Text, Writer

FAILED = web.RequestKey("failed", int)
"""HTTP status of the error that ended a request's stream."""
DISCONNECTED = 499
"""Status of a caller that is gone, in metrics and log, as in nginx."""

# Longest time in which a caller reads nothing. Its text, which holds memory of the verifier, ends
# then. Unit: seconds.
_STALLED_SECONDS = 60.0
# A whole response is sent in pieces of so many bytes.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Work:
    """A validated request: its texts, and the writer of its response."""

    events: AsyncGenerator[Event, None]
    """Events of its texts."""
    count: int
    """Number of texts."""
    prompt_tokens: int
    """Tokens of all prompts."""
    writer: Writer


async def whole(request: web.Request, work: Work) -> web.StreamResponse:
    """Sends a response with all texts."""
    texts = [Text() for _ in range(work.count)]
    async with aclosing(work.events) as events:
        async for event in events:
            text = texts[event.index]
            text.prompt_logprobs = event.prompt_logprobs
            if event.chunk is not None:
                text.chunks.append(event.chunk)
            if event.result is not None:
                text.result = event.result
    content = json.dumps(work.writer.whole(texts)).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = len(content)
    with suppress(ConnectionResetError):
        for begin in range(0, len(content), _PIECE):
            await _send(request, response, content[begin : begin + _PIECE])
    return response


async def _send(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Sends a part of a response.

    Raises:
        ConnectionResetError: The caller is gone, or reads nothing.
    """
    try:
        async with asyncio.timeout(_STALLED_SECONDS):
            if not response.prepared:
                await response.prepare(request)
            await response.write(content)
    except TimeoutError:
        request[FAILED] = DISCONNECTED
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the caller reads nothing") from None


async def stream(request: web.Request, work: Work, keep_alive_seconds: float) -> web.StreamResponse:
    """Server-sent events. An error after the first of them is an event too.

    Args:
        request: The request.
        work: Its texts.
        keep_alive_seconds: Time without a token after which a comment is sent, so that proxies keep
            the connection during a long prefill.
    """
    writer, opened = work.writer, set[int]()
    texts = [Text() for _ in range(work.count)]
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )

    async def send_all(events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            content = f"{name}data: {json.dumps(event)}\n\n"
            await _send(request, response, content.encode())

    begun = asyncio.Event()

    async def keep_alive() -> None:
        while not begun.is_set():
            try:
                async with asyncio.timeout(keep_alive_seconds):
                    await begun.wait()
            except TimeoutError:
                await _send(request, response, b": keep-alive\n\n")

    quiet = asyncio.create_task(keep_alive())

    async def begin() -> None:
        begun.set()
        await quiet

    try:
        async with aclosing(work.events) as events:
            async for event in events:
                await begin()
                if event.index not in opened:
                    opened.add(event.index)
                    await send_all(writer.opening(event.index, event.prompt_logprobs))
                if event.chunk is not None:
                    await send_all(writer.chunk(event.index, event.chunk))
                if event.result is not None:
                    texts[event.index].result = event.result
                    await send_all(writer.ending(event.index, event.result))
        await send_all(writer.total([text.result for text in texts if text.result is not None]))
        await _send(request, response, writer.last)
    except Exception as error:
        with suppress(ConnectionResetError):
            await begin()
        if not response.prepared:
            raise
        if not isinstance(error, ConnectionResetError):
            failure = from_error(error)
            request[FAILED] = failure.status
            await send_all([failure.body])
    finally:
        quiet.cancel()
    return response
