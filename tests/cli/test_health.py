"""`paceline health`, `paceline doctor`, and the variables that name a deployment once."""

import json
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health, health_pb2_grpc
from programs import PACELINE, run_python

from cli.test_main import run_client_only
from paceline.cli.main import main
from paceline.harness import ServiceProcess
from paceline.kernels import cpu_kernels


def test_a_serving_service(registry: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", registry.address]) == 0, "health requires no token"
    assert capsys.readouterr().out == f"{registry.address}: SERVING\n"


def test_it_waits_for_a_service_that_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/late.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    assert main(["health", address]) == 1
    assert f"{address}: UNAVAILABLE" in capsys.readouterr().err
    timer = threading.Timer(0.5, lambda: server.add_insecure_port(address) and server.start())
    timer.start()
    try:
        assert main(["health", address, "--wait", "60"]) == 0
    finally:
        timer.join()
        server.stop(None).wait()
    assert capsys.readouterr().out == f"{address}: SERVING\n"


def test_the_environment_sets_address_token_and_roots(
    registry: ServiceProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    monkeypatch.setenv("PACELINE_TLS_CA", "/nowhere.pem")
    assert main(["health", "127.0.0.1:1"]) == 2
    assert "/nowhere.pem" in capsys.readouterr().err


DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_the_machine_the_install_and_compiled_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert found["processor"]["cores"] == os.cpu_count()
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert found["missing"] == {}
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["kernels"]["level"] == cpu_kernels().level
    assert found["kernels"]["error"] == ""
    assert "no service starts" not in str(found["notes"])


def test_missing_kernels_are_noted(tmp_path: Path) -> None:
    without = {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    found = json.loads(run_python(*PACELINE, "doctor", "--json", environment=without).stdout)
    assert found["kernels"]["level"] == ""
    (note,) = (note for note in found["notes"] if "no service starts" in note)
    assert "Install gcc" in note
    assert "wheel" in note


def test_a_verifier_without_kernels_ends_with_one_error(tmp_path: Path) -> None:
    words = ("verifier", "--address=127.0.0.1:0", f"--target={DEMO / 'target'}")
    without = {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    done = run_python(*PACELINE, *words, environment=without)
    assert done.returncode == 2
    (error,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert "cannot serve: the CPU kernels are not compiled" in error
    assert "Traceback" not in done.stderr


def test_an_installation_of_the_client_alone() -> None:
    done = run_client_only("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "torch" in found["missing"]["server"]
    assert "kernels" not in found
    assert any("pip install 'paceline[server]'" in note for note in found["notes"])
