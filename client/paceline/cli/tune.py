"""`paceline tune`: the best settings of a drafter for given prompts and this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.table import Table

from paceline.cli.command import CommandError, exit_with
from paceline.cli.output import Output
from paceline.cli.service_process import run_async
from paceline.client import Client, DraftOptions, Generation, GenerationResult, PacelineError
from paceline.harness import (
    NO_PROXY,
    PROMPT_FILE,
    ProcessFailed,
    ServiceProcess,
    read_prompts,
)
from paceline.harness.models import MODEL, WEIGHTS, drafter_spec, model_path
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

RATIOS = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5)
"""Sparse ratios of the first sweep: the share of the text's KV that drafting reads."""

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 14)
"""Drafted tokens of a chain."""

NEIGHBOURS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Ratios of the last sweep, as multiples of the ratio chosen in the first."""

TREES = (
    ("4", 4), ("8", 8), ("4,4", 6), ("8,8", 10), ("8,8,8", 12), ("8,8,8", 16),
    ("4,8,8,8", 16), ("8,8,8,8", 24), ("4,8,8,8,8", 36),
)  # fmt: skip
"""Widths of a tree's levels, and its node limit."""

STABLE = 0.97
"""An accepted length is stable from this share of the best one on."""

MIN_CONTEXT = 32
"""Minimum number of positions that drafting reads. Unit: tokens."""

METHODS = ("selfspec", "longspec", "lm")
"""Methods with settings to tune."""

_WARM_UP = 16  # tokens
_LEASE_SECONDS = 7200
_LOAD_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the drafter, the prompts and the output."""
    add = parser.add_argument
    add("--target", type=model_path, required=True, metavar="MODEL", help=MODEL)
    add(
        "--drafter",
        type=drafter_spec,
        required=True,
        metavar="METHOD[:DIR][,KEY=VALUE...]",
        help=f"drafter to tune, one of {', '.join(METHODS)}; its options are kept",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help=PROMPT_FILE)
    add("--count", type=int, default=8, metavar="N", help="maximum number of prompts")
    add("--tokens", type=int, default=128, metavar="N", help="new tokens per prompt and run")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add("--weights", choices=WEIGHTS, help="format of the target's weights (default: auto)")
    add(
        "--output",
        type=Path,
        default=Path("paceline.toml"),
        metavar="FILE",
        help="config file for `paceline serve --config` (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Tune and write a config file; fails with code 2."""
    from paceline.drafter import DrafterSpec, LoadError

    with exit_with(2, LoadError, ProcessFailed, PacelineError, OSError, ValueError):
        spec = DrafterSpec.parse(args.drafter)
        if spec.method not in METHODS or spec.folder is None:
            raise CommandError(
                f"--drafter {args.drafter}: expected METHOD:DIR of {', '.join(METHODS)}"
            )
        folder = spec.folder.resolve()
        verifier: dict[str, str | bool] = {"target": str(args.target.resolve())}
        if args.weights is not None:
            verifier["weights"] = args.weights
        options = dict(spec.options)
        if spec.method == "selfspec":
            verifier["share-weights"] = True
        roots = [f"--root={root}" for root in (folder, *spec.folders)]
        load = drafter_pb2.LoadDrafterRequest(
            method=spec.method, folder=str(folder), options=options
        )
        services = measuring(
            [
                f"--{name}" if value is True else f"--{name}={value}"
                for name, value in verifier.items()
            ],
            roots,
            load,
            read_prompts(args.prompts)[: args.count],
            args.tokens,
            args.temperature,
        )

        async def search() -> tuple[list[TuningStep], float]:
            async with services as (measure, baseline):
                return await tune(spec.method, measure), baseline

        steps, baseline = run_async(search())
        options |= steps[-1].chosen.options
        if spec.method == "selfspec":
            # `serve` starts both services at once: the drafter must wait for the shared weights.
            options.setdefault("share_weights", "always")
        tail = "".join(f",{name}={value}" for name, value in options.items())
        found = f"{spec.name}={spec.method}:{folder}{tail}"
        args.output.write_text(to_toml(verifier, found, steps, baseline), encoding="utf-8")
    Output(soft_wrap=False).print(*(to_table(step, baseline) for step in steps))
    print(f"written: {args.output} (paceline serve --config {args.output})")
    return 0


