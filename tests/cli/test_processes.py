"""Real service processes, started and stopped in every way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from distributions import write_distribution
from programs import PACELINE, run_python

from paceline.harness import ProcessFailed, ServiceProcess

from .conftest import serving


def test_it_serves_in_the_block_and_leaves_nothing(target: Path) -> None:
    verifier = ServiceProcess("verifier", ["--target", str(target), "--kv-bytes", "64MiB"])
    with verifier:
        assert serving(verifier.address)
        folder = verifier._ready_file.parent
        lines = [json.loads(line) for line in verifier.log_tail().splitlines()]
        assert any(line["message"] == "serving" for line in lines)
    assert verifier.returncode == 0
    assert not serving(verifier.address)
    assert not folder.exists()
    verifier.stop()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verifier --target /nowhere/at/all", "/nowhere/at/all"),
        ("verifier", "--target"),
        ("drafter --load x=ngram,no_such_option=1", "no_such_option"),
        (f"drafter --verifier-tls-ca {__file__}", "no PEM certificates"),
        (
            "serve {target} --gateway-address=none --drafter-address=127.0.0.1:0 "
            "--drafter=ngram,no_such_option=1",
            "no_such_option",
        ),
    ],
)
def test_a_failed_start_reports_why_with_code_2(target: Path, command: str, message: str) -> None:
    kind, *arguments = command.format(target=target).split()
    process = ServiceProcess(kind, arguments)  # type: ignore[arg-type]
    try:
        with pytest.raises(ProcessFailed, match="ended with code 2") as failed:
            process.start()
        assert message in process.phase or command == "verifier"  # its arguments are wrong
    finally:
        process.stop()
    assert message in str(failed.value)
    assert "Traceback" not in str(failed.value)


# A method whose load ends when somebody has written to a pipe.
WAITING = """
from paceline.drafter.methods.ngram import NgramDrafter

class Waiting(NgramDrafter):
    @classmethod
    def load(cls, folder, options, resources):
        open({pipe!r}, "rb").read()
"""


def test_a_signal_during_a_load_ends_a_drafter_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "waiting.py").write_text(WAITING.format(pipe=str(pipe)))
    write_distribution(tmp_path, {"waiting": "waiting:Waiting"})
    command = [sys.executable, "-m", "paceline.cli.main", "drafter", "--address", "127.0.0.1:0"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([*command, "--load=x=waiting"], env=environment) as process:
        descriptor = -1
        while descriptor < 0:
            assert process.poll() is None, "it ended before the load"
            with suppress(OSError):  # until the load has opened the other end
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.01)
        process.terminate()
        assert process.wait(timeout=30) == 0
        os.close(descriptor)


def test_a_process_that_was_never_started_is_an_error() -> None:
    drafter = ServiceProcess("drafter", ["--load", "ngram"])
    for use in (lambda: drafter.address, lambda: drafter.pid, drafter.kill):
        with pytest.raises(RuntimeError, match="start"):
            use()
    drafter.stop()


@contextmanager
def as_process_one(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`paceline` as the first process of a container, and its id outside; else a skip."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no PID namespace can be made here: {error}")
    command = [*unshare, sys.executable, "-m", "paceline.cli.main", *words]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        try:
            yield outer, int(found[0])
        finally:
            outer.kill()


def test_a_signal_ends_the_start_of_process_one(target: Path, tmp_path: Path) -> None:
    """The kernel ends it by no signal that it does not handle."""
    words = ("verifier", f"--target={target}", f"--address=unix:{tmp_path}/v")
    with as_process_one(tmp_path, *words) as (outer, inner):
        while outer.poll() is None:  # the first ones come before Python is there
            with suppress(ProcessLookupError):
                os.kill(inner, signal.SIGTERM)
            time.sleep(0.02)
        assert outer.returncode == 128 + signal.SIGTERM


def test_health_says_why_process_one_does_not_start(target: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/v"
    words = ("verifier", f"--target={target}", f"--address={address}", "--threads=0")
    with as_process_one(tmp_path, *words) as (outer, inner):
        assert outer.stderr is not None
        assert "cannot serve" in outer.stderr.readline()
        while not list(tmp_path.glob("paceline-failure")):
            time.sleep(0.01)
        done = run_python(*PACELINE, "health", address, environment={"TMPDIR": str(tmp_path)})
        assert done.returncode == 1
        assert "it does not start: --threads must be at least 1" in done.stderr
        os.kill(inner, signal.SIGTERM)
        assert outer.wait() == 2
