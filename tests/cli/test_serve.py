"""`paceline serve`: all services under one command."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import psutil
import pytest
from calls import eventually

from paceline.cli.main import main
from paceline.client import SyncClient
from paceline.harness import ServiceProcess
from paceline.harness.models import MODELS
from paceline.tokens import local_token
from paceline.v1 import exchange_pb2_grpc, verifier_pb2, verifier_pb2_grpc

from .conftest import FREE_PORTS, serving

DEMO_LM = Path(__file__).parents[2] / "models" / "demo" / "lm"
OPTION = "--no-prefix-caching"  # an option of the verifier
OF_GATEWAY = ("--cors-origin=http://a", "--cors-origin=http://b", "--max-requests=7", "--strict")


class Serve:
    def __init__(self, folder: Path, *arguments: str, shell: str = 'exec "$@"') -> None:
        self.ready = folder / "ready"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("sh", "-c", shell, "sh", sys.executable, "-m", "paceline.cli.main", "serve"),
                    *("--ready-file", str(self.ready)),
                    *("--verifier-address", f"unix:{folder}/v.sock"),
                    *("--drafter-address", f"unix:{folder}/d.sock"),
                    *("--gateway-address", f"unix:{folder}/g.sock"),
                    *arguments,
                ],
                stdout=log,
                stderr=log,
                # Where it is killed it leaves the folders of its children behind.
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def addresses(self) -> list[str]:
        """Of verifier, drafter and gateway, once they answer."""
        eventually(lambda: self.ready.exists() or self.process.poll() is not None, "it is ready")
        assert self.process.poll() is None, self.log.read_text()
        return self.ready.read_text().split()

    def command(self, kind: str) -> str:
        lines = self.log.read_text().splitlines()
        return next(line for line in lines if f"started: paceline {kind} " in line)

    def child(self, kind: str) -> psutil.Process:
        for each in psutil.Process(self.process.pid).children():
            with suppress(psutil.ZombieProcess):  # one that was killed, and is not reaped yet
                if kind in (each.name(), *each.cmdline()):
                    return each
        raise psutil.NoSuchProcess(0, kind)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def session_with(gateway: str) -> aiohttp.ClientSession:
    """A session with the gateway on a unix socket."""
    connector = aiohttp.UnixConnector(gateway.removeprefix("unix:"))
    return aiohttp.ClientSession("http://gateway", connector=connector)


def models_of(address: str) -> list[str]:
    """Names of the model and of its drafters, the default one first, as a gateway lists them."""

    async def ask() -> list[str]:
        async with session_with(address) as session, session.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
            return [card["id"], *card["drafters"]]

    return asyncio.run(ask())


def assert_others_are_refused(address: str) -> None:
    """Who cannot read the token that the services made can neither call nor join."""
    token = local_token(address)
    assert token is not None
    with grpc.insecure_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="bearer token"):
            stub.GetModel(verifier_pb2.GetModelRequest())
        own = [("authorization", f"Bearer {token}")]
        assert stub.GetModel(verifier_pb2.GetModelRequest(), metadata=own).name == "target0"
        join = exchange_pb2_grpc.DraftExchangeServiceStub(channel).Join(iter(()))
        with pytest.raises(grpc.RpcError, match="bearer token"):
            next(join)


@pytest.fixture
def serve(target: Path, short_folder: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*arguments: str, **settings: str) -> Serve:
        limits = ("--kv-bytes", "64MiB", "--log-level", "warning")
        started.append(Serve(short_folder, str(target), *limits, *arguments, **settings))
        return started[-1]

    yield start
    for running in started:
        running.close()


def two_free_ports() -> int:
    """The first one of two that follow each other."""
    while True:
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            other.bind(("127.0.0.1", port + 1))
            return port


def test_one_signal_ends_all(serve: Callable[..., Serve]) -> None:
    """Metrics of verifier and drafter are on ports next to each other."""
    port = two_free_ports()
    metrics = f"--metrics-address=127.0.0.1:{port}"
    drafters = ("--drafter", "ngram", "--drafter", "other=ngram")
    running = serve(*drafters, metrics, OPTION, *OF_GATEWAY, "--log-level=debug")
    addresses = running.addresses()
    assert len(addresses) == 3
    assert all(serving(address) for address in addresses[:2])
    assert models_of(addresses[2]) == ["target0", "local", "ngram", "other"]
    assert_others_are_refused(addresses[0])
    for offset, name in ((0, b"specdec_engine_steps_total"), (1, b"specdec_drafter_streams")):
        url = f"http://127.0.0.1:{port + offset}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert name in response.read()
    children = [running.child(kind) for kind in ("verifier", "drafter", "gateway")]
    assert OPTION in running.command("verifier")
    assert all("--device=auto" in running.command(kind) for kind in ("verifier", "drafter"))
    assert all(option in running.command("gateway") for option in OF_GATEWAY)
    log = running.log.read_text()
    assert "\nserving target0, drafters: ngram, other, local (ngram, grammar)\n" in log
    assert f"\ntry       curl --unix-socket {addresses[2].removeprefix('unix:')} http://" in log
    assert log.count("\nCtrl-C stops all\n") == 1
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(300) == 0, running.log.read_text()
    assert not any(child.is_running() for child in children)
    assert "ERROR" not in running.log.read_text()


def test_it_opens_the_page_and_starts_no_drafter_without_trained_ones(
    serve: Callable[..., Serve], short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = short_folder / "opened"
    browser = short_folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    running = serve("--open", "--gateway-address=127.0.0.1:0")
    _verifier, address = running.addresses()
    eventually(
        lambda: opened.exists() and opened.read_text() == f"http://{address}/\n", "it was opened"
    )
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as response:
        (card,) = json.load(response)["data"]
    assert card["drafters"] == ["local"]
    assert "\nserving target0, drafters: local (ngram, grammar)\n" in running.log.read_text()
    with pytest.raises(psutil.NoSuchProcess):
        running.child("drafter")
    body = {"model": card["id"], "prompt": [5, 6, 7, 8] * 8, "max_tokens": 32, "drafter": "local"}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] > 0


async def streamed(address: str, prompt: list[int], kill: Callable[[], None]) -> list[int]:
    """Token ids of a text from the gateway; ``kill`` is called while it streams."""
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": 200, "temperature": 0.7, "seed": 3, "ignore_eos": True,
    }  # fmt: skip
    token_ids: list[int] = []
    body |= {"stream": True, "stream_options": {"include_rounds": True}}
    async with session_with(address) as session:
        async with session.post("/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        for round_ in choice.get("rounds", ()):
                            token_ids += round_["token_ids"]
                    if len(token_ids) > 20:
                        kill()
    return token_ids


def test_what_dies_is_restarted_and_texts_go_on(serve: Callable[..., Serve]) -> None:
    """Streams through the gateway and of a client, while the verifier is killed under them."""
    running = serve("--drafter=ngram", "--max-context=512")
    verifier, drafter, gateway = running.addresses()
    first = running.child("drafter")
    first.kill()
    first.wait(60)
    eventually(lambda: serving(drafter), "the drafter serves")
    assert running.child("drafter").pid != first.pid
    lines = running.log.read_text().splitlines()
    assert lines[0].startswith("loading /")
    assert " MB, folder)" in lines[0]
    assert any(line.startswith("ready after ") for line in lines)
    assert any("the drafter died" in line for line in lines)
    killed: set[int] = set()

    def kill() -> None:
        if not killed:
            child = running.child("verifier")
            killed.add(child.pid)
            child.kill()

    def restarted() -> bool:
        with suppress(psutil.NoSuchProcess):
            return running.child("verifier").pid not in killed
        return False

    prompt = [5, 6, 7, 8]
    plain = asyncio.run(streamed(gateway, prompt, lambda: None))
    assert len(plain) == 200
    assert asyncio.run(streamed(gateway, prompt, kill)) == plain
    assert killed
    eventually(restarted, "the verifier is restarted")
    killed.clear()
    with SyncClient(verifier) as client:
        options = {"temperature": 0.7, "seed": 3, "max_new_tokens": 200, "ignore_eos": True}
        chunks: list[int] = []
        for chunk in client.stream(prompt, **options):
            chunks += chunk.token_ids
            kill()
    assert chunks == plain
    assert killed
    assert running.log.read_text().count("the verifier died") == 2
    children = psutil.Process(running.process.pid).children()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert not any(each.is_running() for each in children)


def test_a_verifier_that_dies_at_each_start_ends_the_command_and_its_texts(
    serve: Callable[..., Serve],
) -> None:
    running = serve("--drafter=ngram", "--max-context=512")
    gateway = running.addresses()[2]
    killed: list[int] = []

    def kill_new() -> bool:
        with suppress(psutil.NoSuchProcess):
            child = running.child("verifier")
            if child.pid not in killed:
                killed.append(child.pid)
                child.kill()
        return running.process.poll() is not None

    def kill() -> None:
        while not kill_new():
            time.sleep(0.01)

    body = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def failed() -> str:
        async with session_with(gateway) as session:
            async with session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                await asyncio.to_thread(kill)
                return (await response.content.read()).decode()

    rest = asyncio.run(failed())
    assert '"error"' in rest
    assert "the gateway has ended: no verifier answers" in rest
    assert running.process.wait(60) == 1
    assert len(killed) == 4
    assert "died 3 times in a row before it answered calls" in running.log.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--drafter", "lm:/nowhere"], "--drafter lm:/nowhere: there is no /nowhere"),
        (["--drafter", f"lm:{DEMO_LM}"], "its tokenizer is not that of"),
        (["--drafter", "none", "--drafter", "ngram"], "'none' is not a valid drafter name"),
        (["--drafter", "none", "--root", "."], "--root has no effect with --drafter none"),
        (["--lease-seconds", "-1"], "lease_seconds is -1.0"),
        (["--threads", "0"], "threads is 0"),
        (["--token-file", "/nowhere"], "cannot read the token file /nowhere"),
        (["--verifier-address", "0.0.0.0:0"], "without TLS and a token"),
        (["--gateway-address", "0.0.0.0:0"], "without TLS and a key"),
        (["--gateway-address", "nonsense"], "address 'nonsense' is neither"),
        (["--chat-template", "/nowhere"], "No such file or directory: '/nowhere'"),
        (["--metrics-address", "0.0.0.0:0"], "refusing to serve metrics"),
        (["--tls-cert", "x"], "TLS needs both a certificate and a key"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_starts(
    words: list[str],
    reason: str,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each option that the line advises is one of the command."""
    monkeypatch.setattr(ServiceProcess, "spawn", lambda _: pytest.fail("a service starts"))
    assert main(["serve", str(target), *FREE_PORTS, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline serve: ")
    assert reason in line
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = capsys.readouterr().out
    assert all(f"{option} " in known for option in re.findall(r"--[a-z-]+", line))


def test_a_damaged_model_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServiceProcess, "spawn", lambda _: pytest.fail("a service starts"))
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), *FREE_PORTS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline serve: cannot read {tmp_path / 'config.json'}: ")


