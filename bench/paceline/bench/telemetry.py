"""`paceline bench telemetry`: generations without telemetry, with metrics, with traces too.

One client process, two pairs of services (one without telemetry, one with metrics and an exporter)
and a collector process that discards spans. Modes take turns prompt by prompt, and every round
drafts, so that all modes run the same rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc
import uvloop
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from rich.table import Table

from paceline.bench.models import Models
from paceline.bench.prompts import Prompt, demo_prompts
from paceline.bench.record import Results, make_console
from paceline.bench.services import ALWAYS, Sample, Services, generate, overhead_ms, services

MODES = ("off", "metrics", "metrics and traces")

_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
_METRICS = ["--metrics-address", "127.0.0.1:0"]
_DRAFTERS = {"ngram": "ngram"}


@dataclass
class Runs:
    """All runs of one mode.

    Attributes:
        rates: Tokens per second.
        losses: Share of the rate of `off` on the same prompt that was lost.
        cpu_ms: Processor time of client and services per round.
        overheads: Milliseconds of each drafted round beyond the work of drafter and verifier.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians, and the quartiles of the loss."""
        return {
            "runs": len(self.rates),
            "tokens_per_second": median(self.rates),
            "throughput_loss": median(self.losses),
            "throughput_loss_quartiles": quantiles(self.losses, n=4)[::2],
            "cpu_ms_per_round": median(self.cpu_ms),
            "round_overhead_ms": median(self.overheads),
        }


class Switch(Sampler):
    """Samples all spans of this process while `on`, and none otherwise."""

    on = False

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        """See :class:`Sampler`."""
        return SamplingResult(Decision.RECORD_AND_SAMPLE if self.on else Decision.DROP)

    def get_description(self) -> str:
        """See :class:`Sampler`."""
        return "Switch"


async def measure(
    target: Path, prompts: Sequence[Prompt], collector: str, tokens: int, repeats: int
) -> dict[str, Any]:
    """Generate after every prompt in every mode, `repeats` times; summaries by mode.

    Args:
        target: A Hugging Face folder.
        prompts: Prompts.
        collector: HOST:PORT that spans are exported to.
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
    exporting = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with (
        services(target, _DRAFTERS, "bfloat16") as plain,
        services(
            target,
            _DRAFTERS,
            "bfloat16",
            verifier=_METRICS,
            drafter=_METRICS,
            environment=exporting,
        ) as observed,
    ):
        async with plain.client(ALWAYS) as first, observed.client(ALWAYS) as second:
            pairs = dict(
                zip(MODES, ((plain, first), (observed, second), (observed, second)), strict=True)
            )
            for _, client in (*pairs.values(), *pairs.values()):
                await generate(client, prompts[0].tokens, tokens, "ngram")
            for turn, prompt in enumerate([*prompts] * repeats):
                samples: dict[str, Sample] = {}
                for mode in MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]:
                    pair, client = pairs[mode]
                    switch.on = mode == MODES[-1]
                    before = _cpu_seconds(pair)
                    sample = await generate(client, prompt.tokens, tokens, "ngram")
                    spent = _cpu_seconds(pair) - before
                    runs[mode].cpu_ms.append(spent * 1e3 / len(sample.stats.rounds))
                    samples[mode] = sample
                identical &= len({tuple(sample.tokens) for sample in samples.values()}) == 1
                for mode, sample in samples.items():
                    runs[mode].overheads += map(overhead_ms, sample.drafted)
                    runs[mode].rates.append(tokens / sample.seconds)
                    runs[mode].losses.append(1 - samples["off"].seconds / sample.seconds)
    provider.shutdown()
    modes = {mode: found.summary() for mode, found in runs.items()}
    return {"modes": modes, "identical": identical}


def _cpu_seconds(pair: Services) -> float:
    """Processor time of this process and both services so far."""
    ticks = 0
    for process in (pair.verifier, pair.drafter):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def collecting() -> Iterator[tuple[str, Connection]]:
    """A process that discards spans: its HOST:PORT, and a pipe.

    An object sent into the pipe is answered with the bytes of spans so far.
    """
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
    handlers = grpc.method_handlers_generic_handler(_EXPORT, {"Export": handler})
    server.add_generic_rpc_handlers((handlers,))
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    while pipe.recv():
        pipe.send(received)


def run(args: argparse.Namespace) -> int:
    """Measure, print and record."""
    console = make_console()
    models = Models.of(args)
    prompts = [p for p in demo_prompts(models.prompts, models.target) if p.set == "copying"]
    results = Results("telemetry", args.output, tokens=args.tokens)
    with collecting() as (address, pipe):
        found = uvloop.run(measure(models.target, prompts, address, args.tokens, args.repeats))
        pipe.send(True)
        results.add("ngram, copying", {**found, "bytes_of_spans": pipe.recv()})
    table = Table("mode", "tokens/s", "loss", "quartiles", "CPU ms a round", "overhead ms a round")
    for mode, figures in found["modes"].items():
        low, high = figures["throughput_loss_quartiles"]
        table.add_row(
            mode,
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['throughput_loss']:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
            f"{figures['cpu_ms_per_round']:.2f}",
            f"{figures['round_overhead_ms']:.3f}",
        )
    console.print(table)
    console.print(f"written to {results.file}")
    return 0
