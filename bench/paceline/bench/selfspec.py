"""SpecAttn on the demo target: what its selection costs, and what positions it finds are worth."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bench.figures import accepted_length
from paceline.bench.rounds import GREEDY, Chooses, at_context_text, continued_each
from paceline.bench.texts import Text
from paceline.decoder import Decoder
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.selfspec import SelfSpecDrafter
from paceline.kernels import TreePlan, TreeSegment, plan_trees, tree_attention
from paceline.kv.policies import STREAMING, load_policy
from paceline.kv.scores import AttentionScores
from paceline.kv.selection import PolicyFactory, SelectionPolicy, TopScores
from paceline.v1 import sampling_pb2
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.tree import DraftTree
from paceline.verifier.kv.segment import Segment

CONTEXT = 8192
"""Prompt and what is written after it. Unit: tokens."""

RATIO = 0.07
"""Of the context: SpecAttn's choice for all models and data (appendix B)."""

DEPTH = 7
"""Drafted tokens, as in SpecAttn's table 1."""

COLLECTED = (1024, 2048, 4096, 8192)
"""Contexts at which the cost of collecting is measured. Unit: tokens."""

_STEPS = 60
_WARM_UP = 5
_SAMPLINGS = {
    "T=0": GREEDY,
    "T=1": sampling_pb2.SamplingParams(temperature=1.0, seed=1),
}


class EveryRow(AttentionScores):
    """Looks at all rows of a round: what SpecAttn's two stand for."""

    def nodes(self, block: TreeSegment) -> tuple[int, ...]:
        return tuple(range(block.length))


def policies(layers: int) -> dict[str, Chooses]:
    """Selection policies by name; ``all rows`` is ``verified`` from all rows of a round."""
    every = range(layers)

    def all_rows(segment: Segment) -> TopScores:
        return TopScores(segment, EveryRow(segment, every))

    names = ("verified", "chunk_topk", "quest", STREAMING)
    loaded = {name: partial(_new_policy, load_policy(name), every) for name in names}
    return {**loaded, "all rows": all_rows}


def _new_policy(factory: PolicyFactory, layers: Sequence[int], segment: Segment) -> SelectionPolicy:
    return factory(segment, layers)


def lengthened(target: Path, folder: Path, positions: int) -> Path:
    """A copy of a target that reads longer texts than it was trained on: RoPE scaled by YaRN.

    The weights are the same file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    trained = config["max_position_embeddings"]
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": positions / trained,
        "original_max_position_embeddings": trained,
    }
    config["max_position_embeddings"] = positions
    for path in target.iterdir():
        if path.suffix in (".json", ".safetensors") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def accepted(
    target: Path,
    texts: Sequence[Text],
    *,
    dtype: str,
    tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Accepted lengths by set of texts, temperature and policy, chains of ``DEPTH``.

    ``all positions`` reads everything: the most that a selection can come to.

    Args:
        target: A target with room for ``CONTEXT``.
        texts: Prompts of ``CONTEXT - tokens``.
        dtype: Of the target.
        tokens: Written after each prompt.
        progress: Told what is done.
    """
    decoder = Decoder.load(target, dtype)
    chooses = policies(decoder.config.layers)
    drafter, dense = (_load(target, decoder, share) for share in (RATIO, 0.0))
    drafters = {name: (drafter, choose) for name, choose in chooses.items()}
    drafters["all positions"] = (dense, chooses["streaming"])
    rounds: dict[str, dict[str, dict[str, list[list[int]]]]] = {}
    for text in texts:
        for heat, sampling in _SAMPLINGS.items():
            progress(f"{text.set} {text.file}, {heat}")
            found = continued_each(decoder, drafters, text.tokens, tokens, sampling)
            cell = rounds.setdefault(text.set, {}).setdefault(heat, defaultdict(list))
            for name, timed in found.items():
                cell[name].append([round_.emitted - 1 for round_ in timed])
    return {
        kind: {
            heat: {name: accepted_length(each) for name, each in cell.items()}
            for heat, cell in heats.items()
        }
        for kind, heats in rounds.items()
    }


