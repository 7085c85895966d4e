"""A model of the shape of Llama 3 8B with random weights: what a step and a verification cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.bench.gpu.bandwidth import copy_bandwidth
from paceline.bench.gpu.checking import arguments, finish, median_ms, report
from paceline.bench.gpu.models import EIGHT_BILLION, SMALL, Pages, RandomWeights
from paceline.decoder import Decoder, GraphRunner
from paceline.kernels import NotedBlock, TreeSegment, plan_trees

CONTEXTS = (2048, 32768)
NODES = (1, 8, 16, 64)


def main() -> None:
    """Steps of n nodes behind two contexts, by CUDA graphs and launched one by one."""
    device, seed = arguments()
    config = EIGHT_BILLION
    contexts: tuple[int, ...] = CONTEXTS
    if device.type == "cpu":
        config, contexts = replace(SMALL, layers=2, windows=(None, 300)), (300,)
    decoder = Decoder(config, RandomWeights(config, device, seed), device)
    torch.cuda.empty_cache()
    weights = sum(layer.in_features * layer.out_features for layer in decoder.linears()[:-1])
    head = decoder.linears()[-1]
    size = config.dtype.itemsize
    weight_bytes = (weights * config.layers + head.in_features * head.out_features) * size
    bandwidth = copy_bandwidth(device)
    report("weight_bytes", weight_bytes)
    report("copy_gb_s", bandwidth)
    for context in contexts:
        pages = Pages(config, device, context + 256)
        pages.pool.normal_()
        graphs = GraphRunner(decoder, pages)
        found: dict[str, Any] = {}
        for nodes in NODES:
            parents = tuple((node - 1) // 2 for node in range(nodes))
            segments = [TreeSegment(0, context, (-1, *parents[1:]), nodes)]
            tokens = list(range(nodes))

            def replay(tokens=tokens, segments=segments, graphs=graphs) -> None:  # type: ignore[no-untyped-def]
                graphs.forward(tokens, segments, [0])

            with torch.inference_mode():
                found[str(nodes)] = median_ms(replay, device)
        noting = 0.0
        layers = tuple(range(config.layers))
        room = torch.empty(config.layers, 2, config.kv_heads, context, device=device)
        chain = [TreeSegment(0, context, None, 16)]

        def note(chain=chain, graphs=graphs, room=room, layers=layers) -> None:  # type: ignore[no-untyped-def]
            noted = [NotedBlock(0, (0, 15), room)]
            graphs.forward(list(range(16)), chain, [0], (), layers, noted)

        if device.type == "cuda":
            with torch.inference_mode():
                noting = median_ms(note, device)
        del room
        plan_one = [TreeSegment(0, context, None, 1)]

        def eager(plan_one=plan_one, pages=pages) -> None:  # type: ignore[no-untyped-def]
            plan = plan_trees(plan_one, device=device)
            token = torch.zeros(1, dtype=torch.int64, device=device)
            decoder.forward(token, plan, [pages], logit_rows=None)

        kv_bytes = context * config.kv_bytes_per_token
        # A copy reads and writes: of what it moves, reading alone gets the same rate.
        bound = (weight_bytes + kv_bytes) / bandwidth / 1e6
        report(f"context {context}", {
            "ms_by_nodes": found,
            "ms_without_graph": median_ms(eager, device),
            "bound_ms": bound,
            "step_over_bound": found["1"] / bound,
            "16_nodes_noted_over_not": noting / found["16"],
            "64_nodes_over_step": found["64"] / found["1"],
        })  # fmt: skip
    finish()


if __name__ == "__main__":
    main()
