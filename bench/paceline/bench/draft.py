"""The LongSpec drafter's speed: by context, in the manner of LongSpec's table 5, and by tree."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.prompts import Prompt
from paceline.bench.rounds import TimedRound, at_context, continued
from paceline.decoder import Decoder, load_config
from paceline.decoder.weights import Checkpoint
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.v1 import sampling_pb2

CONTEXTS = (1024, 2048, 4096, 8192, 16_384)
TREES = (
    ("8,8", 10), ("4,4,4", 12), ("8,8,8", 12), ("8,8,8", 16), ("4,4,4,4", 16), ("4,8,8,8", 16),
    ("8,8,8,8", 16), ("8,8,8,8", 24), ("4,8,8,8,8", 36),
)  # fmt: skip
"""Widths, and most nodes of the tree."""

REACHES = (0, 2048, 1024, 512, 256)
"""Target positions that a draft reads; 0: all."""

PROMPT_SETS = ("heldout", "trained")
"""Sets that say what a drafter is worth; the others are made for prompt lookup."""

_ROUNDS = 15
_WARM_UP = 3
_SAMPLINGS = {
    "0": sampling_pb2.SamplingParams(),
    "1": sampling_pb2.SamplingParams(temperature=1.0, seed=1),
}


def by_context(
    target: Path,
    drafter: Path,
    work: Path,
    dtype: str,
    *,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 3,
) -> list[dict[str, float]]:
    """Medians over rounds of each part of a round, at the default tree with no branch halted.

    Texts, keys and values are random, and both models are taken to have a longer context than
    they were trained for: times do not mind. Contexts take turns, so that a drift of the machine's
    speed meets all of them. ``draft_all_ms`` is a draft that reads the whole context.

    Args:
        target: Folder of the target.
        drafter: Folder of its LongSpec drafter.
        work: Takes a copy of the drafter.
        dtype: Of both.
        contexts: Committed positions.
        repeats: Passes over them.
    """
    longest = max(contexts) + 1024
    config = replace(load_config(target, dtype), max_position=longest)
    with torch.inference_mode():
        decoder = Decoder(config, Checkpoint(target, config.dtype, "cpu"), "cpu")
    stretched = _stretched(drafter, work / "drafter", longest)
    drafters = {
        name: _load(stretched, target, dtype, min_survival="0", **options)
        for name, options in {"": {}, "_all": {"context": "0"}}.items()
    }
    rounds: dict[tuple[int, str], list[TimedRound]] = defaultdict(list)
    for _ in range(repeats):
        for context in contexts:
            for name, loaded in drafters.items():
                found = at_context(decoder, loaded, context, _WARM_UP + _ROUNDS)
                rounds[context, name] += found[_WARM_UP:]
    return [
        {
            "context": context,
            "nodes": rounds[context, ""][0].nodes,
            "draft_ms": _median(r.draft_ms for r in rounds[context, ""]),
            "draft_all_ms": _median(r.draft_ms for r in rounds[context, "_all"]),
            "target_ms": _median(r.target_ms for r in rounds[context, ""]),
            "settle_ms": _median(r.settle_ms for r in rounds[context, ""]),
        }
        for context in contexts
    ]


def by_tree(
    target: Path,
    drafter: Path,
    prompts: Sequence[Prompt],
    dtype: str,
    *,
    tokens: int = 128,
    trees: Sequence[tuple[str, int]] = TREES,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """What trees of different shapes cost and bring, by temperature and set of prompts.

    ``tokens_per_second`` is of rounds without services between the two. Trees take turns prompt by
    prompt.
    """
    decoder = Decoder.load(target, dtype)
    drafters = {
        tree: _load(drafter, target, dtype, widths=tree[0], max_nodes=str(tree[1]))
        for tree in trees
    }
    rounds: dict[tuple[str, str, tuple[str, int]], list[TimedRound]] = defaultdict(list)
    for prompt in prompts:
        progress(f"trees: {prompt.set} {prompt.name}")
        for temperature, sampling in _SAMPLINGS.items():
            for tree, loaded in drafters.items():
                found = continued(decoder, loaded, prompt.tokens, tokens, sampling)[1]
                rounds[temperature, prompt.set, tree] += found
    return [
        {
            "temperature": temperature,
            "prompts": kind,
            "widths": widths,
            "max_nodes": most,
            "nodes": statistics.mean(r.nodes for r in found),
            "accepted_length": statistics.mean(r.emitted for r in found),
            "draft_ms": statistics.mean(r.draft_ms for r in found),
            "target_ms": statistics.mean(r.target_ms for r in found),
            "tokens_per_second": 1e3
            * sum(r.emitted for r in found)
            / sum(r.round_ms for r in found),
        }
        for (temperature, kind, (widths, most)), found in rounds.items()
    ]


def _load(drafter: Path, target: Path, dtype: str, **options: str) -> LongSpecDrafter:
    given = {"target": str(target), "dtype": dtype, **options}
    return LongSpecDrafter.load(drafter, given, Resources(threads=torch.get_num_threads()))


def _stretched(folder: Path, copy: Path, positions: int) -> Path:
    """A copy of a drafter whose config.json says that its target has a longer context."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = positions
    path.write_text(json.dumps(config))
    return copy


def _median(times: Iterable[float]) -> float:
    return statistics.median(times)
