"""vLLM itself, with the proposer, and drafter services beside it: run by make vllm.

In float32, where vLLM's texts do not depend on how many rows a step has: in bfloat16 they do, with
its own n-gram drafts as with these (docs/vllm.md).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from calls import eventually

from paceline.harness import ServiceProcess
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

pytestmark = pytest.mark.vllm

START_SECONDS = 600.0
TOKENS = 64
PROMPTS = (
    "Explain why the sky is blue.",
    "Repeat: one two three four five six seven. One two three four five six seven.",
    "Write a story about a fox.",
    "List the months of the year, twice.",
    "How is bread baked?",
    "What is gravity?",
    "Name five rivers.",
    "Describe the sea.",
)


@pytest.fixture(scope="module")
def model() -> Path:
    command = [sys.executable, "-m", "paceline.cli.main", "fetch", "smollm2", "--format", "folder"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"SmolLM2 cannot be downloaded: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def vllm(
    model: Path, log: Path, speculative: dict[str, Any] | None, **variables: str
) -> Iterator[str]:
    process, url = begin(model, log, speculative, variables)
    try:
        try:
            eventually(lambda: answers(f"{url}/health", process, log), "it answers", START_SECONDS)
        except AssertionError:
            if process.poll() is None or "paceline/vllm/" in first_errors(log):
                raise
            # vLLM failed before anything that is tested here, which says nothing of the proposer.
            print(first_errors(log))
            end(process)
            process, url = begin(model, log, speculative, variables)
            eventually(lambda: answers(f"{url}/health", process, log), "it answers", START_SECONDS)
        yield url
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM's process, and its workers if they are left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def begin(
    model: Path, log: Path, speculative: dict[str, Any] | None, variables: dict[str, str]
) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM's process; returns it and its URL."""
    port = free_port()
    command = [
        *(os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "m", "--dtype", "float32"),
        *("--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-num-seqs", "16"),
    ]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        **{f"PACELINE_VLLM_{name.upper()}": value for name, value in variables.items()},
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **given},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return process, f"http://127.0.0.1:{port}"


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, first_errors(log)
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def first_errors(log: Path) -> str:
    """What a log says from its first error on. vLLM's last lines only say that a process ended,
    the first ones say why."""
    text = log.read_text(errors="replace")
    first = re.search(r"^.*(ERROR|Traceback|Fatal)", text, re.MULTILINE)
    return text[first.start() :][:6000] if first else text[-6000:]


