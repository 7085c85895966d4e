"""Commands in any environment: streams that are closed or that nobody reads, few open files,
proxies, other encodings, folders that cannot be written."""

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import progress
from paceline.cli.environment import MIN_FILES, prepared
from paceline.harness import ServiceProcess

PACELINE = (sys.executable, "-m", "paceline.cli.main")
UNREACHABLE = "http://127.0.0.1:9"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY")
PROXIES = {**dict.fromkeys(NAMES, UNREACHABLE), "no_proxy": "", "NO_PROXY": ""}
CLOSED = "<&- >&- 2>&-"


@pytest.fixture(scope="module")
def address(target: Path) -> Iterator[str]:
    arguments = ["--target", str(target), "--kv-bytes", "64MiB", "--schedule", "off"]
    with ServiceProcess("verifier", arguments) as verifier:
        yield verifier.address


def run(
    *words: str, shell: str = "", environment: dict[str, str] | None = None, stdout: int = -1
) -> "subprocess.CompletedProcess[str]":
    """Runs `paceline`; `shell` are redirections, or commands before it. Its errors come without the
    lines that a slow machine adds, of what is waited for."""
    before, _, after = shell.rpartition(";")
    done = subprocess.run(
        ["sh", "-c", f'{before or ":"}; exec "$@" {after}', "sh", *PACELINE, *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )
    done.stderr = re.sub(r"^.*: [0-9]+ s so far\n", "", done.stderr, flags=re.MULTILINE)
    return done


def generate(address: str, *words: str) -> tuple[str, ...]:
    services = ("--verifier-address", address, "--retry-seconds", "20")
    return ("generate", *services, "--drafter", "none", "--max-tokens", "3", *words)


def test_standard_streams_may_be_closed(address: str) -> None:
    """As daemons start processes: the event loop aborts where it gets their descriptors."""
    done = run(*generate(address, "hello"), shell=CLOSED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert run("chat", "--verifier-address", address, shell=CLOSED).returncode == 0
    done = run(*generate(address, "-"), shell="<&-")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "standard input is empty" in done.stderr


@pytest.mark.parametrize(("command", "files"), [("generate", 16), ("serve", 32)])
def test_too_few_open_files_are_a_message(command: str, files: int, target: Path) -> None:
    done = run(command, str(target), shell=f"ulimit -n {files};")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"may open {files} files, and needs at least {MIN_FILES}" in done.stderr


def test_a_low_limit_is_raised(address: str) -> None:
    done = run(*generate(address, "hello"), shell=f"ulimit -Sn 16; ulimit -Hn {MIN_FILES};")
    assert done.returncode == 0, done.stderr


def test_no_proxy_is_asked_for_addresses_of_this_machine(address: str) -> None:
    for host in ("localhost", "ipv4:127.0.0.1"):
        there = address.replace("127.0.0.1", host)
        done = run(*generate(there, "hello"), environment=PROXIES)
        assert done.returncode == 0, done.stderr
    assert run("health", address, environment=PROXIES).returncode == 0


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({"https_proxy": "x"}, "localhost,127.0.0.1,127.0.0.0/8,::1"),
        ({"HTTP_PROXY": "x", "NO_PROXY": "a,b"}, "a,b,localhost,127.0.0.1,127.0.0.0/8,::1"),
        ({"http_proxy": "x", "no_proxy": "*"}, "*"),
        ({}, None),
    ],
)
def test_libraries_of_a_command_bypass_proxies(
    environment: dict[str, str], left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*PROXIES, *map(str.upper, PROXIES)}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with prepared():
        assert os.environ.get("no_proxy") == left
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_characters_that_the_output_lacks_are_replaced(encoding: str) -> None:
    script = """
from paceline.cli.environment import prepared
from paceline.cli.output import Output
with prepared():
    print("a日b")
    Output().out("a日b")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.decode(encoding) == 2 * ("a日b\n" if encoding == "utf-8" else "a?b\n")


@pytest.mark.parametrize("words", [["--help"], ["generate"]], ids=" ".join)
def test_output_that_nobody_reads_ends_a_command_quietly(words: list[str], address: str) -> None:
    """With the status of a program that the signal of a closed pipe ends."""
    if words[0] == "generate":
        words = [*generate(address, "hello")]
    reading, writing = os.pipe()
    os.close(reading)
    for unbuffered in ("", "1"):
        done = run(*words, stdout=writing, environment={"PYTHONUNBUFFERED": unbuffered})
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writing)


def test_a_full_disk_is_a_message(address: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = run(*generate(address, "hello"), shell=">/dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "No space left" in done.stderr


def test_the_users_folders_need_not_exist(address: str) -> None:
    environment = {"XDG_CACHE_HOME": "", "XDG_RUNTIME_DIR": "/proc/no", "TMPDIR": "/proc"}
    done = run(*generate(address, "hello"), shell="HOME=/proc;", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_terminal_lines_come_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    said: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    with progress.waiting(lambda: f"step {len(said)}", say):
        assert twice.wait(60)
    assert said[:2] == ["step 0: 0 s so far", "step 1: 0 s so far"]


def test_what_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.waiting(lambda: "a moment"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    with progress.waiting(lambda: "reading [the] weights"):
        pass
    assert "reading [the] weights" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue(), "the line is cleared"
