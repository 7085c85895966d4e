"""Reports the engine's jobs as metrics and spans."""

from __future__ import annotations

from functools import partial
from time import time_ns
from typing import TYPE_CHECKING

from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import add_server_span
from paceline.verifier.cache import Cache
from paceline.verifier.engine.job import Job, Prefill, Round
from paceline.verifier.engine.output import StepOutput, merge

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

    from paceline.verifier.metrics import VerifierMetrics


class Telemetry:
    """Reports jobs to metrics and a tracer, as far as the verifier has them.

    Used on the event loop. A job is reported when it is done, after its answer was sent.
    """

    def __init__(self, metrics: VerifierMetrics | None, tracer: Tracer | None) -> None:
        self._metrics = metrics
        self._tracer = tracer

    def admitted(self, cache: Cache) -> None:
        """Report the start of a generation."""
        if self._metrics is not None:
            self._metrics.admitted(cache)

    def report(self, cache: Cache, job: Job, traceparent: str) -> None:
        """Report a new job once it is done; `traceparent` is its caller's."""
        if self._metrics is not None or self._tracer is not None:
            job.on_done = partial(self._done, cache, job, traceparent, time_ns())

    def _done(self, cache: Cache, job: Job, traceparent: str, began_ns: int) -> None:
        if self._metrics is not None:
            if isinstance(job, Prefill):
                self._metrics.prefilled(cache, job)
            elif isinstance(job, Round):
                self._metrics.answered(cache, job)
        if self._tracer is not None and traceparent:
            name = Span.VERIFIER_PREFILL if isinstance(job, Prefill) else Span.VERIFIER_ROUND
            attributes = {**_attributes(job), Attribute.CACHE_GENERATION: cache.generation}
            add_server_span(self._tracer, name, traceparent, began_ns, attributes, job.error)


def _attributes(job: Job) -> dict[str, int]:
    if isinstance(job, Prefill):
        return {
            Attribute.INPUT_TOKENS: job.total,
            Attribute.REUSED_TOKENS: job.reused,
            Attribute.QUEUE_US: job.queue_us,
            Attribute.COMPUTE_US: job.step_us,
        }
    assert isinstance(job, Round), "jobs are prefills or rounds"
    output = merge(job.outputs) if job.outputs else StepOutput([])
    return {
        Attribute.ROUND_ID: job.number,
        Attribute.NUM_DRAFT_TOKENS: job.drafted,
        Attribute.NUM_ACCEPTED: len(output.accepted),
        Attribute.NUM_EMITTED: len(output.tokens),
        Attribute.QUEUE_US: output.queue_us,
        Attribute.COMPUTE_US: output.step_us,
        Attribute.BATCH_TOKENS: output.batch_tokens,
    }
