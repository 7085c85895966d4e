"""Streams of peers that say nothing or take nothing: each wait for one has an end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message

from paceline.service import ServiceError, limits

_LAST_WRITE_SECONDS = 1.0  # for the end of a message whose stream is cancelled


async def first_message(context: Any) -> Any:
    """Return a stream's first message, or grpc.aio.EOF. Raises ``ServiceError`` if none comes."""
    reading = asyncio.ensure_future(context.read())
    try:
        done, _ = await asyncio.wait([reading], timeout=limits.FIRST_MESSAGE_SECONDS)
        if not done:
            raise ServiceError.failed_precondition(
                "NO_MESSAGE",
                f"no message came within {limits.FIRST_MESSAGE_SECONDS:g} s; send the first one "
                "when the stream begins",
            )
        return reading.result()
    finally:
        reading.cancel()


async def write(context: Any, message: Message) -> None:
    """Send a message. A cancellation waits for that: a call whose first message is interrupted can
    carry no status, and its client would wait for ever. Raises ``ServiceError`` if the peer takes
    none."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        async with asyncio.timeout(limits.WRITE_SECONDS):
            await asyncio.shield(writing)
    except TimeoutError:
        writing.cancel()
        raise ServiceError.resource_exhausted(
            "NOT_READ",
            f"the peer has taken no message for {limits.WRITE_SECONDS:g} s; begin a new stream",
        ) from None
    except asyncio.CancelledError:
        with suppress(Exception):  # the peer has left, or does not read
            await asyncio.wait_for(writing, _LAST_WRITE_SECONDS)
        raise
