"""Requests that cost more than others: the text of another user goes on beside each of them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from .slow_gateway import TEXT

USER = {"role": "user", "content": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": ""}
TOOL = {"type": "function", "function": {"name": "f"}}


def asked(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 1, **fields}, separators=(",", ":")).encode()


def chat(**fields: Any) -> bytes:
    return asked(**{"messages": [USER], **fields})


def names(count: int) -> dict[str, int]:
    return {f"u{index}": 1 for index in range(count)}


ATTACKS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "empty tools": lambda: ("chat/completions", chat(tools=[{}] * 80_000)),
    "tools": lambda: (
        "chat/completions",
        chat(tools=[TOOL] * 2000, tool_choice={"function": {"name": "f"}}),
    ),
    "required tools": lambda: (
        "chat/completions",
        chat(
            tools=[
                {"function": {"name": f"f{i}", "parameters": {"a": [{}] * 9}}} for i in range(999)
            ],
            tool_choice="required",
            n=4,
        ),
    ),
    "messages": lambda: ("chat/completions", chat(messages=[USER] * 90_000)),
    "parts": lambda: ("chat/completions", chat(messages=[{**USER, "content": [PART] * 90_000}])),
    "calls": lambda: (
        "chat/completions",
        chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 40_000}]),
    ),
    "chat's variables": lambda: ("chat/completions", chat(chat_template_kwargs=names(60_000))),
    "prompts": lambda: ("completions", b'{"prompt":[' + b'"",' * 999_999 + b'""]}'),
    "depth": lambda: ("completions", b'{"metadata":' + b"[" * 1_500_000 + b"]" * 1_500_000 + b"}"),
    "a long prompt": lambda: ("completions", asked(prompt="ab c" * 100_000)),
    "an echo": lambda: ("completions", asked(prompt="ab c" * 9000, echo=True, logprobs=20)),
    "a text without an end": lambda: ("completions", b'{"prompt":"' + b'\\"' * 2_000_000),
    "biases": lambda: ("completions", asked(prompt="a", logit_bias=names(140_000))),
    "stop strings": lambda: ("completions", asked(prompt="a", stop=["a"] * 700_000)),
    "long stop strings": lambda: ("completions", asked(prompt="a", stop=["a" * 200_000] * 16)),
    "choices": lambda: ("completions", asked(prompt="a", guided_choice=["a"] * 700_000)),
    "a schema for each text": lambda: (
        "completions",
        asked(prompt=["a"] * 64, guided_json={"enum": ["x" * 30] * 9000}),
    ),
    "unknown fields": lambda: ("completions", asked(prompt="a", **names(60_000))),
    "a long name": lambda: ("completions", asked(prompt="a", model="x" * 3_000_000)),
}


@dataclass
class Attacked:
    url: str
    process: psutil.Process

    async def stream(self, session: aiohttp.ClientSession) -> str:
        body = {"prompt": "a", "max_tokens": 2000, "stream": True}
        text = ""
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def post(self, session: aiohttp.ClientSession, path: str, content: bytes) -> int:
        """Status of the answer, which is in OpenAI's form and short if it is an error."""
        headers = {"Content-Type": "application/json"}
        url = f"{self.url}/v1/{path}"
        async with session.post(url, data=content, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
                assert len(answer) < 10_000
                assert len(str(response.headers)) < 10_000
            return response.status


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    script = Path(__file__).with_name("slow_gateway.py")
    path = os.pathsep.join([str(script.parents[1]), *sys.path])
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdin is not None
        url = gateway.stdout.readline().decode().strip()
        yield Attacked(url, psutil.Process(gateway.pid))
        gateway.stdin.close()
        assert gateway.wait(60) == 0


@pytest.mark.parametrize("name", ATTACKS)
async def test_texts_of_others_go_on(attacked: Attacked, name: str) -> None:
    path, content = ATTACKS[name]()
    async with aiohttp.ClientSession() as session:
        before = attacked.process.memory_info().rss
        attack = asyncio.create_task(attacked.post(session, path, content))
        while not attack.done():
            assert await attacked.stream(session) == TEXT
        assert await attack in (200, 400)
        assert await attacked.stream(session) == TEXT
        assert attacked.process.memory_info().rss < 2 * before
