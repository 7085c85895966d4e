"""`paceline bench soak`: mixed chats over HTTP for a long time. Memory stays flat, texts the same.

Users take conversations from a list by turns, so each is held many times, whole or streamed, beside
other ones each time. A text that differs from the first time is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import uvloop
from openai import APIStatusError, AsyncOpenAI

from paceline.bench.models import Models
from paceline.bench.prompts import texts_of
from paceline.bench.record import Results, make_console
from paceline.bench.services import anonymous_bytes, gateway
from paceline.harness import ServiceProcess

_FOLLOWING = ("Go on.", "Say the same in one sentence.", "Why?", "Give an example.")
_SAMPLES = 240
"""Samples of memory in a run."""
_MAX_GROWTH = 0.05
"""Of a process's memory from the second quarter of a run to the last."""
_SLACK = 16 << 20
"""Growth that never counts: pools of the allocator. Unit: bytes."""
_SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"n": 2},
    {"response_format": {"type": "json_object"}},
    {"extra_body": {"drafter": "none"}},
    {"logprobs": True, "top_logprobs": 3},
)


@dataclass(frozen=True)
class ScriptedChat:
    """A conversation: what the user says in each turn, and how it is asked for."""

    number: int
    turns: tuple[str, ...]
    tokens: int
    more: dict[str, Any]


@dataclass
class Soak:
    """Counts of a run."""

    requests: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    tokens: int = 0
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Anonymous memory of each process over time. Unit: bytes."""


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if memory was flat, no request failed and all texts were the same, else 1."""
    target, soak, console = Models.of(args).target, Soak(), make_console()
    seconds = args.minutes * 60
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as scratch:
        memory, state = ["--kv-bytes", args.kv_bytes], ["--state-dir", scratch]
        with gateway(target, verifier=memory, drafter=state) as (url, processes):
            uvloop.run(_run(soak, url, processes, list(_chats(args.seed)), args.users, seconds))
    growth = {name: _growth(samples) for name, samples in soak.memory.items()}
    checks = {
        "memory flat": all(grown <= 0 for grown in growth.values()),
        "no request failed": not soak.failures and soak.requests.total() > 0,
        "texts the same": soak.wrong == 0,
    }
    results = Results("soak", args.output, target=target.name)
    results.add(
        args.label or target.name,
        {
            "minutes": args.minutes,
            "users": args.users,
            "checks": checks,
            "requests": dict(soak.requests),
            "failures": dict(soak.failures),
            "tokens_per_second": round(soak.tokens / seconds, 1),
            "memory_mib": {
                name: [round(each / 2**20, 1) for each in samples[:: max(1, len(samples) // 12)]]
                for name, samples in soak.memory.items()
            },
        },
    )
    console.print_json(json.dumps(results.entries[args.label or target.name]))
    console.print(f"written to {results.file}")
    return 0 if all(checks.values()) else 1


async def _run(
    soak: Soak,
    url: str,
    processes: Sequence[ServiceProcess],
    chats: list[ScriptedChat],
    users: int,
    seconds: float,
) -> None:
    until, taken = time.monotonic() + seconds, cycle(chats)
    async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=600) as api:

        async def user(number: int) -> None:
            draws = random.Random(number)
            while time.monotonic() < until:
                await _hold(soak, api, next(taken), draws)

        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(number))
            for _ in range(_SAMPLES):
                await asyncio.sleep(seconds / _SAMPLES)
                for process in processes:
                    soak.memory.setdefault(process.kind, []).append(anonymous_bytes(process.pid))


async def _hold(soak: Soak, api: AsyncOpenAI, chat: ScriptedChat, draws: random.Random) -> None:
    """Hold one conversation, and compare it with the first time."""
    model = (await api.models.list()).data[0].id
    messages: list[Any] = []
    for turn, said in enumerate(chat.turns):
        messages.append({"role": "user", "content": said})
        kind = draws.choice(("whole", "streamed", "streamed", "abandoned"))
        soak.requests[kind] += 1
        asked: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": chat.tokens,
            "temperature": 0.7,
            "seed": chat.number,
            **chat.more,
        }
        try:
            text = await _answer(soak, api, asked, kind)
        except APIStatusError as error:
            if error.code == "context_length_exceeded":
                return
            soak.failures[f"{error.status_code} {error.code}"] += 1
            return
        except Exception as error:
            soak.failures[f"{type(error).__name__}: {error}"[:200]] += 1
            return
        if kind == "abandoned":
            return
        digest = hashlib.sha256(text.encode()).hexdigest()
        soak.wrong += soak.texts.setdefault((chat.number, turn), digest) != digest
        messages.append({"role": "assistant", "content": text})


async def _answer(soak: Soak, api: AsyncOpenAI, asked: dict[str, Any], kind: str) -> str:
    """The first choice of an answer."""
    create: Any = api.chat.completions.create
    if kind == "whole":
        answer = await create(**asked)
        soak.tokens += answer.usage.completion_tokens
        return str(answer.choices[0].message.content)
    text = ""
    stream = await create(**asked, stream=True, stream_options={"include_usage": True})
    async for event in stream:
        if event.usage is not None:
            soak.tokens += event.usage.completion_tokens
        for choice in event.choices:
            if choice.index == 0:
                text += choice.delta.content or ""
        if kind == "abandoned" and len(text) > 40:
            break
    await stream.close()
    return text


def _chats(seed: int) -> Iterator[ScriptedChat]:
    """Conversations that begin with the prompts of the table, in random order."""
    draws = random.Random(seed)
    firsts = texts_of("chat", "code", "mathematics", "edit")
    draws.shuffle(firsts)
    for number, first in enumerate(firsts):
        turns = (first, *draws.sample(_FOLLOWING, draws.choice((0, 1, 3))))
        yield ScriptedChat(number, turns, draws.choice((16, 64, 160)), draws.choice(_SHAPES))


def _growth(samples: list[int]) -> float:
    """Growth from the second quarter to the last beyond what is allowed. Unit: bytes."""
    quarter = len(samples) // 4
    early = statistics.median(samples[quarter : 2 * quarter])
    late = statistics.median(samples[-quarter:])
    return late - early - max(_SLACK, _MAX_GROWTH * early)
