"""A collector that keeps the spans it gets over OTLP; as a program, `collector.py HOST:PORT`, it
prints them, one JSON object a line."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Received:
    name: str
    service: str
    kind: str
    trace: str
    span: str
    parent: str
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes OTLP over gRPC; `spans` are those received so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.address = ""
        self.received = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self.received:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_received(span, service) for span in scope.spans]
            self.received.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process export to it, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def wait(self, enough: Callable[[list[Received]], bool], seconds: float | None = 120.0) -> None:
        with self.received:
            came = self.received.wait_for(lambda: enough(self.spans), seconds)
        assert came, [span.name for span in self.spans]


@contextmanager
def collecting(address: str = "127.0.0.1:0") -> Iterator[Collector]:
    """A collector, on a free port of the loopback unless told otherwise."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    host = address.rpartition(":")[0]
    collector.address = f"{host}:{server.add_insecure_port(address)}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _received(span: trace_pb2.Span, service: str) -> Received:
    return Received(
        name=span.name,
        service=service,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind) if kind else None

    return {pair.key: value(pair.value) for pair in pairs}


def main() -> None:
    with collecting(sys.argv[1]) as collector:
        printed = 0
        while True:
            collector.wait(lambda spans: len(spans) > printed, seconds=None)  # noqa: B023
            for span in collector.spans[printed:]:
                print(json.dumps(asdict(span)), flush=True)
                printed += 1


if __name__ == "__main__":
    main()
