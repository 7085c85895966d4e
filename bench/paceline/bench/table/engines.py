"""Engines of the table: Paceline, servers with OpenAI's interface, and Python libraries."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self

from openai import APIConnectionError, AsyncOpenAI, InternalServerError

from paceline.bench.services import ALWAYS, services
from paceline.client import DraftOptions, Generation, Stats
from paceline.service.cpus import usable_cpus
from paceline.train.blocks import plain_folder

NONE = "none"  # the mode without speculation, the first of every engine
# Ends of the modes that draft in every round: after the step, and while the verifier works.
ALWAYS_END, AHEAD = " always", " ahead"
# The modes of Paceline with the verifier's own sources: alone, and as a request that names no
# drafter has them, with the default drafter where it adds to them. Neither remembers other texts.
LOCAL, DEFAULT = "local", "default"
_START_SECONDS = 300.0
_PROGRAM = Path(__file__).with_name("program.py")


@dataclass(frozen=True)
class AnswerRequest:
    """Token ids, the maximum of new tokens, and the sampling."""

    prompt: list[int]
    tokens: int
    temperature: float
    seed: int
    json_schema: str = ""  # JSON schema of the answer; empty: it is free


@dataclass(frozen=True)
class Answer:
    """What came. Times are values of time.perf_counter."""

    tokens: int  # new tokens
    first: float  # time of the first token
    ended: float  # time of the last token
    first_seconds: float  # from the call to the first token, with nothing of the prompt in a cache
    output: str  # the text or its tokens
    stats: Stats = field(default_factory=Stats)  # of Paceline's rounds; others have none


class Contestant(Protocol):
    """An async context manager that starts the engine and stops it."""

    name: str  # engine and format of the weights
    modes: tuple[str, ...]  # ways to decode; `NONE` first, if it is one
    concurrent: bool  # whether it answers several requests at a time
    every: int  # it answers every n-th prompt; slow engines answer fewer
    constrained: bool  # whether it can bind an answer by a JSON schema

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def answer(self, mode: str, request: AnswerRequest) -> Answer: ...


class PacelineServices:
    """A verifier and a drafter, through the client.

    Args:
        always: Every round drafts; these modes end in ``always``.
        reuse: Read a prompt once and decode behind copies of its KV. For one user.
        ahead: Verifier and drafter are on a core each (see
            :func:`~paceline.bench.services.services`), and every round drafts. True: chains of
            ``lm`` and ``selfspec`` grow on while the verifier works, and modes end in ``ahead``.
            False: they do not. None: the services share the cores.
    """

    concurrent = True
    constrained = True

    def __init__(
        self,
        target: Path,
        weights: str,
        drafters: Mapping[str, str],
        *,
        always: bool = False,
        reuse: bool = False,
        every: int = 1,
        verifier: Sequence[str] = (),
        ahead: bool | None = None,
    ) -> None:
        self.name, self.every = f"paceline {weights}", every
        always = always or ahead is not None
        self._end = AHEAD if ahead else ALWAYS_END if always else ""
        self.modes = tuple(f"{name}{self._end}" for name in drafters)
        if not always:
            self.modes = (NONE, LOCAL, DEFAULT, *self.modes)
        elif ahead is False:
            self.modes = (NONE, LOCAL, *self.modes)
        # A prompt is read anew each time, or behind the parent that the request names.
        options = ["--lease-seconds=7200", "--no-prefix-caching", *verifier]
        drafter = [] if ahead is None else ["--overlap" if ahead else "--no-overlap"]
        self._services = partial(
            services, target, drafters, weights, options, drafter, apart=ahead is not None
        )
        self._options = ALWAYS if always else DraftOptions()
        # A cache with hidden states serves every drafter, one without serves those that read none.
        readers = ("dspark", "eagle3", "mtp")
        reading = (name for name, spec in drafters.items() if spec.startswith(readers))
        self._reader = next(reading, NONE)
        self._reuse = reuse
        self._parent: tuple[list[int], Generation] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            pair = stack.enter_context(self._services())
            self._client = await stack.enter_async_context(pair.client(self._options))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        parent = await self._read(request.prompt) if self._reuse else None
        began, first = time.perf_counter(), None
        generation = self._client.generate(
            request.prompt,
            max_new_tokens=request.tokens,
            temperature=request.temperature,
            seed=request.seed,
            json_schema=request.json_schema or None,
            drafter=None if mode == DEFAULT else mode.removesuffix(self._end),
            # Other modes have the same text, and none may remember it.
            isolated=True,
            parent=parent,
        )
        async for _ in generation:
            first = first or time.perf_counter()
        ended = time.perf_counter()
        first = first or ended
        return Answer(
            len((await generation).token_ids),
            first,
            ended,
            parent.stats.first_token_ms / 1e3 if parent else first - began,
            json.dumps((await generation).token_ids),
            generation.stats,
        )

    async def _read(self, prompt: list[int]) -> Generation:
        if self._parent is None or self._parent[0] != prompt:
            if self._parent is not None:
                await self._parent[1].aclose()
            generation = self._client.generate(
                prompt, max_new_tokens=2, drafter=self._reader, ignore_eos=True, keep_cache=True
            )
            await generation
            self._parent = prompt, generation
        return self._parent[1]


class Server:
    """Servers with OpenAI's completions endpoint, one for each mode.

    Args:
        schema_fields: Makes the fields that bind an answer by a JSON schema, which are no part of
            OpenAI's interface; None: the server has none.
    """

    concurrent = True

    def __init__(
        self,
        name: str,
        modes: Mapping[str, str | Sequence[str]],
        every: int = 1,
        schema_fields: Callable[[object], dict[str, object]] | None = None,
    ) -> None:
        self.name, self.modes, self.every = name, tuple(modes), every
        self.constrained = schema_fields is not None
        self._given, self._schema_fields = modes, schema_fields

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._servers = {
                mode: await connect(given, stack) for mode, given in self._given.items()
            }
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        """See :class:`Contestant`.

        Raises:
            openai.OpenAIError: The server cannot be reached, or refuses.
            ValueError: The stream has no text, or no usage at its end.
        """
        server, more = self._servers[mode], None
        if request.json_schema and self._schema_fields is not None:
            more = self._schema_fields(json.loads(request.json_schema))
        began = time.perf_counter()
        stream = await server.api.completions.create(
            model=server.model,
            prompt=request.prompt,
            max_tokens=request.tokens,
            temperature=request.temperature,
            seed=request.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
        first, tokens, text = 0.0, 0, []
        async with aclosing(stream):
            async for event in stream:
                if event.choices and event.choices[0].text:
                    first = first or time.perf_counter()
                    text.append(event.choices[0].text)
                if event.usage is not None:
                    tokens = event.usage.completion_tokens
        if not (first and tokens):
            raise ValueError(f"{self.name} streamed {tokens} tokens: expected text, and its usage")
        return Answer(tokens, first, time.perf_counter(), first - began, "".join(text))


@dataclass(frozen=True)
class ServedModel:
    """A server that is ready: a client, and the name of its first model."""

    api: AsyncOpenAI
    model: str


async def connect(given: str | Sequence[str], stack: AsyncExitStack) -> ServedModel:
    """Wait for a server with OpenAI's interface.

    Args:
        given: The URL of a running one, or the command that starts one, in which ``{port}`` stands
            for its port.

    Raises:
        openai.OpenAIError: It cannot be reached.
    """
    url, process = given, None
    if not isinstance(given, str):
        port = free_port()
        command = [word.replace("{port}", str(port)) for word in given]
        quiet = subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
        stack.push_async_callback(_stop, process)
        url = f"http://127.0.0.1:{port}/v1"
    key = os.environ.get("OPENAI_API_KEY", "none")
    api = AsyncOpenAI(base_url=str(url), api_key=key, max_retries=0)
    await stack.enter_async_context(api)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            model = (await api.models.list()).data[0].id
            await api.completions.create(model=model, prompt="1", max_tokens=1)
            return ServedModel(api, model)
        except (APIConnectionError, InternalServerError):
            if process is None or process.returncode is not None or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


class LibraryProcess:
    """A Python library in a process of its own, perhaps with another Python; see ``program.py``."""

    concurrent = False
    constrained = False
    modes: tuple[str, ...] = (NONE, "prompt lookup")

    def __init__(
        self, library: str, python: str, model: Path, eos: Sequence[int], every: int = 1
    ) -> None:
        self.name, self.every = f"{library} {_format(model)}", every
        self._model, self._eos = model, json.dumps(list(eos))
        self._command = [python, str(_PROGRAM), library]

    async def __aenter__(self) -> Self:
        self._copy = TemporaryDirectory()
        model = self._model
        if model.is_dir():
            model = plain_folder(model, Path(self._copy.name))
        self._process = await asyncio.create_subprocess_exec(
            *self._command, str(model), self._eos, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        await self._ask()
        return self

    async def __aexit__(self, *error: object) -> None:
        await _stop(self._process)
        self._copy.cleanup()

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        began = time.perf_counter()
        reply = await self._ask({"lookup": mode != NONE, **asdict(request)})
        first, ended = reply["first"], reply["seconds"]
        output = json.dumps(reply["tokens"])
        return Answer(len(reply["tokens"]), began + first, began + ended, first, output)

    async def _ask(self, question: dict[str, object] | None = None) -> dict[str, Any]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        if question is not None:
            pipe.write(json.dumps(question).encode() + b"\n")
        line = await answers.readline()
        if not line:
            code = await self._process.wait()
            raise OSError(f"{self.name} ended with code {code}; its error is above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def llama_server(
    program: str,
    model: Path,
    modes: Sequence[str],
    users: int,
    *,
    draft: Path | None = None,
    every: int = 1,
) -> Server:
    """Run ``llama-server`` on a GGUF file, by mode of n-gram speculation, and with a draft model.

    A prompt is read anew each time. At temperature 0.7 no filter is applied, as in the others.
    """
    command = [program, "-m", str(model), "--port", "{port}", "-t", str(usable_cpus())]
    command += ["-np", str(users), "-c", str(8192 if users == 1 else 2048 * users)]
    command += ["--no-cache-prompt", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    kinds = {NONE: command, **{mode: [*command, "--spec-type", mode] for mode in modes}}
    if draft is not None:
        drafts = ["--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
        kinds["draft model"] = [*command, "--spec-draft-model", str(draft), *drafts]
    return Server(
        f"llama.cpp {_format(model)}", kinds, every, lambda schema: {"json_schema": schema}
    )


def digest(text: str) -> str:
    """Return a short digest of an output, to compare it with others."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _format(model: Path) -> str:
    """Return the format of a GGUF file, as its name ends: `NAME-Q8_0.gguf` or `NAME.Q4_1.gguf`."""
    if model.suffix != ".gguf":
        return "bfloat16"
    return model.stem.replace(".", "-").rpartition("-")[2]


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
