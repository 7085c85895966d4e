"""Step and verification times of an 8B model with random weights, by CUDA graphs and without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.bench.gpu.cases import (
    EIGHT_BILLION,
    SMALL,
    Pages,
    RandomWeights,
    arguments,
    copy_bandwidth,
    fail_if_missed,
    median_ms,
    report,
)
from paceline.decoder import Decoder, GraphRunner
from paceline.decoder.products import use_library_without_splits
from paceline.kernels import ProbedBlock, TreeSegment, plan_trees

CONTEXTS = (2048, 32768)
NODES = (1, 8, 16, 64)
NODES_TARGET = 1.3
"""Most time of a step with 64 nodes behind the longest context, over that of one."""


def main() -> None:
    """Report times of n nodes behind each context, beside the bound by memory bandwidth. Fails if
    the target is missed."""
    device = arguments()
    config = EIGHT_BILLION
    contexts: tuple[int, ...] = CONTEXTS
    if device.type == "cpu":
        config, contexts = replace(SMALL, layers=2, windows=(None, 300)), (300,)
    decoder = Decoder(config, RandomWeights(config, device, 0), device)
    if device.type == "cuda":  # as a verifier serves by default
        use_library_without_splits(fixed=True)
        report("products", str(decoder.fix_products()))
    *layer, head = (linear.in_features * linear.out_features for linear in decoder.linears())
    weight_bytes = (sum(layer) * config.layers + head) * config.dtype.itemsize
    bandwidth = copy_bandwidth(device)
    report("weight_bytes", weight_bytes)
    report("copy_gb_s", bandwidth)
    for context in contexts:
        # A copy reads and writes; reading alone reaches the same rate.
        bound = (weight_bytes + context * config.kv_bytes_per_token) / bandwidth / 1e6
        with torch.inference_mode():
            found = _times(decoder, context)
        by_nodes = found["ms_by_nodes"]
        found |= {
            "bound_ms": bound,
            "step_over_bound": by_nodes["1"] / bound,
            "64_nodes_over_step": by_nodes["64"] / by_nodes["1"],
        }
        report(f"context {context}", found)
    missed = found["64_nodes_over_step"] > NODES_TARGET
    fail_if_missed([f"64 nodes take more than {NODES_TARGET} steps"] * missed, device)


def _times(decoder: Decoder, context: int) -> dict[str, Any]:
    """Milliseconds of passes behind `context` tokens."""
    config, device = decoder.config, decoder.device
    pages = Pages(config, device, context + 256)
    pages.pool.normal_()
    graphs = GraphRunner(decoder, pages)
    by_nodes = {}
    for nodes in NODES:
        parents = (-1, *((node - 1) // 2 for node in range(1, nodes)))
        segments = [TreeSegment(0, context, parents, nodes)]
        replay = partial(graphs.forward, list(range(nodes)), segments, [0])
        by_nodes[str(nodes)] = median_ms(replay, device)
    found: dict[str, Any] = {"ms_by_nodes": by_nodes}
    if device.type == "cuda":
        scores = torch.empty(config.layers, 2, config.kv_heads, context, device=device)
        chain = [TreeSegment(0, context, None, 16)]
        layers = tuple(range(config.layers))
        probed = [ProbedBlock(0, (0, 15), scores)]
        note = partial(graphs.forward, list(range(16)), chain, [0], (), layers, probed)
        found["16_nodes_with_scores_over_without"] = median_ms(note, device) / by_nodes["16"]

    def eager() -> None:
        plan = plan_trees([TreeSegment(0, context, None, 1)], device=device)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        decoder.forward(token, plan, [pages], logit_rows=None)

    return {**found, "ms_without_graph": median_ms(eager, device)}


if __name__ == "__main__":
    main()
