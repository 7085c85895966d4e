"""Step and verification times of an 8B model with random weights, by CUDA graphs and without."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.bench.gpu.cases import (
    EIGHT_BILLION,
    SMALL,
    Pages,
    RandomWeights,
    Targets,
    arguments,
    copy_bandwidth,
    fail_if_missed,
    median_ms,
    missed_targets,
    report,
)
from paceline.decoder import Decoder, DecoderConfig, GraphRunner
from paceline.decoder.products import use_library_without_splits
from paceline.kernels import ProbedBlock, QueryBlock, plan_trees

CONTEXTS = {"bfloat16": (2048, 2300, 32768, 33000), "int8": (2048, 2300)}
"""Tokens in front of a pass, by the format of weights. Chunks of keys begin at 2,048 and 32,768,
which is the best case of a tree; behind the others its paths compute the keys of a chunk again."""

NODES = (1, 8, 16, 64)

TARGETS: Targets = {
    **{(f"bfloat16, context {n}", "step_over_fast"): 1.04 for n in CONTEXTS["bfloat16"]},
    **{(f"bfloat16, context {n}", "64_nodes_over_step"): 1.3 for n in (32768, 33000)},
    ("int8, context 2048", "step_ms"): 4.2,
}
"""Most time of a step with equal bits over that of one with the library's choice of products, of a
step with 64 nodes over that of one, and of a step on an H100."""


def main() -> None:
    """Report times of n nodes in each format of weights. Fails if a target is missed."""
    device = arguments()
    config, contexts = EIGHT_BILLION, CONTEXTS
    if device.type == "cpu":
        config = replace(SMALL, layers=2, windows=(None, 300))
        contexts = dict.fromkeys(("float32", "int8"), (300,))
    bandwidth = copy_bandwidth(device)
    report("copy_gb_s", bandwidth)
    found: dict[str, dict[str, Any]] = {}
    for weights, behind in contexts.items():
        found |= measure(replace(config, weights=weights), behind, device, bandwidth)
    fail_if_missed(missed_targets(found, TARGETS), device)


def measure(
    config: DecoderConfig, contexts: Sequence[int], device: torch.device, bandwidth: float
) -> dict[str, dict[str, Any]]:
    """Report times of n nodes behind each context, beside the bound by memory bandwidth.

    Args:
        config: The model, whose weights are random.
        contexts: Unit: tokens.
        device: Where it runs.
        bandwidth: Of memory. Unit: GB/s.

    Returns:
        What was reported of each context.
    """
    decoder = Decoder(config, RandomWeights(config, device, 0), device)
    fast: dict[int, float] = {}
    if device.type == "cuda":  # numerics fast, then what a verifier serves by default
        use_library_without_splits(fixed=False)
        fast = {context: _times(decoder, context, (1,))["1"] for context in contexts}
        use_library_without_splits(fixed=True)
        report(f"{config.weights}, products", str(decoder.fix_products()))
    *layer, head = (linear.in_features * linear.out_features for linear in decoder.linears())
    weight_bytes = sum(layer) * config.layers + head
    weight_bytes *= 1 if config.weights == "int8" else config.dtype.itemsize
    report(f"{config.weights}, weight_bytes", weight_bytes)
    found: dict[str, dict[str, Any]] = {}
    for context in contexts:
        # A copy reads and writes; reading alone reaches the same rate.
        bound = (weight_bytes + context * config.kv_bytes_per_token) / bandwidth / 1e6
        by_nodes = _times(decoder, context, NODES)
        figures: dict[str, Any] = {
            "ms_by_nodes": by_nodes,
            "step_ms": by_nodes["1"],
            "bound_ms": bound,
            "step_over_bound": by_nodes["1"] / bound,
            "64_nodes_over_step": by_nodes["64"] / by_nodes["1"],
        }
        if fast:
            figures["step_over_fast"] = by_nodes["1"] / fast[context]
        name = f"{config.weights}, context {context}"
        found[name] = figures | _others(decoder, context, by_nodes["16"])
        report(name, found[name])
        gc.collect()  # graphs and the pages that they read refer to one another
    return found


@torch.inference_mode()
def _times(decoder: Decoder, context: int, counts: Sequence[int]) -> dict[str, float]:
    """Milliseconds of passes of so many nodes behind `context` tokens."""
    device = decoder.device
    pages = Pages(decoder.config, device, context + 256)
    pages.pool.normal_()
    graphs = GraphRunner(decoder, pages)
    by_nodes = {}
    for nodes in counts:
        parents = (-1, *((node - 1) // 2 for node in range(1, nodes)))
        blocks = [QueryBlock(0, context, parents, nodes)]
        replay = partial(graphs.forward, list(range(nodes)), blocks, [0])
        assert replay() is not None, f"there is no graph for {nodes} nodes"
        by_nodes[str(nodes)] = median_ms(replay, device)
    return by_nodes


@torch.inference_mode()
def _others(decoder: Decoder, context: int, ms_of_16: float) -> dict[str, float]:
    """What recorded scores add to a pass of 16 nodes, and a step without a graph."""
    config, device = decoder.config, decoder.device
    pages = Pages(config, device, context + 256)
    pages.pool.normal_()
    graphs = GraphRunner(decoder, pages)
    found: dict[str, float] = {}
    if device.type == "cuda":
        scores = torch.empty(config.layers, 2, config.kv_heads, context, device=device)
        chain = [QueryBlock(0, context, None, 16)]
        layers = tuple(range(config.layers))
        probed = [ProbedBlock(0, (0, 15), scores)]
        note = partial(graphs.forward, list(range(16)), chain, [0], (), layers, probed)
        assert note() is not None, "there is no graph that records scores"
        found["16_nodes_with_scores_over_without"] = median_ms(note, device) / ms_of_16

    def eager() -> None:
        plan = plan_trees([QueryBlock(0, context, None, 1)], device=device)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        decoder.forward(token, plan, [pages], logit_rows=None)

    return {**found, "ms_without_graph": median_ms(eager, device)}


if __name__ == "__main__":
    main()
