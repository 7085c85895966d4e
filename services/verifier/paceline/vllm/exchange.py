"""Serves DraftExchangeService in vLLM's process, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from paceline.service import OptionsError, ServerOptions, ServiceError, limits, run_server
from paceline.service.tasks import keep_running
from paceline.telemetry.exporters import traced
from paceline.v1 import exchange_pb2, exchange_pb2_grpc, verifier_pb2
from paceline.verifier.engine.drafting import Drafting
from paceline.verifier.engine.drafting_lock import DraftingLock
from paceline.verifier.rpc.exchange import DraftExchangeServicer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)

_TIDY_SECONDS = 0.5
"""Time between two looks at ended texts and broken connections while vLLM runs no step."""

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
        *,
        path: str | None,
        needs_token: bool,
    ) -> None:
        """Serve a model; ``tidy`` is called now and then between two steps."""
        self._model, self._lock, self._tidy = model, lock, tidy
        self._exchange = DraftExchangeServicer(
            model, lock, None, path, needs_token=needs_token, review=self._review
        )
        self._tidying: asyncio.Task[None] | None = None

    def joined(self) -> list[verifier_pb2.JoinedService]:
        """The drafter services that have joined, in order."""
        return self._exchange.joined()

    def facts(self) -> dict[str, object]:
        """The model."""
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
        """Nothing here ends vLLM."""
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

    def _review(self, drafters: exchange_pb2.DrafterList) -> None:
        """Leave out drafters that vLLM cannot use. Raises ``ServiceError``: the default is one."""
        usable, reasons = [], {}
        for each in drafters.drafters:
            if (error := self._fault_of(each)) is None:
                usable.append(each)
            else:
                reasons[each.name] = error
        if drafters.default_drafter in reasons or (reasons and not usable):
            raise reasons.get(drafters.default_drafter) or next(iter(reasons.values()))
        for error in reasons.values():
            _log.warning("a drafter is not used: %s", error.message)
        del drafters.drafters[:]
        drafters.drafters.extend(usable)

    def _fault_of(self, drafter: Any) -> ServiceError | None:
        """Why a drafter cannot be used; None: it can."""
        own, name = self._model.tokenizer_digest, drafter.name
        if own and drafter.tokenizer_digest and drafter.tokenizer_digest != own:
            return ServiceError.failed_precondition(
                "TOKENIZER_MISMATCH",
                f"drafter {name!r} has the tokenizer {drafter.tokenizer_digest[:80]}, the model of "
                f"this vLLM has {own}; choose a drafter with the model's tokenizer",
            )
        reads = "hidden states" if drafter.hidden_state_layers else ""
        reads = "KV" if drafter.reads_kv or drafter.kv_policy else reads
        if reads:
            return ServiceError.failed_precondition(
                "TOKENS_ONLY",
                f"drafter {name!r} ({drafter.method[:80]}) reads the target's {reads}, and vLLM "
                "gives a proposer tokens alone; use a method such as lm or ngram",
            )
        return None


def serve(
    service: ExchangeService, options: ServerOptions, registry: CollectorRegistry | None
) -> str:
    """Serve for the rest of the process, on a thread of its own. Returns the bound address. Raises
    ``OptionsError``: it cannot be served."""
    ready: Future[str] = Future()

    def run() -> None:
        stop = asyncio.Event()
        try:
            with traced("paceline-vllm"):
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

    threading.Thread(target=run, name="paceline-vllm", daemon=True).start()
    try:
        return ready.result(_START_SECONDS)
    except TimeoutError:
        raise OptionsError(f"{options.address} is not served after {_START_SECONDS:g} s") from None
