"""The verifier's RPCs."""

from __future__ import annotations

from typing import Any

import grpc

from paceline.service import Gate, ServiceError, owner_of
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier.cache import CAPABILITY_BYTES, Cache
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Prefill
from paceline.verifier.model import ModelInfo
from paceline.verifier.rpc.errors import as_service_errors, cache_not_found
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.verifier.rpc.generate import GenerateStream
from paceline.verifier.rpc.messages import read_generation, write_result, write_top
from paceline.verifier.store import CacheNotFound, CacheStore
from paceline.verifier.telemetry import Telemetry


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The VerifierService of the protocol."""

    def __init__(
        self,
        model: ModelInfo,
        store: CacheStore,
        engine: Engine,
        gate: Gate,
        exchange: DraftExchangeServicer,
        telemetry: Telemetry,
    ) -> None:
        self._model = model
        self._store = store
        self._engine = engine
        self._gate = gate
        self._exchange = exchange
        self._telemetry = telemetry
        self._grammars = model.grammars()

    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse:
        """Describe the served model, and how busy the verifier is."""
        response = self._model.response(request)
        response.draining = self._gate.closed
        response.generations = self._store.unfinished
        response.drafter_services.extend(self._exchange.joined())
        return response

    async def CreateCache(self, request: verifier_pb2.CreateCacheRequest, context: Any) -> None:
        """Prefill a prompt; stream progress, then the capabilities and the first token."""
        with self._gate.enter(), as_service_errors():
            taps = self._exchange.taps(None if request.drafter == "none" else request.drafter)
            model = self._model.message
            generation = await read_generation(request, model, self._grammars, taps)
            owner = owner_of(context)
            parent = None
            if request.parent_handle:
                parent = self._find(request.parent_handle, owner).sequence
            cache = await self._store.admit(generation, owner)
            self._telemetry.admitted(cache)
            try:
                prefill = Prefill(cache.sequence)
                self._telemetry.report_prefill(cache, prefill, request.traceparent)
                cache.job = prefill
                self._engine.prefill(prefill, parent)
                await self._send_progress(prefill, context)
                await context.write(self._created(cache, prefill))
            except BaseException as error:  # cancelled too: the client has no handle
                await self._store.release(cache, type(error).__name__)
                raise
            self._store.renew(cache)

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        """Run the rounds of one cache and stream its tokens."""
        # Reads from the context, since the iterator of requests adds latency.
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        cache = self._find(first.start.handle, owner_of(context))
        stream = GenerateStream(cache, self._store, self._engine, self._telemetry)
        await stream.serve(first, context)

    async def RenewLease(
        self, request: verifier_pb2.RenewLeaseRequest, context: Any
    ) -> verifier_pb2.RenewLeaseResponse:
        """Renew the lease of a cache."""
        cache = self._find(request.handle, owner_of(context))
        return verifier_pb2.RenewLeaseResponse(
            lease_ms=self._model.message.lease_ms, epoch=cache.epoch
        )

    async def ReleaseCache(
        self, request: verifier_pb2.ReleaseCacheRequest, context: Any
    ) -> verifier_pb2.ReleaseCacheResponse:
        """Free a cache; returns when its memory is free."""
        try:
            cache = self._store.find(_checked(request.handle), owner_of(context))
        except CacheNotFound:
            return verifier_pb2.ReleaseCacheResponse(released=False)
        await self._store.release(cache)
        return verifier_pb2.ReleaseCacheResponse(released=True)

    def _find(self, handle: bytes, owner: str) -> Cache:
        try:
            return self._store.find(_checked(handle), owner)
        except CacheNotFound as error:
            raise cache_not_found() from error

    async def _send_progress(self, prefill: Prefill, context: Any) -> None:
        while not prefill.done:
            await prefill.updated()
            if not prefill.done:
                progress = verifier_pb2.PrefillProgress(
                    prefilled_tokens=prefill.sequence.committed, total_tokens=prefill.total
                )
                await context.write(verifier_pb2.CreateCacheResponse(progress=progress))
        if prefill.error is not None:
            raise prefill.error

    def _created(self, cache: Cache, prefill: Prefill) -> verifier_pb2.CreateCacheResponse:
        assert prefill.output is not None, "a prefill without an error has a first token"
        created = verifier_pb2.CacheCreated(
            handle=cache.handle,
            read_grant=cache.read_grant,
            first=write_result(prefill.output),
            reused_tokens=prefill.reused,
            epoch=cache.epoch,
            lease_ms=self._model.message.lease_ms,
            queue_us=prefill.queue_us,
            prefill_us=prefill.step_us,
            prompt_logprobs=[logprob for logprob, _ in prefill.prompt_logprobs],
        )
        if cache.sequence.generation.prompt_logprobs:
            created.top_prompt_logprobs.extend(write_top(top) for _, top in prefill.prompt_logprobs)
        return verifier_pb2.CreateCacheResponse(created=created)


def _checked(handle: bytes) -> bytes:
    if len(handle) != CAPABILITY_BYTES:
        raise ServiceError.invalid_argument(
            "BAD_HANDLE",
            f"the handle has {len(handle)} bytes, expected {CAPABILITY_BYTES}; send the one that "
            "CreateCache returned",
        )
    return handle
