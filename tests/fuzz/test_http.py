"""Random HTTP requests to a gateway before a real verifier and drafter, while a client generates.

PACELINE_FUZZ_REQUESTS is their number, PACELINE_FUZZ_SEED the seed.
"""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from http_requests import HttpFuzzer, Request
from openai import AsyncOpenAI
from tiny_models import write_model, write_tokenizer

from paceline.harness import ServiceProcess

REQUESTS = int(os.environ.get("PACELINE_FUZZ_REQUESTS", "100000"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
AT_A_TIME = 8
CALL_SECONDS = 120.0
# Time for the response to bytes that are no whole request. Most get none.
NO_ANSWER_SECONDS = 0.05
MAX_GROWTH = 96 << 20
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
ANSWERS = (200, 204, 400, 403, 404, 405, 413, 415, 417, 429)
"""Status codes of requests in valid HTTP."""


class Connection:
    """A connection to the gateway, opened again when the gateway closes it."""

    def __init__(self, address: str) -> None:
        self.host, self.port = address.split(":")
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def status(self, request: Request) -> str:
        """Send a request and read its response.

        Returns:
            Status and error code, or "none" if a broken request got no response.
        """
        if not request.whole:
            self.close()
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, int(self.port))
        reader, writer = self.streams
        writer.write(request.raw)
        limit = CALL_SECONDS if request.whole else NO_ANSWER_SECONDS
        try:
            async with asyncio.timeout(limit):
                return await self.response(reader, request)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            assert not request.whole, f"no answer to {request.raw!r}"
            return "none"
        finally:
            if not request.whole:
                self.close()

    async def response(self, reader: asyncio.StreamReader, request: Request) -> str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split()[1])
        if status == 100:
            return await self.response(reader, request)
        body = b""
        if "transfer-encoding: chunked" in head:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        elif "content-length:" in head and not request.head:
            body = await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        if "connection: close" in head:
            self.close()
        if request.head:
            return str(status)
        if "content-type: application/json" in head:
            return f"{status} {_checked(status, body.decode())}"
        if "content-type: text/event-stream" in head:
            codes = [
                _checked(200, line.removeprefix("data: "))
                for line in body.decode().splitlines()
                if line.startswith("data: {")
            ]
            return f"{status} {''.join(codes)}"
        return str(status)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


def _checked(status: int, text: str) -> str:
    """Check JSON of a response; returns the error's type and code."""
    value = json.loads(text, parse_constant=_no_number)
    error = value.get("error")
    if status >= 400:
        assert isinstance(error, dict), text
    if not isinstance(error, dict):
        return ""
    assert error["message"], text
    return f"{error['type']} {error['code']}"


def _no_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.slow
async def test_random_http_requests_do_no_harm(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "llama")
    write_tokenizer(tmp_path / "llama")
    (tmp_path / "template").write_text(TEMPLATE)
    target = ["--target", str(tmp_path / "llama"), "--weights", "float32", "--max-context", "256"]
    async with (
        ServiceProcess("verifier", [*target, "--kv-bytes", "64MiB"]) as verifier,
        ServiceProcess("drafter", ["--load=ngram", f"--verifier={verifier.address}"]) as drafter,
        ServiceProcess(
            "gateway",
            [
                *("--verifier-address", verifier.address),
                *("--chat-template", str(tmp_path / "template"), "--max-body", "64KiB"),
                *("--cors-origin", "*", "--retry-seconds", "60"),
            ],
        ) as gateway,
        AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="-", max_retries=0) as api,
    ):
        processes = (gateway, verifier, drafter)
        asked: dict[str, Any] = {"model": "llama", "prompt": "on and ", "max_tokens": 16, "seed": 1}
        expected = (await api.completions.create(**asked)).choices[0].text
        answers: Counter[str] = Counter()
        memory = list[list[int]]()
        left = REQUESTS

        async def fuzz(number: int) -> None:
            nonlocal left
            fuzzer, connection = HttpFuzzer(SEED * 1000 + number), Connection(gateway.address)
            while left > 0:
                left -= 1
                request = fuzzer.request()
                answer = await connection.status(request)
                answers[answer] += 1
                for process in processes:
                    assert process.returncode is None, (request.raw, process.log_tail())
                assert "server_error" not in answer, (request.raw, gateway.log_tail())
                if request.whole:
                    assert int(answer.split()[0]) in ANSWERS, (request.raw, gateway.log_tail())
            connection.close()

        async def generate() -> None:
            while left > 0:
                assert (await api.completions.create(**asked)).choices[0].text == expected
                if left < REQUESTS * (0.9 - 0.1 * len(memory)):
                    memory.append(
                        [psutil.Process(each.pid).memory_info().rss for each in processes]
                    )
                    print(f"{REQUESTS - left} requests", flush=True)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generate())
            for number in range(AT_A_TIME):
                tasks.create_task(fuzz(number))
        print(f"{answers.total()} requests:", *sorted(answers.items()), sep="\n")
        print("MiB of gateway, verifier, drafter:", *([b >> 20 for b in each] for each in memory))
        assert any(answer.startswith("200") for answer in answers), "nothing was tested"
        for first, last in zip(memory[0], memory[-1], strict=True):
            assert last - first < MAX_GROWTH
        for process in (gateway, drafter, verifier):
            assert process.terminate() == 0, process.log_tail()
