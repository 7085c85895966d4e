"""Prometheus metrics of a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from paceline.client import Client
from paceline.service import Gate
from paceline.telemetry.names import Metric

from .generation import TextEvent

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class GatewayMetrics:
    """Metrics of requests. Not thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=_SECONDS)
        self._requests = counter(
            Metric.GATEWAY_REQUESTS,
            "Requests under /v1 that ended, by HTTP status; 499: the caller disconnected",
            ("path", "status"),
        )
        self._seconds = seconds(
            Metric.GATEWAY_REQUEST_SECONDS,
            "Time from a request to the end of its response",
            ("path",),
        )
        self._first = seconds(
            Metric.GATEWAY_FIRST_TOKEN_SECONDS, "Time from the start of a text to its first token"
        )
        self._prompt = counter(
            Metric.GATEWAY_PROMPT_TOKENS, "Tokens of the prompts of finished texts"
        )
        self._written = counter(Metric.GATEWAY_GENERATION_TOKENS, "Tokens sent to callers")
        self._texts = counter(
            Metric.GATEWAY_TEXTS, "Texts that ended: stop or length", ("finish_reason",)
        )
        self._fallbacks = counter(
            Metric.GATEWAY_FALLBACKS,
            "Failures of drafting, connections and verifiers that finished texts survived",
            ("reason",),
        )

    def show(self, gate: Gate, client: Client) -> None:
        """Adds the number of requests in flight, and the state of each verifier."""
        self._registry.register(_Verifiers(client))
        Gauge(
            Metric.GATEWAY_IN_FLIGHT,
            "Requests in flight, from their head on",
            registry=self._registry,
        ).set_function(lambda: gate.inside)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics in a format that an `Accept` header names, and its content type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def ended(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text_counter(self) -> Callable[[TextEvent], None]:
        """A function that counts the events of one request."""
        began, started = time.perf_counter(), set[int]()

        def count(event: TextEvent) -> None:
            if event.chunk is not None:
                self._written.inc(len(event.chunk.token_ids))
                if event.index not in started:
                    started.add(event.index)
                    self._first.observe(time.perf_counter() - began)
            if event.result is not None:
                self._texts.labels(event.result.finish_reason).inc()
                self._prompt.inc(event.result.usage.prompt_tokens)
                for reason, number in event.result.stats.fallbacks.items():
                    self._fallbacks.labels(reason).inc(number)

        return count


class _Verifiers(Collector):
    """The verifiers of a client, as they are when the metrics are read."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields a value for each verifier. Runs on the endpoint's thread."""
        state = GaugeMetricFamily(
            Metric.GATEWAY_VERIFIER_STATE,
            "1 for the state of the verifier: serving, unavailable, refused",
            labels=["verifier", "state"],
        )
        texts = GaugeMetricFamily(
            Metric.GATEWAY_VERIFIER_TEXTS,
            "Texts of this gateway that the verifier generates",
            labels=["verifier"],
        )
        for verifier in self._client.verifiers():
            state.add_metric([verifier.address, verifier.state], 1)
            texts.add_metric([verifier.address], verifier.running)
        yield state
        yield texts
