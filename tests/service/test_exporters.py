"""Export of spans by environment variables; no error in them stops a process."""

import os
import subprocess
import sys

import pytest

from paceline.telemetry.exporters import _exporter

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize("protocol", ["", "grpc", "http/protobuf"])
def test_protocols(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = _exporter("otlp")
    assert (protocol or "grpc").partition("/")[0] in type(exporter).__module__
    exporter.shutdown()


def run(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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
    done = run(SPAN, **environment)
    assert (done.returncode, done.stderr.count('"name": "hello"')) == (0, spans), done.stderr


def test_what_cannot_be_made_is_warned_about() -> None:
    wrong = {"OTEL_TRACES_EXPORTER": "jaeger, otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    done = run(SPAN, **wrong)
    assert done.returncode == 0
    assert "to jaeger: OTEL_TRACES_EXPORTER must be otlp, console or none" in done.stderr
    assert "to otlp: the protocol is 'http/json'" in done.stderr


def test_without_the_sdk_there_is_a_warning_and_no_tracer() -> None:
    program = "import sys\nsys.modules['opentelemetry'] = None\n" + SPAN.replace(
        'tracer() and tracer().start_span("hello").end()', "print(tracer())"
    )
    done = run(program, **ENDPOINT)
    assert (done.stdout, done.returncode) == ("None\n", 0)
    assert "pip install 'paceline[telemetry]'" in done.stderr
