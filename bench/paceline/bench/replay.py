"""`paceline bench replay`: the services apart from any drafter.

A recorded continuation is drafted, each token right with a chosen probability, and the rate is
compared with that of bare forward passes over the same numbers of nodes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from paceline.bench.models import Models
from paceline.bench.plugins import register
from paceline.bench.prompts import long_prompts
from paceline.bench.record import Results, make_console
from paceline.bench.replay_method import METHODS
from paceline.bench.services import ALWAYS, Sample, generate, recording, services
from paceline.bench.step.engines import PacelineEngine


async def measure(
    models: Models,
    *,
    weights: str,
    acceptance: float,
    nodes: int,
    tokens: int,
    context: int,
    level_ms: float = 0.0,
    overlap: bool = False,
) -> dict[str, Any]:
    """Rates with a drafter of the recorded continuation; times in ms, medians over rounds.

    `efficiency` is the measured rate over the ideal one, which is accepted length over the time of
    a bare forward pass of anchor and nodes plus that of the draft.

    Args:
        models: The target and its prompts.
        weights: Format of the target's weights.
        acceptance: Probability that a drafted token is the recorded one.
        nodes: Nodes of a tree.
        tokens: New tokens.
        context: Tokens of the prompt.
        level_ms: Time that the drafter sleeps for each level.
        overlap: Whether it drafts ahead.
    """
    [prompt] = long_prompts(models.prompts, models.target, context, 1)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file = Path(folder) / "recording.jsonl"
        file.write_text(await recording(models.target, weights, prompt, tokens))
        spec = f"replay:{file},p={acceptance},max_nodes={nodes},seed=1,level_ms={level_ms}"
        options = ["--overlap" if overlap else "--no-overlap"]
        environment = register(Path(folder), METHODS)
        with services(
            models.target, {"replay": spec}, weights, drafter=options, environment=environment
        ) as pair:
            async with pair.client(ALWAYS) as client:
                await generate(client, prompt, 32, "replay")
                plain = await generate(client, prompt, tokens, "none")
                drafted = await generate(client, prompt, tokens, "replay")
    rounds = drafted.drafted
    draft_ms = median(entry.draft_ms for entry in rounds)
    bare = PacelineEngine(models.target, weights).measure(context + tokens // 2, (1, nodes + 1))
    step_ms, forward_ms = bare["ms_1"], bare[f"ms_{nodes + 1}"]
    length = drafted.stats.mean_accepted_length
    rate, plain_rate = decode_rate(drafted), decode_rate(plain)
    ideal = length / (forward_ms + draft_ms) * 1e3
    return {
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
        "accepted_length": length,
        "bare_forward_ms": forward_ms,
        "bare_step_ms": step_ms,
        "draft_ms": draft_ms,
        "verify_ms": median(entry.verify_ms for entry in rounds),
        "overhead_ms": median(e.round_ms - e.draft_ms - e.verify_ms for e in rounds),
        "ideal_tokens_per_second": ideal,
        "efficiency": rate / ideal,
        "identical": drafted.tokens == plain.tokens,
    }


def decode_rate(sample: Sample) -> float:
    """Tokens per second after the first token, and after the first round if that is drafted.

    A drafter reads the prompt in its first round.
    """
    stats = sample.stats
    tokens, milliseconds = len(sample.tokens) - 1, stats.total_ms - stats.first_token_ms
    if stats.rounds[0].drafted and len(stats.rounds) > 1:
        tokens -= stats.rounds[0].emitted
        milliseconds -= stats.rounds[0].round_ms
    return tokens / milliseconds * 1e3


def run(args: argparse.Namespace) -> int:
    """Measure one acceptance probability and number of nodes."""
    console = make_console()
    models = Models.of(args)
    head = {"weights": args.weights, "tokens": args.tokens, "context": args.context}
    results = Results("replay", args.output, **head)
    draft = {"level_ms": args.level_ms, "overlap": args.overlap}
    found = uvloop.run(
        measure(models, acceptance=args.acceptance, nodes=args.nodes, **head, **draft)
    )
    level = f", {args.level_ms:g} ms a level" if args.level_ms else ""
    ahead = ", overlap" if args.overlap else ""
    name = f"{models.target.name}, p = {args.acceptance:g}, {args.nodes} nodes{level}{ahead}"
    results.add(name, found)
    for name, value in found.items():
        console.print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")
    console.print(f"written to {results.file}")
    return 0
