"""Several models in one `paceline serve`: each is a `paceline serve` of its own, as a child process
that is started when the model is asked for and stopped when its memory is needed, or nobody asks.

The gateway asks over a Unix socket, as `gateway.models.ManagedModels` describes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias

from paceline.cli.progress import size
from paceline.cli.supervisor import POLL_INTERVAL, Restarted, forwarded
from paceline.device import available_memory, has_driver
from paceline.harness import ProcessFailed, ServiceProcess
from paceline.harness.models import model_bytes
from paceline.verifier.options import GPU_MEMORY

logger = logging.getLogger("paceline.cli")


_MAX_BESIDE = 4  # models whose KV has room beside each other
_WITH_DRAFTER = 1.5  # memory for the weights of a model and of a drafter of at most half its size
_PROCESS_BYTES = 512 << 20  # of the processes of a model, besides weights and KV

State: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(eq=False)
class ServedModel:
    """A model, and the process that serves it while it is loaded."""

    name: str
    path: Path
    process: ServiceProcess
    state: State = "unloaded"
    holds: set[asyncio.StreamWriter] = field(default_factory=set)
    """Connections whose requests are answered with it."""
    waiting: int = 0  # connections that wait until it is loaded
    used: float = 0.0  # when it was loaded, or its last request ended: time of the monotonic clock
    loading: asyncio.Task[str] | None = None


class Manager:
    """Loads and unloads models. Use it on one event loop.

    Models that do not fit beside each other take turns: for one that waits for memory, the least
    recently used one is unloaded when its requests have ended. Later requests for it wait until it
    is loaded again, so that neither keeps the other out.

    Args:
        models: All that can be served; the first one is the default.
        memory: What there is for all loaded models together.
        memory_of: What a model takes at most, in the same unit.
        keep: How long a model stays loaded without a request, in seconds.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        memory: float,
        memory_of: Callable[[ServedModel], float],
        keep: float,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._memory, self._memory_of, self._keep = memory, memory_of, keep
        self._watching: set[asyncio.StreamWriter] = set()
        self._making_room = asyncio.Lock()
        self._released = asyncio.Event()  # set whenever a request ends
        self._draining = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection of the gateway until it ends."""
        try:
            question = json.loads(await reader.readline())
            ended = asyncio.create_task(reader.read())
            if question is None:
                self._watching.add(writer)
                self._tell()
                await ended
            else:
                model, load = self._models[question["model"]], bool(question["load"])
                await self._hold(model, writer, ended, load=load)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the gateway has died, or this process ends
        finally:
            self._watching.discard(writer)
            writer.close()

    async def _hold(
        self,
        model: ServedModel,
        writer: asyncio.StreamWriter,
        ended: asyncio.Task[bytes],
        *,
        load: bool,
    ) -> None:
        """Keep a model loaded until a connection has ended; if `load`, load it before."""
        while model.state != "loaded":
            reason = "it is not loaded"
            if load:
                if model.loading is None or model.loading.done():
                    model.loading = asyncio.create_task(self._load(model))
                model.waiting += 1
                await asyncio.wait((ended, model.loading), return_when=asyncio.FIRST_COMPLETED)
                model.waiting -= 1
                if ended.done():
                    return
                reason = model.loading.result()
            if reason:
                writer.write(f"{reason}\n".encode())
                return
        model.holds.add(writer)
        try:
            writer.write(b"\n")
            await ended
        finally:
            model.holds.discard(writer)
            model.used = monotonic() if load else model.used
            self._released.set()

    async def _load(self, model: ServedModel) -> str:
        """Load a model, if anyone still waits for it then; returns why it cannot be."""
        async with self._making_room:
            await self._make_room(model)
            if self._draining:
                return "`paceline serve` is shutting down"
            if not model.waiting:
                return "nobody waits for it any more"
            self._set(model, "loading")
        try:
            model.process.spawn()
            while not model.process.poll_ready():  # noqa: ASYNC110 - a process sets no event
                await asyncio.sleep(POLL_INTERVAL)
        except Exception as failure:  # whatever it is, who waits for the model is told
            reason = " ".join((model.process.phase or str(failure)).split())
            if not self._draining:
                logger.error("cannot load %s: %s", model.name, reason)
            await self._stop(model)
            return reason
        model.used = monotonic()
        self._set(model, "loaded")
        return ""

    async def _make_room(self, model: ServedModel) -> None:
        """Unload models, each when its requests have ended, until there is memory for this one, or
        no other is left."""
        while model.waiting and not self._draining:
            others = [other for other in self._models.values() if other.state != "unloaded"]
            needed = sum(map(self._memory_of, (model, *others)))
            loaded = [other for other in others if other.state == "loaded"]
            if not others or needed <= self._memory:
                return
            if not loaded:  # but others that are being loaded
                await asyncio.sleep(POLL_INTERVAL)
                continue
            last = min(loaded, key=lambda other: (bool(other.holds), other.used))
            await self._unload(last, f"{model.name} needs its memory")

    async def _unload(self, model: ServedModel, why: str) -> None:
        self._set(model, "unloading")
        while model.holds:
            self._released.clear()
            await self._released.wait()
        print(f"unloading {model.name}: {why}", flush=True)
        await self._stop(model)

    async def _stop(self, model: ServedModel) -> None:
        await asyncio.to_thread(model.process.stop)
        self._set(model, "unloaded")

    async def look_after(self) -> None:
        """Notice models that have ended, and unload those that nobody has asked for in a while."""
        for model in self._models.values():
            served = model.state == "loaded" or (model.state == "unloading" and model.holds)
            if served and (code := model.process.returncode) is not None:
                why = model.process.phase or f"its process has ended with code {code}"
                logger.error("%s is no longer served: %s", model.name, why)
                for writer in model.holds:
                    writer.write(f"{why}\n".encode())
                model.holds.clear()
                self._released.set()
                if model.state == "loaded":
                    model.process.stop()  # at once: it has ended
                    self._set(model, "unloaded")
            elif self._is_idle(model) and not self._making_room.locked():
                async with self._making_room:
                    if self._is_idle(model):
                        await self._unload(model, f"no request for {self._keep:g} s")

    def _is_idle(self, model: ServedModel) -> bool:
        late = monotonic() - model.used >= self._keep
        return late and model.state == "loaded" and not model.holds

    def drain(self) -> None:
        """Load no more models."""
        self._draining = True

    @property
    def running(self) -> list[ServiceProcess]:
        """The processes of models that are not unloaded."""
        return [model.process for model in self._models.values() if model.state != "unloaded"]

    def _set(self, model: ServedModel, state: State) -> None:
        logger.info("%s is %s", model.name, state)
        model.state = state
        self._tell()

    def _tell(self) -> None:
        """Tell the gateway the address and the state of each model."""
        states = {
            model.name: (model.process.requested_address, model.state)
            for model in self._models.values()
        }
        for writer in self._watching:
            writer.write(f"{json.dumps(states)}\n".encode())


async def serve_models(
    manager: Manager, gateway: ServiceProcess, socket: Path, on_ready: Callable[[], None]
) -> int:
    """Serve until a signal, which is forwarded as by `Supervisor`; the exit code of `paceline
    serve`: 0 after a drain, 2 if the gateway does not start."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.append, number)
    server = await asyncio.start_unix_server(manager.answer, socket)
    restarted = Restarted(gateway)
    gateway.spawn()
    try:
        ready = False
        while not signals:
            if ready:
                restarted.poll()
                await manager.look_after()
            elif ready := gateway.poll_ready():
                on_ready()
            await asyncio.sleep(POLL_INTERVAL)
    except ProcessFailed as failure:
        logger.error("cannot serve: %s", failure)
        return 2
    manager.drain()
    for _ in forwarded(signals, lambda: (gateway, *manager.running)):
        await asyncio.sleep(POLL_INTERVAL)
    server.close()
    for process in (gateway, *manager.running):
        process.stop()
    return 0 if len(signals) == 1 else 128 + signals[-1]


def memory_for(
    args: argparse.Namespace, count: int
) -> tuple[float, Callable[[ServedModel], float], Callable[[float], str]]:
    """Return the memory for loaded models, what one of them takes at most, and how to write both:
    shares of a GPU, or bytes of main memory.

    KV takes half of the main memory, of which each model gets an equal part; if there are many,
    such that `_MAX_BESIDE` of them have room. That is `args.kv_bytes`, if it is not given.
    """
    if args.device != "cpu" and has_driver():
        return 1.0, lambda model: args.gpu_memory or GPU_MEMORY, "{:.0%} of a GPU".format
    memory = available_memory()
    kv_bytes: int = args.kv_bytes or memory // 2 // min(count, _MAX_BESIDE)
    args.kv_bytes = kv_bytes
    copies = 1.0 if args.drafter == ["none"] else _WITH_DRAFTER

    def memory_of(model: ServedModel) -> float:
        weights = model_bytes(model.path, args.weights or "auto")
        return copies * weights + kv_bytes + _PROCESS_BYTES

    return memory, memory_of, size
