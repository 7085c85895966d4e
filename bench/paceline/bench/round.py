"""`paceline bench round`: where the time of a round goes.

A verifier runs in this process with clocks around the parts of its engine thread, a drafter service
and a client in processes of their own. Every round drafts. "wake-ups" is what is left of a round:
two processes that wake up, the drafter's reading and writing of messages, and on the gRPC carrier
the event loops. CPU "in a wait" and "in a step" is that of all threads of the service that waits
for the other one: little, if none of them spins.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import uvloop
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import long_prompts
from paceline.bench.record import Results, make_console
from paceline.bench.services import ALWAYS, serving
from paceline.cli.command import CommandError
from paceline.cli.shipped import drafters_for
from paceline.client import Client, RoundStats
from paceline.verifier import VerifierService, build_service
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.job import Decode

CARRIERS = ("socket", "stream")
_PARTS = {
    "parsing": ("_drafting.read", "_drafting.receive"),
    "scheduling": ("_queue_ready", "_schedule", "_learn", "_answer", "_drafting.flush"),
    "step": ("_run_batch",),
    "answer": ("_close_ended", "_notify"),
}
_CONTEXT = 128


class Clocks:
    """Wall-clock and CPU time of the parts of an engine thread, step by step.

    A step counts if a tree was drafted for it and it has no prompt. What was done since the step
    before counts with it.
    """

    def __init__(self, service: VerifierService) -> None:
        """Put clocks around the methods of a service's engine that is not yet started."""
        # Seconds by part of each such step, and its number of `sequences`.
        self.steps: list[dict[str, float]] = []
        self.drafter: int | None = None  # process of the drafter service, once it runs
        self._left = time.process_time()
        self._step: dict[str, float] = defaultdict(float)
        self._sequences = 0
        self._inside = False
        for part, methods in _PARTS.items():
            for path in methods:
                *owners, name = path.split(".")
                owner: Any = service.engine
                for attribute in owners:
                    owner = getattr(owner, attribute)
                setattr(owner, name, self._timed(part, name, getattr(owner, name)))

    def _timed(self, part: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a part inside another one counts there
                return method(*args, **kwargs)
            if name == "_run_batch":
                self._sequences = _drafted_for(args[0])
            self._inside = True
            self._step["waiting"] += time.process_time() - self._left
            drafter = self._drafter_cpu()
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._step[part] += time.perf_counter() - wall
                if part == "step":
                    self._step["drafter"] += self._drafter_cpu() - drafter
                else:
                    self._step["cpu"] += time.thread_time() - cpu
                self._left = time.process_time()
                self._inside = False
                if name == "_notify":
                    self._end_step()

        return timed

    def _drafter_cpu(self) -> float:
        return _cpu_seconds(self.drafter) if self.drafter else 0.0

    def _end_step(self) -> None:
        if "step" not in self._step:
            return  # the thread woke up for something else: it counts with the next step
        if self._sequences:
            self.steps.append({**self._step, "sequences": self._sequences})
        self._step.clear()


def _drafted_for(batch: Batch) -> int:
    """Sequences of a step for which a tree was drafted, admitted or not; 0 for other steps."""
    jobs = [entry.job for entry in batch.entries if isinstance(entry.job, Decode)]
    drafted = any(job.draft is not None for job in jobs)
    return len(jobs) if drafted and len(jobs) == len(batch.entries) else 0


def _client(address: str, pipe: Connection) -> None:
    """The client's process: runs the generations that it is told to, and returns their rounds."""
    uvloop.run(_generations(address, pipe))


async def _generations(address: str, pipe: Connection) -> None:
    async with Client(address, drafting=ALWAYS) as client:
        while (job := await asyncio.to_thread(pipe.recv)) is not None:
            drafter, prompts, tokens = job
            results = await asyncio.gather(
                *(
                    client.generate(prompt, max_new_tokens=tokens, drafter=drafter, ignore_eos=True)
                    for prompt in prompts
                )
            )
            pipe.send([result.stats.rounds for result in results])


async def measure(
    models: Models, weights: str, drafter: str, carrier: str, counts: list[int], tokens: int
) -> dict[int, dict[str, float]]:
    """Times of a round by number of sequences. Unit: microseconds, means over steps."""
    service = build_service(models.target, weights=weights, device="cpu", prefix_caching=False)
    if carrier == "stream":
        service.exchange.path = ""  # no socket is offered
    clocks = Clocks(service)
    async with serving(service, {"it": drafter}) as (address, process):
        assert process is not None
        clocks.drafter = process.pid
        return await _all(models, clocks, process.pid, address, counts, tokens)


async def _all(
    models: Models, clocks: Clocks, drafter: int, address: str, counts: list[int], tokens: int
) -> dict[int, dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    client = context.Process(target=_client, args=(address, there), daemon=True)
    client.start()
    there.close()  # reading from a client that died fails then
    found: dict[int, dict[str, float]] = {}
    try:
        for count in counts:
            prompts = long_prompts(models.prompts, models.target, _CONTEXT, 2 * count)
            ask = partial(_ask, here, drafter)
            await ask(prompts[:count], 16)
            clocks.steps.clear()
            loop_cpu = time.thread_time()
            rounds, drafter_cpu = await ask(prompts[count:], tokens)
            loop_cpu = time.thread_time() - loop_cpu
            found[count] = _figures(clocks.steps, rounds, loop_cpu, drafter_cpu)
        here.send(None)
    finally:
        await asyncio.to_thread(client.join, 10)
    return found


async def _ask(
    pipe: Connection, drafter: int, prompts: list[list[int]], tokens: int
) -> tuple[list[list[RoundStats]], float]:
    """Rounds of generations, and the drafter's CPU seconds meanwhile."""
    before = _cpu_seconds(drafter)
    pipe.send(("it", prompts, tokens))
    rounds: list[list[RoundStats]] = await asyncio.to_thread(pipe.recv)
    return rounds, _cpu_seconds(drafter) - before


def _figures(
    steps: list[dict[str, float]],
    rounds: list[list[RoundStats]],
    loop_cpu: float,
    drafter_cpu: float,
) -> dict[str, float]:
    """Medians in microseconds; CPU time is that of all rounds, divided by their number."""
    entries = [entry for each in rounds for entry in each]
    asked = [entry for entry in entries if entry.drafted]
    if not steps or not asked:
        raise CommandError("nothing was drafted: use more --tokens")

    def of_rounds(name: str) -> float:
        return float(median(getattr(entry, name) for entry in asked)) * 1e3

    parts = {part: median(step.get(part, 0.0) for step in steps) * 1e6 for part in _PARTS}
    beside = median(e.round_ms - e.draft_ms - e.verify_ms for e in asked) * 1e3
    known = sum(seconds for part, seconds in parts.items() if part != "step")
    engine_cpu = sum(step["cpu"] for step in steps) / sum(step["sequences"] for step in steps)
    return {
        "round": of_rounds("round_ms"),
        "draft": of_rounds("draft_ms"),
        **parts,
        "wake-ups and queues": beside - known,
        "beside draft and step": beside,
        "engine CPU a sequence": engine_cpu * 1e6,
        "event loop CPU a sequence": loop_cpu / len(entries) * 1e6,
        "drafter CPU a sequence": drafter_cpu / len(entries) * 1e6,
        "verifier CPU in a wait": median(step["waiting"] for step in steps) * 1e6,
        "drafter CPU in a step": median(step["drafter"] for step in steps) * 1e6,
        "rounds": len(entries),
        "drafted": len(asked),
        "steps": len(steps),
    }


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, from Linux's clock of that process."""
    return time.clock_gettime(~pid << 3 | 2)


def run(args: argparse.Namespace) -> int:
    console, models = make_console(), Models.of(args)
    specs = {"ngram": "ngram"}
    for text in drafters_for(models.target, "cpu", args.weights):
        name, _, spec = text.partition("=")
        if name == "dspark":
            specs[name] = spec
    results = Results("round", args.output, models.target, weights=args.weights)
    results.uses(specs)
    for name, spec in specs.items():
        for carrier in CARRIERS:
            found = uvloop.run(
                measure(models, args.weights, spec, carrier, args.sequences, args.tokens)
            )
            table = Table(title=f"{name}, {carrier}: microseconds")
            table.add_column("sequences")
            for part in next(iter(found.values())):
                table.add_column(part, justify="right")
            for count, figures in found.items():
                figures = {part: round(value, 1) for part, value in figures.items()}
                table.add_row(str(count), *(f"{value:g}" for value in figures.values()))
                results.add(f"{name}, {carrier}, {count} sequences", figures)
            console.print(table)
    console.print(f"written to {results.file}")
    return 0
