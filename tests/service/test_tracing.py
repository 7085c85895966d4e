"""Spans of single calls, and their export by environment variables, which stops no process."""

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from programs import run_python
from spans import Recorder, record

from paceline.telemetry.exporters import _exporter

from .conftest import Serve
from .toy import KINDS, ask

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def sent(flags: str = "01", trace_id: str = TRACE) -> dict[str, object]:
    return {"metadata": (("traceparent", f"00-{trace_id}-{PARENT}-{flags}"),)}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Spans of servers started in the test."""
    return record(monkeypatch, "paceline.service.runtime.tracer")


async def test_a_call_joins_its_callers_trace(serve: Serve, recorder: Recorder) -> None:
    served = await serve()
    async with served.channel() as channel:
        for kind in KINDS:  # streams have no span for all of them
            await ask(channel, kind, "hello", **sent())
    (span,) = recorder.spans
    assert span.name == "toy.Toy/UnaryUnary"
    assert span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    host, _, port = served.address.rpartition(":")
    assert dict(span.attributes or {}) == {
        "rpc.system.name": "grpc",
        "rpc.method": "toy.Toy/UnaryUnary",
        "rpc.response.status_code": "OK",
        "server.address": host,
        "server.port": int(port),
    }
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    "options",
    [{}, sent("00"), sent(trace_id="0" * 32), {"metadata": (("traceparent", "rubbish"),)}],
    ids=["none", "not sampled", "no trace", "malformed"],
)
async def test_calls_without_a_sampled_trace_have_no_span(
    serve: Serve, recorder: Recorder, options: dict[str, object]
) -> None:
    served = await serve()
    async with served.channel() as channel:
        for kind in KINDS:
            assert await ask(channel, kind, "hello", **options) == "hello"
    assert not recorder.spans


@pytest.mark.parametrize(
    ("order", "error", "code"),
    [
        ("fail", "FULL", "RESOURCE_EXHAUSTED"),
        ("bug", "KeyError", None),
        ("unbuilt", "NotImplementedError", None),
    ],
)
async def test_failures_are_failed_spans(
    serve: Serve, recorder: Recorder, order: str, error: str, code: str | None
) -> None:
    served = await serve()
    async with served.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, "UnaryUnary", order, **sent())
    (span,) = recorder.spans
    assert span.status.status_code is StatusCode.ERROR
    facts = span.attributes or {}
    assert (facts["error.type"], facts.get("rpc.response.status_code")) == (error, code)


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize("protocol", ["", "grpc", "http/protobuf"])
def test_protocols(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = _exporter("otlp")
    assert (protocol or "grpc").partition("/")[0] in type(exporter).__module__
    exporter.shutdown()


SPAN = """
from paceline.telemetry.exporters import traced
from paceline.telemetry.tracing import tracer
with traced("my-service"):
    tracer() and tracer().start_span("hello").end()
"""


@pytest.mark.parametrize(
    ("environment", "spans"),
    [
        ({}, 0),
        ({"OTEL_TRACES_EXPORTER": " Console, none "}, 1),
        ({"OTEL_TRACES_EXPORTER": "Console , console"}, 2),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, 0),
    ],
)
def test_the_environment_names_the_exporters(environment: dict[str, str], spans: int) -> None:
    done = run_python("-c", SPAN, environment=environment)
    assert (done.returncode, done.stderr.count('"name": "hello"')) == (0, spans), done.stderr


def test_what_cannot_be_made_is_warned_about() -> None:
    wrong = {"OTEL_TRACES_EXPORTER": "jaeger, otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    done = run_python("-c", SPAN, environment=wrong)
    assert done.returncode == 0
    assert "to jaeger: OTEL_TRACES_EXPORTER must be otlp, console or none" in done.stderr
    assert "to otlp: the protocol is 'http/json'" in done.stderr


def test_without_the_sdk_there_is_a_warning_and_no_tracer() -> None:
    program = "import sys\nsys.modules['opentelemetry'] = None\n" + SPAN.replace(
        'tracer() and tracer().start_span("hello").end()', "print(tracer())"
    )
    done = run_python("-c", program, environment=ENDPOINT)
    assert (done.stdout, done.returncode) == ("None\n", 0)
    assert "pip install 'paceline[telemetry]'" in done.stderr
