"""Real service processes, started and stopped in every way."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.harness import ProcessFailed, ServiceProcess

from .conftest import serving


@pytest.fixture
def verifier(target: Path) -> ServiceProcess:
    return ServiceProcess("verifier", ["--target", str(target), "--kv-bytes", "64MiB"])


@pytest.fixture
def drafter() -> ServiceProcess:
    """The kind that starts at once: without weights it loads no torch."""
    return ServiceProcess("drafter", ["--load", "ngram"])


def test_it_serves_in_the_block_and_leaves_nothing(verifier: ServiceProcess) -> None:
    with verifier:
        assert serving(verifier.address)
        folder = verifier._ready_file.parent
        lines = [json.loads(line) for line in verifier.log_tail().splitlines()]
        assert any(line["message"] == "serving" for line in lines)
    assert verifier.returncode == 0
    assert not serving(verifier.address)
    assert not folder.exists()
    verifier.stop()


async def test_it_is_an_async_context_manager_too(drafter: ServiceProcess) -> None:
    async with drafter:
        assert serving(drafter.address)
    assert drafter.returncode == 0


def test_after_a_kill_it_restarts_at_the_same_address(short_folder: Path) -> None:
    with ServiceProcess(
        "drafter", ["--load", "ngram"], address=f"unix:{short_folder}/d"
    ) as drafter:
        address, pid = drafter.address, drafter.pid
        drafter.kill()
        assert drafter.returncode == -signal.SIGKILL
        assert not serving(address)
        drafter.start()
        assert drafter.address == address
        assert drafter.pid != pid
        assert serving(address)


def test_two_can_start_at_once_on_unix_sockets(short_folder: Path) -> None:
    names = [f"unix:{short_folder}/{index}.sock" for index in range(2)]
    processes = [ServiceProcess("drafter", ["--load", "ngram"], address=name) for name in names]
    try:
        for process in processes:
            process.spawn()
        for process in processes:
            process.wait_ready()
        assert [process.address for process in processes] == names
        assert all(serving(name) for name in names)
    finally:
        for process in processes:
            process.stop()


@pytest.mark.parametrize(
    ("arguments", "address", "message"),
    [
        (["--target", "/nowhere/at/all"], "127.0.0.1:0", "/nowhere/at/all"),
        ([], "127.0.0.1:0", "--target"),
        (["--target", "{target}"], "0.0.0.0:0", "without TLS and a token"),
        (["--target", "{target}"], "nonsense", "neither host:port"),
        (["--target", "{target}", "--threads", "0"], "127.0.0.1:0", "--threads"),
        (["--target", "{target}", "--kv-bytes", "x"], "127.0.0.1:0", "is not a size"),
        (["--target", "{target}", "--lease-seconds", "-1"], "127.0.0.1:0", "lease_seconds"),
        (["--target", "{target}", "--tls-cert", "c"], "127.0.0.1:0", "certificate and a key"),
        (["--target", "{target}", "--token-file", "/nowhere"], "127.0.0.1:0", "token file"),
    ],
)
def test_a_failed_start_reports_why_with_code_2(
    target: Path, arguments: list[str], address: str, message: str
) -> None:
    words = [word.format(target=target) for word in arguments]
    process = ServiceProcess("verifier", words, address=address)
    with pytest.raises(ProcessFailed, match="ended with code 2") as failed, process:
        pytest.fail("it started")
    assert message in str(failed.value)
    assert "Traceback" not in str(failed.value)


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        process = ServiceProcess("drafter", address=address)
        with pytest.raises(ProcessFailed, match=f"cannot listen on {address}"), process:
            pytest.fail("it started")


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = """
import time
from paceline.harness import ServiceProcess
process = ServiceProcess("drafter", ["--load", "ngram"]).start()
print(process.pid, flush=True)
time.sleep(3600)
"""
    # The killed parent leaves its folder behind.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        assert child.is_running()
        parent.kill()
        child.wait(60)
    assert not psutil.pid_exists(pid)


def test_a_process_that_was_never_started_is_an_error(drafter: ServiceProcess) -> None:
    for use in (lambda: drafter.address, lambda: drafter.pid, drafter.kill):
        with pytest.raises(RuntimeError, match="start"):
            use()
    drafter.stop()
