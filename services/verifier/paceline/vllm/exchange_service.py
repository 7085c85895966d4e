"""DraftExchangeService beside an engine that is not ours, on an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from paceline.service import OptionsError, ServerOptions, limits, run_server
from paceline.service.tasks import keep_running
from paceline.telemetry.exporters import traced
from paceline.v1 import exchange_pb2, exchange_pb2_grpc, verifier_pb2
from paceline.verifier.engine.drafting import Drafting
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.vllm.drafting_lock import DraftingLock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)

# Time between two looks at ended texts and broken connections while no step runs.
_TIDY_SECONDS = 0.5

_START_SECONDS = 30.0


class ExchangeService:
    """DraftExchangeService alone (paceline.service.Service)."""

    service_names = ("paceline.v1.DraftExchangeService",)
    message_bytes = {"/paceline.v1.DraftExchangeService/Join": limits.FRAME_BYTES}  # noqa: RUF012

    def __init__(
        self,
        model: verifier_pb2.GetModelResponse,
        lock: DraftingLock,
        tidy: Callable[[Drafting], None],
        review: Callable[[exchange_pb2.DrafterList], None],
        *,
        path: str | None,
        needs_token: bool,
    ) -> None:
        """Serve a model; ``tidy`` is called now and then between two steps. The others are as of
        :class:`paceline.verifier.rpc.exchange.DraftExchangeServicer`."""
        self._model, self._lock, self._tidy = model, lock, tidy
        self._exchange = DraftExchangeServicer(
            model, lock, None, path, needs_token=needs_token, review=review
        )
        self._tidying: asyncio.Task[None] | None = None

    def joined(self) -> list[verifier_pb2.JoinedService]:
        """Return the drafter services that have joined, in order."""
        return self._exchange.joined()

    def facts(self) -> dict[str, object]:
        """Return the model."""
        return {"model": self._model.name, "tokenizer": self._model.tokenizer_digest}

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer to a server."""
        add: Any = exchange_pb2_grpc.add_DraftExchangeServiceServicer_to_server
        add(self._exchange, server)

    async def start(self) -> None:
        """Open the socket for drafter services on this host."""
        await self._exchange.start()
        self._tidying = keep_running("the look at ended texts", self._keep_tidy)

    async def fault(self) -> None:
        """Wait for ever: nothing here ends the engine."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """End all connections."""
        self._exchange.end()

    async def stop(self) -> None:
        """Close the socket."""
        if self._tidying is not None:
            self._tidying.cancel()
            with suppress(asyncio.CancelledError):
                await self._tidying
        await self._exchange.stop()

    async def _keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_SECONDS)
            self._lock.drafting(self._tidy)


def serve(
    service: ExchangeService, options: ServerOptions, registry: CollectorRegistry | None, name: str
) -> str:
    """Serve for the rest of the process, on a thread of its own; ``name`` is the service's name in
    traces. Returns the bound address. Raises ``OptionsError`` if it cannot be served."""
    ready: Future[str] = Future()

    def run() -> None:
        stop = asyncio.Event()
        try:
            with traced(name):
                asyncio.run(
                    run_server(
                        service,
                        options,
                        metrics=registry,
                        on_ready=ready.set_result,
                        stop_event=stop,
                    )
                )
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            _log.exception("drafter services cannot join any more")

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return ready.result(_START_SECONDS)
    except TimeoutError:
        raise OptionsError(f"{options.address} is not served after {_START_SECONDS:g} s") from None
