"""Responses: whole, or streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from paceline.client import Chunk, GenerationResult

from .errors import from_error
from .requests import StreamOptions
from .responses import Json, Writer
from .texts import Event

FAILED = web.RequestKey("failed", int)
"""HTTP status of the error that ended a request's stream."""


@dataclass(frozen=True)
class Work:
    """A validated request: its texts, and the writer of its response."""

    events: AsyncGenerator[Event, None]
    """Events of its texts."""
    count: int
    """Number of texts."""
    writer: Writer


async def whole(work: Work) -> web.StreamResponse:
    """A response with all texts."""
    chunks: list[list[Chunk]] = [[] for _ in range(work.count)]
    results: dict[int, GenerationResult] = {}
    async with aclosing(work.events) as events:
        async for event in events:
            if event.chunk is not None:
                chunks[event.index].append(event.chunk)
            if event.result is not None:
                results[event.index] = event.result
    texts = [(chunks[index], results[index]) for index in range(work.count)]
    return web.json_response(work.writer.whole(texts))


async def stream(request: web.Request, work: Work, options: StreamOptions) -> web.StreamResponse:
    """Server-sent events. An error after the first event is an event too."""
    writer, results = work.writer, dict[int, GenerationResult]()
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    opened: set[int] = set()

    async def send(event: Json) -> None:
        if not response.prepared:
            await response.prepare(request)
        # With usage at the end, OpenAI's earlier events have an empty one.
        note = {"usage": None} if options.include_usage and "usage" not in event else {}
        await response.write(f"data: {json.dumps(event | note)}\n\n".encode())

    try:
        async with aclosing(work.events) as events:
            async for event in events:
                if event.index not in opened:
                    opened.add(event.index)
                    await send(writer.opening(event.index, work.count))
                if event.chunk is not None:
                    rounds = options.include_rounds
                    await send(writer.chunk(event.index, event.chunk, rounds=rounds))
                if event.result is not None:
                    results[event.index] = event.result
                    await send(writer.ending(event.index, event.result))
        if options.include_usage:
            await send(writer.total([results[index] for index in range(work.count)]))
        await response.write(b"data: [DONE]\n\n")
    except Exception as error:
        if not response.prepared:
            raise
        if not isinstance(error, ConnectionResetError):
            failure = from_error(error)
            request[FAILED] = failure.status
            await response.write(f"data: {json.dumps(failure.body)}\n\n".encode())
    return response