def ask(
    url: str, prompt: str, tokens: int = TOKENS, seen: Callable[[int], object] | None = None
) -> str:
    """Stream a greedy answer by the official client; ``seen`` is called at each event, and ends the
    stream by a value that is true."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    parts: list[str] = []
    with client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as events:
        for number, event in enumerate(events):
            if seen is not None and seen(number):
                break
            parts += [choice.delta.content or "" for choice in event.choices]
    return "".join(parts)


def scraped(url: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    pattern = (
        r'specdec_num_accepted_tokens_total\{drafter="(.*)",model_name="m",version="(.*)"\} (.*)'
    )
    return {(name, version): float(value) for name, version, value in re.findall(pattern, text)}


@pytest.fixture(scope="module")
def texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with vllm(model, tmp_path_factory.mktemp("vllm") / "plain.log", None) as url:
        return [ask(url, prompt) for prompt in PROMPTS]


class Running:
    """vLLM with the proposer, and how drafter services join it."""

    def __init__(self, url: str, model: Path, log: Path) -> None:
        self.url, self.model, self.log = url, model, log
        self.address = self._served("serving address")
        self.metrics = f"http://{self._served('serving metrics address')}/metrics"

    def _served(self, what: str) -> str:
        """The address that the proposer says it serves at."""
        found = re.search(rf"{what}=(\S+)", self.log.read_text(errors="replace"))
        assert found is not None, first_errors(self.log)
        return found[1]

    def drafter(self, name: str) -> ServiceProcess:
        """A service with the drafter ``lm``: the same model in 4 bits, as chains."""
        spec = f"{name}=lm:{self.model},weights=int4,widths=1,depth=8"
        return ServiceProcess("drafter", ["--load", spec, "--verifier", self.address])

    def accepted(self, name: str, version: str = "1") -> float:
        """Accepted tokens of a drafter so far."""
        return scraped(self.metrics).get((name, version), 0.0)

    def joined(self) -> int:
        return self.log.read_text(errors="replace").count("a drafter service joined")


@pytest.fixture(scope="module")
def running(
    model: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("vllm") / "paceline.log"
    proposer = {
        "method": "custom_class",
        "model": "paceline.vllm.PacelineProposer",
        "num_speculative_tokens": 8,
    }
    with vllm(
        model,
        log,
        proposer,
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        draft="always",
        timeout="5",
    ) as url:
        yield Running(url, model, log)
    print("\n".join(line for line in log.read_text().splitlines() if "paceline." in line))


def test_vllm_keeps_its_texts_with_drafts_of_its_own(
    model: Path, texts: list[str], tmp_path: Path
) -> None:
    """The control: in this configuration vLLM's numbers do not depend on the rows of a step. Its
    own n-gram drafts change no text, one request at a time and eight at once."""
    own = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}
    with vllm(model, tmp_path / "own.log", own) as url, ThreadPoolExecutor(8) as pool:
        assert [ask(url, prompt) for prompt in PROMPTS[:4]] == texts[:4]
        assert list(pool.map(lambda prompt: ask(url, prompt), PROMPTS)) == texts


def test_look_up_alone_drafts(running: Running, texts: list[str]) -> None:
    assert [ask(running.url, prompt) for prompt in PROMPTS[:4]] == texts[:4]
    assert running.accepted("lookup", "") > 0


def test_drafts_of_a_service_are_accepted_and_change_no_text(
    running: Running, texts: list[str]
) -> None:
    before = running.joined()
    with running.drafter("first"):
        eventually(lambda: running.joined() > before, "it has joined")
        assert [ask(running.url, prompt) for prompt in PROMPTS] == texts
        assert running.accepted("first") > 100


def test_a_drafter_that_is_killed_in_mid_stream(running: Running, texts: list[str]) -> None:
    before = running.joined()
    with running.drafter("killed") as drafter:
        eventually(lambda: running.joined() > before, "it has joined")

        killed: list[int] = []

        def seen(number: int) -> None:
            if not killed and running.accepted("killed"):
                drafter.kill()
                killed.append(number)

        assert ask(running.url, PROMPTS[0], seen=seen) == texts[0]
        assert killed
        assert ask(running.url, PROMPTS[2]) == texts[2]


def test_versions_are_swapped_in_mid_stream_and_rolled_back(
    running: Running, texts: list[str]
) -> None:
    before = running.joined()
    with running.drafter("swapped") as drafter, grpc.insecure_channel(drafter.address) as channel:
        eventually(lambda: running.joined() > before, "it has joined")
        registry: Any = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        swapped: list[int] = []

        def load(version: str) -> None:
            request = drafter_pb2.LoadDrafterRequest(
                name="swapped", version=version, method="lm", folder=str(running.model)
            )
            request.options.update({"weights": "int4", "widths": "1", "depth": "8"})
            request.activate = True
            registry.LoadDrafter(request)

        def seen(number: int) -> bool:
            if not swapped and running.accepted("swapped", "1"):
                load("2")
                registry.UnloadDrafter(
                    drafter_pb2.UnloadDrafterRequest(name="swapped", version="1")
                )
                swapped.append(number)
            return bool(swapped) and running.accepted("swapped", "2") > 0

        # The stream is read no further while a version is loaded, and vLLM goes on.
        long = ask(running.url, PROMPTS[0], 900, seen)
        assert long.startswith(texts[0]) or texts[0].startswith(long)
        assert swapped
        assert running.accepted("swapped", "2") > 0
        load("3")
        assert ask(running.url, PROMPTS[2]) == texts[2]
        assert running.accepted("swapped", "3") > 0
        registry.RollbackDrafter(drafter_pb2.RollbackDrafterRequest(name="swapped"))
        newest = running.accepted("swapped", "3")
        assert ask(running.url, PROMPTS[4]) == texts[4]
        assert running.accepted("swapped", "3") == newest
