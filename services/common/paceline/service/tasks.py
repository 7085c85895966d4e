"""Tasks and threads in the background, none of which dies without a word."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from paceline.service.limits import RETRY_SECONDS

logger = logging.getLogger("paceline.service")
T = TypeVar("T")


def keep_running(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Start a task that runs until it returns or is cancelled. An error is logged, once while it
    stays the same, and the work begins again after ``RETRY_SECONDS``."""

    async def run() -> None:
        last = ""
        while True:
            try:
                return await work()
            except Exception as error:
                if repr(error) != last:
                    logger.exception("%s failed, and goes on", name)
                last = repr(error)
                await asyncio.sleep(RETRY_SECONDS)

    return asyncio.create_task(run(), name=name)


async def in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call that blocks, from a thread of its own.

    Unlike a thread of the event loop's executor it keeps neither other calls nor the end of the
    process waiting. If the caller is cancelled, the thread runs to its end. Raises what the call
    raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            logger.debug("the event loop closed before a thread ended")
        finally:
            result = error = None  # an error holds this frame, and what its call used

    threading.Thread(target=run, name="in-thread", daemon=True).start()
    try:
        return await answer
    except Exception:
        del answer  # it holds the error, which holds this frame
        raise
