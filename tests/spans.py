"""A recorder of the spans that end in this process."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Recorder:
    """Spans of its tracer, those that ended first before others."""

    def __init__(self) -> None:
        provider, self._exporter = TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def record(monkeypatch: pytest.MonkeyPatch, function: str) -> Recorder:
    """Record a test's spans in place of a function ``tracer``, named with its module: a process can
    set its provider but once."""
    recorder = Recorder()
    monkeypatch.setattr(function, lambda: recorder.tracer)
    return recorder
