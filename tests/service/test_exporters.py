"""Export of spans by environment variables; no error in them stops a process."""

import os
import subprocess
import sys
from importlib.metadata import version
from socket import gethostname

import pytest

from paceline.telemetry.exporters import _exporter, _exporter_names, _provider

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    ("environment", "exporters"),
    [
        ({}, []),
        (ENDPOINT, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:1"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["console"]),
        ({"OTEL_TRACES_EXPORTER": " Console, otlp "}, ["console", "otlp"]),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, []),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, []),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": ""}, ["otlp"]),
    ],
)
def test_which_exporters(environment: dict[str, str], exporters: list[str]) -> None:
    assert _exporter_names(environment) == exporters


@pytest.mark.parametrize("protocol", ["", "grpc", "http/protobuf"])
def test_protocols(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = _exporter("otlp")
    assert (protocol or "grpc").partition("/")[0] in type(exporter).__module__
    exporter.shutdown()


def test_what_cannot_be_made_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert _provider("test", ["jaeger", "otlp"]) is None
    assert "to jaeger: OTEL_TRACES_EXPORTER must be otlp, console or none" in caplog.text
    assert "to otlp: the protocol is 'http/json'" in caplog.text


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
    tracer().start_span("hello").end()
"""


def test_console_writes_to_standard_error() -> None:
    done = run(SPAN, OTEL_TRACES_EXPORTER="console", OTEL_RESOURCE_ATTRIBUTES="zone=a")
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    for name in ('"name": "hello"', '"service.name": "my-service"', '"zone": "a"'):
        assert name in done.stderr
    for name in (f'"service.version": "{version("paceline")}"', f'"host.name": "{gethostname()}"'):
        assert name in done.stderr


def test_the_environment_names_the_service_and_the_sampler() -> None:
    console = {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "theirs"}
    assert '"service.name": "theirs"' in run(SPAN, **console).stderr
    none = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    done = run(SPAN, **console, **none)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_without_the_sdk_there_is_a_warning_and_no_tracer() -> None:
    program = "import sys\nsys.modules['opentelemetry'] = None\n" + SPAN.replace(
        'tracer().start_span("hello").end()', "print(tracer())"
    )
    done = run(program, **ENDPOINT)
    assert (done.stdout, done.returncode) == ("None\n", 0)
    assert "pip install 'paceline[telemetry]'" in done.stderr
