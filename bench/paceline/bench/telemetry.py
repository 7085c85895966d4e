"""What telemetry costs: the same generations with it off, with metrics, and with traces too.

    python -m paceline.bench.telemetry

One client process, two pairs of services (one with nothing, one with metrics and an exporter) and a
collector process that throws away what it gets. Modes take turns prompt by prompt; what is compared
is the same text on the same machine within seconds. Every round asks for a tree: the client would
go by the clock, and each mode be measured on rounds of its own choice.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import uvloop
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from rich.console import Console
from rich.table import Table

from paceline.bench import machine, prompts
from paceline.bench.served import Sample, generate, overhead_ms
from paceline.client import Client
from paceline.client._pace import Pace
from paceline.harness import ServiceProcess

MODES = ("off", "metrics", "metrics and traces")
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass
class Runs:
    """What one mode came to."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second."""
    costs: list[float] = field(default_factory=list)
    """Share of the speed of `off` on the same prompt that was lost."""
    cpu_ms: list[float] = field(default_factory=list)
    """Processor time of client and services per round."""
    overheads: list[float] = field(default_factory=list)
    """Of each drafted round, beyond the computing of drafter and verifier. Unit: milliseconds."""

    def summary(self) -> dict[str, float | list[float]]:
        """Medians, and the quartiles of the cost."""
        return {
            "runs": len(self.rates),
            "tokens_per_second": statistics.median(self.rates),
            "throughput_cost": statistics.median(self.costs),
            "throughput_cost_quartiles": statistics.quantiles(self.costs, n=4)[::2],
            "cpu_ms_per_round": statistics.median(self.cpu_ms),
            "round_overhead_ms": statistics.median(self.overheads),
        }


class Switch(Sampler):
    """Records generations while it is on."""

    on = False

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        """Every span of the process is decided alike."""
        return SamplingResult(Decision.RECORD_AND_SAMPLE if self.on else Decision.DROP)

    def get_description(self) -> str:
        """For people."""
        return "Switch"


class Pair:
    """A verifier, a drafter, and a client of both."""

    def __init__(self, target: Path, environment: dict[str, str], metrics: bool) -> None:
        extra = ["--device=cpu", *(["--metrics-address", "127.0.0.1:0"] if metrics else [])]
        arguments = {
            "verifier": ["--target", str(target), "--kv-bytes", "256MiB", *extra],
            "drafter": ["--load", "ngram=ngram", *extra],
        }
        self._processes = [
            ServiceProcess("verifier", arguments["verifier"], environment=environment),
            ServiceProcess("drafter", arguments["drafter"], environment=environment),
        ]

    async def enter(self, stack: AsyncExitStack) -> Client:
        """Start all of it, for as long as the stack."""
        await asyncio.gather(*map(stack.enter_async_context, self._processes))
        verifier, drafter = (process.address for process in self._processes)
        return await stack.enter_async_context(Client(verifier, drafter=drafter))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of this process and of both services so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        return time.process_time() + sum(_ticks(p.pid) for p in self._processes) / ticks


async def measure(
    target: Path, texts: Sequence[prompts.Prompt], collector: str, tokens: int, repeats: int
) -> dict[str, Any]:
    """Generate every text in every mode, `repeats` times; summaries by mode.

    Args:
        target: Model folder.
        texts: Prompts.
        collector: Where spans go, "host:port".
        tokens: New tokens a prompt.
        repeats: Passes over the prompts.
    """
    switch = Switch()
    endpoint = f"http://{collector}"
    provider = TracerProvider(sampler=switch, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=True)))
    trace.set_tracer_provider(provider)
    runs = {mode: Runs() for mode in MODES}
    identical = True
    async with AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(Pace, "steps", return_value=0))
        plain = Pair(target, {}, metrics=False)
        seen = Pair(target, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, metrics=True)
        entered = await asyncio.gather(plain.enter(stack), seen.enter(stack))
        clients = dict(zip((plain, seen), entered, strict=True))
        pairs = dict(zip(MODES, (plain, seen, seen), strict=True))
        for client in (*clients.values(), *clients.values()):
            await generate(client, texts[0].tokens, tokens, "ngram")
        for turn, text in enumerate([*texts] * repeats):
            samples: dict[str, Sample] = {}
            for mode in _in_turn(turn):
                pair = pairs[mode]
                switch.on = mode == MODES[-1]
                before = pair.cpu_seconds
                sample = await generate(clients[pair], text.tokens, tokens, "ngram")
                spent = pair.cpu_seconds - before
                runs[mode].cpu_ms.append(spent * 1e3 / len(sample.stats.rounds))
                samples[mode] = sample
            identical &= len({tuple(sample.tokens) for sample in samples.values()}) == 1
            for mode, sample in samples.items():
                drafted = [entry for entry in sample.stats.rounds if entry.drafted]
                runs[mode].overheads += map(overhead_ms, drafted)
                runs[mode].rates.append(tokens / sample.seconds)
                runs[mode].costs.append(1 - samples["off"].seconds / sample.seconds)
    provider.shutdown()
    modes = {mode: found.summary() for mode, found in runs.items()}
    return {"modes": modes, "identical": identical}


def _in_turn(turn: int) -> tuple[str, ...]:
    """All modes, another one first each time: none always follows the same other."""
    first = turn % len(MODES)
    return MODES[first:] + MODES[:first]


def _ticks(pid: int) -> int:
    """User and system time of a process. Unit: clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@contextmanager
def _collector() -> Iterator[tuple[str, Connection]]:
    """A process that takes spans and drops them; its address, and where it says how many bytes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


def _collect(pipe: Connection) -> None:
    received = 0

    def export(request: bytes, _context: Any) -> bytes:
        nonlocal received
        received += len(request)
        return b""

    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})
    server.add_generic_rpc_handlers((handlers,))
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    while pipe.recv():
        pipe.send(received)


def _show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"telemetry: {results['tokens']} tokens a prompt, drafted by ngram")
    for heading in ("mode", "tokens/s", "cost", "quartiles", "CPU ms a round", "round overhead ms"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, figures in results["modes"].items():
        low, high = figures["throughput_cost_quartiles"]
        table.add_row(
            mode,
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['throughput_cost']:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
            f"{figures['cpu_ms_per_round']:.2f}",
            f"{figures['round_overhead_ms']:.3f}",
        )
    console.print(table)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="demo models")
    parser.add_argument("--set", default="copying", help="prompts of bench to use")
    parser.add_argument("--prompts", type=int, default=4, help="how many of them")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=6, help="passes over the prompts")
    parser.add_argument("--output", type=Path, help="default: bench/results/telemetry-MACHINE.json")
    args = parser.parse_args()
    target: Path = args.models / "target"
    texts = [p for p in prompts.load(args.models / "prompts", target) if p.set == args.set]
    described = machine.describe()
    with _collector() as (address, pipe):
        found = uvloop.run(
            measure(target, texts[: args.prompts], address, args.tokens, args.repeats)
        )
        pipe.send(True)
        results = {
            "machine": described,
            "set": args.set,
            "tokens": args.tokens,
            **found,
            "bytes_of_spans": pipe.recv(),
        }
    _show(results, Console())
    output: Path = args.output or Path("bench/results") / f"telemetry-{described['kind']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
