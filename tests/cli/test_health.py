"""`paceline health`, and the environment variables that name a deployment once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from paceline.cli.main import main
from paceline.harness import ServiceProcess


def test_a_serving_service(registry: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", registry.address]) == 0, "health requires no token"
    assert capsys.readouterr().out == f"{registry.address}: SERVING\n"


def test_an_unreachable_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "unix:/nowhere.sock", "--timeout", "60"]) == 1
    assert "unix:/nowhere.sock: UNAVAILABLE" in capsys.readouterr().err


def test_it_waits_for_a_service_that_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/late.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    assert main(["health", address]) == 1
    timer = threading.Timer(0.5, lambda: server.add_insecure_port(address) and server.start())
    timer.start()
    try:
        assert main(["health", address, "--wait", "60"]) == 0
    finally:
        timer.join()
        server.stop(None).wait()
    assert capsys.readouterr().out == f"{address}: SERVING\n"


def test_the_environment_sets_the_roots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_TLS_CA", "/nowhere.pem")
    assert main(["health", "127.0.0.1:1"]) == 2
    assert "/nowhere.pem" in capsys.readouterr().err


def test_the_environment_sets_address_and_token(
    registry: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("PACELINE_DRAFTER_ADDRESS", registry.address)
    assert main(["drafters", "list"]) == 1, "the service requires a token"
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(token))
    assert main(["drafters", "list"]) == 0
    monkeypatch.setenv("PACELINE_TOKEN", "wrong")
    assert main(["drafters", "list"]) == 1, "PACELINE_TOKEN overrides the file"
