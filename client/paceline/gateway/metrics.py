"""Prometheus metrics of a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from paceline.client import VerifierStatus
from paceline.service import Gate
from paceline.telemetry.metrics import Metrics, Table

from .generation import TextEvent
from .models import Models

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

_OF_REQUESTS, _OF_CLIENT = Table(), Table()
_count, _spread = _OF_REQUESTS.counter, _OF_REQUESTS.histogram
_REQUESTS = _count(
    "specdec_gateway_requests",
    "Requests under /v1 that ended, by HTTP status; 499: the caller disconnected",
    "path", "status",
)  # fmt: skip
_REQUEST_SECONDS = _spread(
    "specdec_gateway_request_seconds", "Time from a request to the end of its response",
    _SECONDS, "path",
)  # fmt: skip
_FIRST_TOKEN = _spread(
    "specdec_gateway_time_to_first_token_seconds",
    "Time from the start of a text to its first token",
    _SECONDS,
)
_PROMPT = _count("specdec_gateway_prompt_tokens", "Tokens of the prompts of finished texts")
_WRITTEN = _count("specdec_gateway_generation_tokens", "Tokens sent to callers")
_TEXTS = _count("specdec_gateway_texts", "Texts that ended: stop or length", "finish_reason")
_FALLBACKS = _count(
    "specdec_gateway_fallbacks",
    "Failures of drafting, connections and verifiers that finished texts survived",
    "reason",
)
_OF_CLIENT.gauge(
    "specdec_gateway_requests_in_flight", "Requests in flight, from their head on",
    lambda it: it.gate.inside,
)  # fmt: skip
_OF_CLIENT.gauge(
    "specdec_gateway_verifier_state",
    "1 for the state of the verifier: serving, unavailable, refused",
    lambda it: {(verifier.address, verifier.state): 1 for verifier in it.verifiers()},
    "verifier", "state",
)  # fmt: skip
_OF_CLIENT.gauge(
    "specdec_gateway_verifier_texts_running", "Texts of this gateway that the verifier generates",
    lambda it: {verifier.address: verifier.running for verifier in it.verifiers()}, "verifier",
)  # fmt: skip


class GatewayMetrics(Metrics):
    """Metrics of requests. Not thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        super().__init__(registry, _OF_REQUESTS)

    def show(self, gate: Gate, models: Models) -> None:
        """Add the number of requests in flight, and the state of each verifier."""
        _ClientMetrics(self._registry, gate, models)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in a format that an `Accept` header names, and its content type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def ended(self, path: str, status: int, seconds: float) -> None:
        self.add(_REQUESTS, 1, path, str(status))
        self.add(_REQUEST_SECONDS, seconds, path)

    def text_counter(self) -> Callable[[TextEvent], None]:
        """Return a function that counts the events of one request."""
        began, started = time.perf_counter(), set[int]()

        def count(event: TextEvent) -> None:
            if event.chunk is not None:
                self.add(_WRITTEN, len(event.chunk.token_ids))
                if event.index not in started:
                    started.add(event.index)
                    self.add(_FIRST_TOKEN, time.perf_counter() - began)
            if event.result is not None:
                self.add(_TEXTS, 1, event.result.finish_reason)
                self.add(_PROMPT, event.result.usage.prompt_tokens)
                for reason, number in event.result.stats.fallbacks.items():
                    self.add(_FALLBACKS, number, reason)

        return count


class _ClientMetrics(Metrics):
    """The requests and the verifiers of all models, as they are when the metrics are read."""

    def __init__(self, registry: CollectorRegistry, gate: Gate, models: Models) -> None:
        self.gate, self._models = gate, models
        super().__init__(registry, _OF_CLIENT)

    def verifiers(self) -> list[VerifierStatus]:
        return [verifier for client in self._models.clients for verifier in client.verifiers()]
