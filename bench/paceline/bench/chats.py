"""`paceline bench chats`: what users of a chat notice, beside llama.cpp's server.

First tokens of three turns behind a long file, the rate of eight users, and memory by the number of
chats that run. Both servers are used by OpenAI's chat interface, as they come, prompt caches on.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import texts_of
from paceline.bench.record import Results, make_console
from paceline.bench.services import gateway
from paceline.bench.table.engines import ServedModel, connect, threads

_TURNS = ("What is this about?", "What is its most important part?", "Say that in one sentence.")
_FILE_CHARACTERS = 11_000
"""Of the long file: 3,000 tokens or a few more."""
_USERS = 8
_RUNNING = (1, 8, 32)
_CHAT_TOKENS = 300


class RunningServer:
    """A server that answers.

    Args:
        server: A client of it.
        pids: Its processes.
    """

    def __init__(self, server: ServedModel, pids: Sequence[int]) -> None:
        self._server, self._pids = server, pids

    @property
    def memory(self) -> int:
        """Proportional memory of all processes, files mapped by them included. Unit: bytes."""
        lines = (
            line
            for pid in self._pids
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        )
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

    async def ask(self, messages: list[dict[str, str]], tokens: int) -> tuple[float, int, str]:
        """The time of the first token, the number of tokens, and the text."""
        create: Any = self._server.api.chat.completions.create
        stream = await create(
            model=self._server.model, messages=messages, max_tokens=tokens, temperature=0.0,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        first, count, text = 0.0, 0, ""
        async for event in stream:
            if event.choices and (content := event.choices[0].delta.content):
                first, text = first or time.perf_counter(), text + content
            if event.usage is not None:
                count = event.usage.completion_tokens
        return first or time.perf_counter(), count, text


Start = Callable[[int, int], AbstractAsyncContextManager[RunningServer]]
"""(chats at a time, tokens of each) -> a running server."""


def run(args: argparse.Namespace) -> int:
    """Measure all servers; print and record."""
    target, console = Models.of(args).target, make_console()
    contestants: dict[str, Start] = {
        f"paceline {weights}": partial(_paceline, target, weights) for weights in args.weights
    }
    program = args.llama_server or shutil.which("llama-server")
    for file in args.llama_model if program else ():
        contestants[f"llama.cpp {file.stem}"] = partial(_llama, str(program), file)
    results = Results("chats", args.output, target=target.name)
    table = Table("", "first token of turn 1, s", "turn 2", "turn 3", f"{_USERS} users, tokens/s",
                  *(f"MiB, {n} running" for n in (0, *_RUNNING)))  # fmt: skip
    for name, start in contestants.items():
        console.log(name)
        found = uvloop.run(_measure(start, args.repeats))
        results.add(name, found)
        table.add_row(
            name,
            *(f"{each:.2f}" for each in found["first_token_s"]),
            f"{found['tokens_per_second']:.0f}",
            *(f"{each:.0f}" for each in found["memory_mib"].values()),
        )
    console.print(table)
    console.print(f"written to {results.file}")
    return 0


async def _measure(start: Start, repeats: int) -> dict[str, Any]:
    firsts = []
    for number in range(repeats):  # each behind a file of its own, in a new server
        async with start(1, 8192) as server:
            firsts.append(await _turns(server, number))
    async with start(max(_RUNNING), 512) as server:
        rates = [await _rate(server) for _ in range(repeats)]
        memory = {"0": server.memory} | {
            str(count): await _held(server, count) for count in _RUNNING
        }
    return {
        "first_token_s": [round(statistics.median(turn), 3) for turn in zip(*firsts, strict=True)],
        "tokens_per_second": round(statistics.median(rates), 1),
        "memory_mib": {count: round(each / 2**20, 1) for count, each in memory.items()},
    }


async def _turns(server: RunningServer, number: int) -> list[float]:
    """Seconds to the first token of each turn of a chat about a file."""
    text = "\n".join(texts_of("long"))[number * _FILE_CHARACTERS :][:_FILE_CHARACTERS]
    messages: list[dict[str, str]] = []
    found = []
    await server.ask([{"role": "user", "content": "Hello"}], 1)
    for question in _TURNS:
        said = question if messages else f"{text}\n\n{question}"
        messages.append({"role": "user", "content": said})
        began = time.perf_counter()
        first, _, answer = await server.ask(messages, 48)
        found.append(first - began)
        messages.append({"role": "assistant", "content": answer})
    return found


async def _rate(server: RunningServer) -> float:
    """Tokens a second of several users at once, from the first request to the last token."""
    prompts = texts_of("chat", "code")[:_USERS]
    began = time.perf_counter()
    chats = ([{"role": "user", "content": prompt[:800]}] for prompt in prompts)
    answers = await asyncio.gather(*(server.ask(chat, 128) for chat in chats))
    return sum(tokens for _, tokens, _ in answers) / (time.perf_counter() - began)


async def _held(server: RunningServer, count: int) -> int:
    """The largest memory while this many chats run."""
    largest = 0
    stories = ([{"role": "user", "content": f"Tell me story {n}."}] for n in range(count))
    chats = [asyncio.ensure_future(server.ask(story, _CHAT_TOKENS)) for story in stories]
    while not all(chat.done() for chat in chats):
        largest = max(largest, server.memory)
        await asyncio.sleep(0.2)
    await asyncio.gather(*chats)
    return largest


@asynccontextmanager
async def _paceline(
    target: Path, weights: str, slots: int, context: int
) -> AsyncIterator[RunningServer]:
    async with AsyncExitStack() as stack:
        url, processes = stack.enter_context(gateway(target, verifier=["--weights", weights]))
        yield RunningServer(await connect(url, stack), [each.pid for each in processes])


@asynccontextmanager
async def _llama(
    program: str, model: Path, slots: int, context: int
) -> AsyncIterator[RunningServer]:
    command = [program, "-m", str(model), "--port", "{port}", "-t", str(threads())]
    command += ["-np", str(slots), "-c", str(slots * context)]
    async with AsyncExitStack() as stack:
        server = await connect(command, stack)
        assert server.pid is not None
        yield RunningServer(server, [server.pid])