@pytest.mark.slow
def test_one_may_load_what_is_in_the_working_folder(
    serve: Callable[..., Serve],
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a path from there, after the services have started; names of models are paths too.
    A drafter service starts where its device is named."""
    shutil.copytree(target, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    drafter = serve("--drafter-device=cpu").addresses()[1]
    assert main(["drafters", "load", "--address", drafter, "mine", "lm", "mine"]) == 0
    monkeypatch.setitem(MODELS, "named", SimpleNamespace(path=target / "config.json"))  # type: ignore[misc]
    words = ["layer", "longspec", "mine", "--option", "target=named"]
    assert main(["drafters", "load", "--address", drafter, *words]) == 1
    assert f"{target} is not below" not in capsys.readouterr().err
    assert main(["drafters", "load", "--address", drafter, "other", "lm", "/etc"]) == 1
    error = capsys.readouterr().err
    assert "/etc is not below a folder that drafters may be loaded from" in error
    assert "--root DIR" in error


def test_it_serves_with_closed_streams_and_beside_a_proxy(
    serve: Callable[..., Serve], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As daemons start it. All end when it is killed. A drafter service starts where the verifier
    does not look up texts."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    running = serve("--sources=grammar", *FREE_PORTS, shell='exec "$@" <&- >&- 2>&-')
    gateway = running.addresses()[2]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://{gateway}/health", timeout=60) as response:
        assert json.load(response)["drafters"]
    children = [running.child("verifier"), running.child("drafter")]
    running.process.kill()
    for child in children:
        child.wait(60)
        assert not child.is_running()


def test_the_drafter_trusts_the_verifiers_certificate_and_follows_it_to_the_cpu(
    serve: Callable[..., Serve], short_folder: Path
) -> None:
    """So that it joins the verifier over TLS. Ctrl-C ends it too."""
    cert, key = short_folder / "cert", short_folder / "key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
    files = ("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert)
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    own = (f"--tls-cert={cert}", f"--tls-key={key}", "--device=cpu")
    running = serve("--drafter=ngram", *own, "--log-level=debug")
    running.addresses()
    assert f"--verifier-tls-ca={cert}" in running.command("drafter")
    assert "\nserving target0, drafters: ngram, local" in running.log.read_text()
    assert all("--device=cpu" in running.command(kind) for kind in ("verifier", "drafter"))
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(300) == 0
