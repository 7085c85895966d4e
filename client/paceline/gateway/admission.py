"""Which requests come in: how many at once, with how many bytes, until the gateway drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from aiohttp import web

from paceline.client import Client
from paceline.service.interceptor import Gate
from paceline.service.runtime import share_one_heap, trim_heap

from .errors import ApiError

# Bytes of each body that count for nothing, so that short requests come in beside any long ones.
_FREE_BYTES = 64 << 10
# Bodies of the maximum length that are in memory at once.
LONG_BODIES = 8
BODY_SECONDS = 30.0  # maximum time for the arrival of a body, in seconds
VERIFIER_SECONDS = 30.0  # maximum wait for a verifier before the first token of a text, in seconds
# Time after the end of a long request until its memory returns to the system. Unit: seconds.
_TRIM_SECONDS = 1.0
# Threads for the work of short requests, and of long ones, which never hold up the short.
_THREADS, _LONG_THREADS = 4, 1

P = ParamSpec("P")
T = TypeVar("T")

_unavailable = partial(ApiError, 503, kind="server_error")
_LATER = {"Retry-After": "1"}
_draining = partial(
    _unavailable,
    "the gateway is shutting down: use another one",
    code="service_unavailable",
    headers={"Connection": "close", **_LATER},
)
_unanswered = partial(_unavailable, "no verifier answers", code="service_unavailable")
_overloaded = partial(
    _unavailable,
    "the gateway reads other long requests: retry in 1 s",
    code="overloaded",
    headers=_LATER,
)
_full = partial(
    ApiError,
    429,
    "as many requests are in flight as --max-requests allows: retry in 1 s",
    kind="rate_limit_error",
    code="too_many_requests",
    headers=_LATER,
)
_slow = partial(ApiError, 408, "the request's body took too long", code="timeout")


class Wait:
    """A wait that ends with an error after a time, or when somebody gives it one.

    Errors are made where they are raised: one that a frame of its own traceback had kept would keep
    the request's body until the next collection of garbage.
    """

    def __init__(self, seconds: float | None, late: Callable[[], ApiError]) -> None:
        self.timeout = asyncio.timeout(seconds)
        self.error = late

    def end(self, error: Callable[[], ApiError]) -> None:
        if self.timeout.expired():
            return
        self.error = error
        self.timeout.reschedule(asyncio.get_running_loop().time())


class Place:
    """What a request holds from its head to the end of its response."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0
        self.counted_bytes = 0  # bytes of its body that count
        self.held = ExitStack()  # closed at the end of the response
        self._client: Client | None = None
        self.patient: Callable[[Awaitable[Client]], Awaitable[Client]] = lambda answer: answer
        """Awaits what may take long, such that the caller does not give up."""

    @property
    def long(self) -> bool:
        return self._size > _FREE_BYTES

    @property
    def client(self) -> Client:
        """The client of its model, once that is loaded."""
        assert self._client is not None, "a request has no client before `loaded`"
        return self._client

    async def read(self, request: web.Request) -> bytes:
        """Return the body. Raises ApiError if it is too slow, or there is no memory for it now; and
        web.HTTPException: it is too long."""
        max_bytes = request.client_max_size
        if (request.content_length or 0) > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes)
        content = bytearray()
        async with self._admission.arriving(self):
            while chunk := await request.content.readany():
                content += chunk
                if len(content) > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes)
                self._size = len(content)
                self._admission.count(self, max(0, self._size - _FREE_BYTES))
        return bytes(content)

    async def work(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return the result of a function that runs in a thread, so that other streams go on.

        If the caller is cancelled, it is not called, or its result is dropped.
        """
        return await self._admission.work(
            self._size > _FREE_BYTES, partial(function, *args, **options)
        )

    async def verifier(self, answer: Awaitable[T]) -> T:
        """Return what a verifier answers. Raises ApiError if it does not in time, or the gateway
        drains."""
        async with self._admission.waiting(VERIFIER_SECONDS):
            return await answer

    async def loaded(self, answer: Awaitable[Client]) -> None:
        """Wait, however long, for the client of a loaded model. Raises ApiError if the gateway
        drains."""
        async with self._admission.waiting(None):
            self._client = await self.patient(answer)


class Admission:
    """Gives requests a place. Not thread-safe: used on one event loop.

    A request counts from its head on. Where there is no place, or no memory, the one whose body has
    been arriving longest gives up its own: bodies that never end keep nobody out.
    """

    def __init__(self, max_requests: int, max_body_bytes: int) -> None:
        self.gate = Gate()  # requests with a place. Once it is closed, no other gets one
        self._max_requests = max_requests
        self._max_bytes = LONG_BODIES * max_body_bytes
        self._bytes = 0
        self._places: set[Place] = set()
        self._arriving: dict[Place, Wait] = {}
        self._waiting: set[Wait] = set()
        self._trimming: asyncio.TimerHandle | None = None
        share_one_heap()  # or each thread would keep some of what long requests took
        self._short = ThreadPoolExecutor(_THREADS, "paceline-request")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "paceline-long-request")

    def close(self) -> None:
        """Begin the drain: whoever waits for a body or a verifier is refused, as new requests."""
        self.gate.close()
        for wait in (*self._arriving.values(), *self._waiting):
            wait.end(_draining)

    def _trim(self) -> None:
        self._trimming = None
        self._long.submit(trim_heap)

    def shut_down(self) -> None:
        """End the threads after the last request."""
        if self._trimming is not None:
            self._trimming.cancel()
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def check_open(self) -> None:
        """Raises ApiError if the gateway drains."""
        if self.gate.closed:
            raise _draining()

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Take a place for a request. Raises ApiError if the gateway drains, or is full."""
        self.check_open()
        if len(self._places) >= self._max_requests and not self._take_from_another(None, _full):
            raise _full()
        place = Place(self)
        self._places.add(place)
        try:
            with self.gate.enter():
                yield place
        finally:
            place.held.close()
            self._leave(place)
            if place.long and self._trimming is None:  # else the C library keeps what it took
                loop = asyncio.get_running_loop()
                self._trimming = loop.call_later(_TRIM_SECONDS, self._trim)

    def count(self, place: Place, size: int) -> None:
        """Count the bytes of a body. Raises ApiError if there is no memory for them."""
        self._bytes += size - place.counted_bytes
        place.counted_bytes = size
        while self._bytes > self._max_bytes:
            if not self._take_from_another(place, _overloaded):
                raise _overloaded()

    def _take_from_another(self, place: Place | None, error: Callable[[], ApiError]) -> bool:
        """Refuse the request whose body has been arriving longest, for memory of `place` one that
        holds some. Return whether there is one."""
        for other, wait in self._arriving.items():
            if place is None or (other is not place and other.counted_bytes):
                self._leave(other)
                wait.end(error)
                return True
        return False

    def _leave(self, place: Place) -> None:
        self._places.discard(place)
        self._arriving.pop(place, None)
        self._bytes -= place.counted_bytes
        place.counted_bytes = 0

    @asynccontextmanager
    async def arriving(self, place: Place) -> AsyncIterator[None]:
        """Read a body, until it is too late or another request takes the place."""
        wait = Wait(BODY_SECONDS, _slow)
        self._arriving[place] = wait
        try:
            async with _ended(wait):
                yield
        finally:
            self._arriving.pop(place, None)

    @asynccontextmanager
    async def waiting(self, seconds: float | None) -> AsyncIterator[None]:
        """Wait for a verifier, until it is too late (never if None) or the gateway drains."""
        self.check_open()
        wait = Wait(seconds, _unanswered)
        self._waiting.add(wait)
        try:
            async with _ended(wait):
                yield
        finally:
            self._waiting.discard(wait)

    async def work(self, long: bool, function: Callable[[], T]) -> T:
        """Return the result of a function that runs in a thread for long or for short requests."""
        pool = self._long if long else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, function)


@asynccontextmanager
async def _ended(wait: Wait) -> AsyncIterator[None]:
    """Raises the error of a wait that has ended."""
    try:
        async with wait.timeout:
            yield
    except TimeoutError:
        if not wait.timeout.expired():
            raise
        raise wait.error() from None