@dataclass(frozen=True)
class TuningRun:
    """Result of one setting on all prompts."""

    options: dict[str, str]
    accepted_length: float
    """Mean number of tokens emitted in a drafted round, the bonus token included."""
    tokens_per_second: float
    """Speed after the first token."""

    @property
    def label(self) -> str:
        """The options in one line."""
        return " ".join(f"{name}={value}" for name, value in self.options.items())


@dataclass(frozen=True)
class TuningStep:
    """One sweep."""

    title: str
    runs: list[TuningRun]
    chosen: TuningRun


Measure = Callable[[Mapping[str, str]], Awaitable[TuningRun]]
"""Measures a drafter with these options added to its own."""


async def tune(method: str, measure: Measure) -> list[TuningStep]:
    """Runs all steps of one of `METHODS`. The setting chosen in the last is the result.

    `selfspec` (SpecAttn, section 3.4): the smallest sparse ratio with a stable accepted length, at
    the longest chain; then the fastest chain length at that ratio; then the fastest ratio near it
    at that length. Other methods: the fastest shape of the tree.
    """

    def setting(ratio: float, depth: int) -> dict[str, str]:
        return {"ratio": f"{ratio:.3g}", "context": str(MIN_CONTEXT), "depth": str(depth)}

    async def sweep(settings: Iterable[Mapping[str, str]]) -> list[TuningRun]:
        return [await measure(each) for each in settings]

    def fastest(title: str, runs: list[TuningRun]) -> TuningStep:
        return TuningStep(title, runs, max(runs, key=lambda run: run.tokens_per_second))

    if method != "selfspec":
        shapes = [{"widths": widths, "max_nodes": str(nodes)} for widths, nodes in TREES]
        return [fastest("shape of the tree", await sweep(shapes))]
    first = await sweep(setting(ratio, max(DEPTHS)) for ratio in RATIOS)
    best = max(run.accepted_length for run in first)
    stable = next(run for run in first if run.accepted_length >= STABLE * best)
    ratio = float(stable.options["ratio"])
    by_depth = fastest("drafted tokens", await sweep(setting(ratio, depth) for depth in DEPTHS))
    depth = int(by_depth.chosen.options["depth"])
    near = await sweep(setting(min(1.0, ratio * factor), depth) for factor in NEIGHBOURS)
    return [
        TuningStep("sparse ratio, long chains", first, stable),
        by_depth,
        fastest("sparse ratio, refined", near),
    ]


