"""`paceline health`, `paceline doctor`, and the variables that name a deployment once."""

import json
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health, health_pb2_grpc

from cli.test_main import run_client_only
from paceline.cli.main import main
from paceline.harness import ServiceProcess
from paceline.kernels import cpu_kernels


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


DEMO = Path(__file__).parents[2] / "models" / "demo"


def doctor(*words: str, level: str = "", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "MAX_CPU_ISA" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "doctor", *words],
        env=environment | {"PACELINE_CPU_LEVEL": level} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts(level: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor("--json", level=level))
    return found


def test_the_machine_the_install_and_compiled_kernels() -> None:
    found = facts(cpu_kernels().level)
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
    found = json.loads(doctor("--json", **without))
    assert found["kernels"]["level"] == ""
    (note,) = (note for note in found["notes"] if "no service starts" in note)
    assert "Install gcc" in note
    assert "wheel" in note


def test_a_verifier_without_kernels_ends_with_one_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paceline.cli.main", "verifier", "--address=127.0.0.1:0"),
            f"--target={DEMO / 'target'}",
        ],
        env=os.environ | {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (error,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert "cannot serve: the CPU kernels are not compiled" in error
    assert "Traceback" not in done.stderr


def test_an_unsupported_level_is_a_note() -> None:
    assert "no service starts: PACELINE_CPU_LEVEL is 'mmx'" in doctor(level="mmx")


def test_an_installation_of_the_client_alone() -> None:
    done = run_client_only("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "torch" in found["missing"]["server"]
    assert "kernels" not in found
    assert any("pip install 'paceline[server]'" in note for note in found["notes"])