def costs(target: Path, dtype: str) -> dict[str, Any]:
    """What selecting costs the verifier, and attention the drafter.

    Args:
        target: A target with room for ``CONTEXT``.
        dtype: Of the target.
    """
    decoder = Decoder.load(target, dtype)
    return {
        "threads": torch.get_num_threads(),
        "drafted": DEPTH,
        "collection": collection(decoder, COLLECTED),
        "attention": {
            "context": CONTEXT,
            "ratio": RATIO,
            **attention_cost(decoder, CONTEXT, RATIO),
        },
    }


@torch.inference_mode()
def collection(decoder: Decoder, contexts: Sequence[int]) -> list[dict[str, float]]:
    """What noting the scores adds to a verification of a chain, by policy, as a share of it.

    Steps with and without take turns. Times are of the engine's thread alone, so that other
    processes do not count; on one thread of computing.
    """
    tree = DraftTree(list(range(DEPTH)), list(range(-1, DEPTH - 1)))
    rows = []
    for context in contexts:
        with at_context_text(decoder, context, DEPTH + 2) as text:
            assert isinstance(text.segment, Segment)
            watching = {
                name: choose(text.segment).observer
                for name, choose in policies(decoder.config.layers).items()
            }
            times: dict[str, list[float]] = defaultdict(list)
            order = list(watching)
            for _ in range(_WARM_UP + _STEPS):
                order.reverse()
                for name in order:
                    observer = watching[name]
                    text.observers = [] if observer is None else [observer]
                    batch = Batch()
                    batch.add_round(Round(text, 0, tree), tree)
                    begun = time.thread_time()
                    batch.forward(decoder)
                    times[name].append(time.thread_time() - begun)
        typical = {name: statistics.median(each[_WARM_UP:]) for name, each in times.items()}
        plain = typical.pop("streaming")
        shares = {name: seconds / plain - 1 for name, seconds in typical.items()}
        rows.append({"context": context, "verify_ms": plain * 1e3, **shares})
    return rows


@torch.inference_mode()
def attention_cost(decoder: Decoder, context: int, ratio: float) -> dict[str, float]:
    """Time of a drafted token's attention in all layers, sparse and full, and of the gathering.

    The gathering of chosen positions is done once a round; its share is that of ``DEPTH`` tokens.
    """
    config = decoder.config
    chosen = round(ratio * context)
    q = torch.randn(1, config.q_heads, config.head_dim, dtype=config.dtype)
    with at_context_text(decoder, context, DEPTH + 2) as text:
        assert isinstance(text.segment, Segment)
        layers = [text.segment.layer(index) for index in range(config.layers)]
        picks = [torch.randperm(context)[:chosen].sort().values for _ in layers]
        table = [
            (keys[:, : chosen + DEPTH].clone(), values[:, : chosen + DEPTH].clone())
            for keys, values in layers
        ]

        def attend(planes: Sequence[tuple[torch.Tensor, torch.Tensor]], plan: TreePlan) -> None:
            for keys, values in planes:
                tree_attention(q, [keys], [values], plan, scale=config.head_dim**-0.5)

        def gather() -> None:
            for into, planes, positions in zip(table, layers, picks, strict=True):
                for mine, theirs in zip(into, planes, strict=True):
                    mine[:, :chosen] = theirs.index_select(1, positions)

        def plan(start: int) -> TreePlan:
            return plan_trees([TreeSegment(0, start, None, 1)])

        acts: dict[str, Callable[[], None]] = {
            "full_ms": partial(attend, layers, plan(context)),
            "sparse_ms": partial(attend, table, plan(chosen + DEPTH // 2)),
            "gather_ms": gather,
        }
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(_WARM_UP + _STEPS):
            for name, act in acts.items():
                begun = time.thread_time()
                act()
                times[name].append((time.thread_time() - begun) * 1e3)
    found = {name: statistics.median(each[_WARM_UP:]) for name, each in times.items()}
    sparse = found["sparse_ms"] + found["gather_ms"] / DEPTH
    return {**found, "share": sparse / found["full_ms"], "positions": chosen}


def _load(target: Path, decoder: Decoder, ratio: float) -> SelfSpecDrafter:
    options: Mapping[str, str] = {
        "context": "64" if ratio else "0",
        "ratio": str(ratio),
        "depth": str(DEPTH),
        "min_survival": "0",
        "dtype": str(decoder.config.dtype).removeprefix("torch."),
    }
    return SelfSpecDrafter.load(target, options, Resources(threads=torch.get_num_threads()))