@asynccontextmanager
async def measuring(
    verifier: Sequence[str],
    drafter: Sequence[str],
    load: drafter_pb2.LoadDrafterRequest,
    prompts: Sequence[str | list[int]],
    tokens: int,
    temperature: float,
) -> AsyncIterator[tuple[Measure, float]]:
    """Starts a verifier and a drafter; yields what measures a setting, and the plain speed.

    Each prompt is prefilled once: every generation forks the cache of a plain one. Every round
    drafts, also where that is slower.

    `verifier` and `drafter` are arguments of these commands; `load` has the options of the drafter
    that all runs share, and `tokens` are generated after each prompt. What measures raises
    CommandError: the drafter cannot be loaded so, or drafts nothing.
    """
    async with AsyncExitStack() as running:
        verifying = ServiceProcess("verifier", [*verifier, f"--lease-seconds={_LEASE_SECONDS}"])
        drafting = ServiceProcess("drafter", drafter)
        for each in (verifying, drafting):
            await running.enter_async_context(each)
        channel = await running.enter_async_context(
            grpc.aio.insecure_channel(drafting.address, NO_PROXY)
        )
        registry: Any = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        client = await running.enter_async_context(
            Client(
                verifying.address,
                drafter_address=drafting.address,
                drafting=DraftOptions(timeout=10.0, adaptive=False),
            )
        )
        parents: list[Generation] = []

        async def generate(index: int, name: str, count: int) -> GenerationResult:
            return await client.generate(
                prompts[index],
                max_new_tokens=count,
                temperature=temperature,
                seed=index,
                drafter=name,
                ignore_eos=True,
                parent=parents[index],
            )

        async def measure(options: Mapping[str, str]) -> TuningRun:
            request = drafter_pb2.LoadDrafterRequest(name="run", activate=True)
            request.MergeFrom(load)
            request.options.update(options)
            try:
                await registry.LoadDrafter(request, timeout=_LOAD_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise CommandError(f"the drafter cannot be loaded: {error.details()}") from error
            await generate(0, "run", min(_WARM_UP, tokens))
            results = [await generate(index, "run", tokens) for index in range(len(prompts))]
            unload = drafter_pb2.UnloadDrafterRequest(name="run", force=True)
            await registry.UnloadDrafter(unload, timeout=_LOAD_SECONDS)
            rounds = [each for result in results for each in result.stats.rounds if each.drafted]
            if not rounds:
                reasons = {reason for result in results for reason in result.stats.fallbacks}
                raise CommandError(
                    f"the drafter drafted nothing with {dict(options)} "
                    f"({', '.join(sorted(reasons)) or 'empty trees'}); try it with paceline "
                    "generate"
                )
            length = sum(each.emitted for each in rounds) / len(rounds)
            run = TuningRun(dict(options), length, _speed(results))
            text = f"accepted length {length:.2f}, {run.tokens_per_second:.1f} tokens/s"
            print(f"{run.label}: {text}", file=sys.stderr, flush=True)
            return run

        plain = []
        for index, prompt in enumerate(prompts):
            parent = client.generate(
                prompt, max_new_tokens=1, drafter="none", seed=0, ignore_eos=True, keep_cache=True
            )
            running.push_async_callback(parent.aclose)
            parents.append(parent)
            await parent
            plain.append(await generate(index, "none", tokens))
        yield measure, _speed(plain)


def _speed(results: Sequence[GenerationResult]) -> float:
    """Tokens per second after each text's first token."""
    tokens = sum(len(result.token_ids) - 1 for result in results)
    seconds = sum(result.stats.total_ms - result.stats.first_token_ms for result in results) / 1e3
    return tokens / seconds


def to_toml(
    verifier: Mapping[str, str | bool], load: str, steps: Sequence[TuningStep], baseline: float
) -> str:
    """A config file for `paceline serve`, `paceline verifier` and `paceline drafter`.

    It has the verifier's arguments by their long names, and the drafter with the settings chosen in
    the last step. `baseline` is the speed without a drafter, in tokens/s.
    """
    best = steps[-1].chosen
    lines = [
        f"# Found by paceline tune: {best.tokens_per_second:.1f} tokens/s, accepted length "
        f"{best.accepted_length:.2f}; {baseline:.1f} tokens/s without a drafter."
    ]
    if best.tokens_per_second < baseline:
        lines.append("# Drafting does not pay with these prompts here: services will not draft.")
    lines += ["", "[verifier]", *(f"{key} = {json.dumps(v)}" for key, v in verifier.items())]
    lines += ["", "[drafter]", f"load = [{json.dumps(load)}]", ""]
    return "\n".join(lines)


def to_table(step: TuningStep, baseline: float) -> Table:
    """The runs of a step; `baseline` as in `to_toml`."""
    table = Table("setting", "accepted length", "tokens/s", "speed-up", "", title=step.title)
    for run in step.runs:
        speed = run.tokens_per_second
        values = f"{run.accepted_length:.2f}", f"{speed:.1f}", f"{speed / baseline:.2f}x"
        table.add_row(run.label, *values, "chosen" if run is step.chosen else "")
    return table
