"""End to end in float32: texts of the GPU are those of the CPU, plain, in trees, by graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.bench.gpu.models import SMALL, Pages, RandomWeights, Text
from paceline.decoder import Decoder, GraphRunner
from paceline.kernels import NotedBlock, Probe, SamplingParams, TreeSegment, plan_trees

TOKENS = 96


def plain_text(decoder: Decoder, sampling: SamplingParams, prompt: list[int]) -> list[int]:
    """Token by token."""
    text = Text(decoder, sampling)
    text.prefill(prompt)
    while len(text.tokens) < len(prompt) + TOKENS:
        text.step([])
    return text.tokens


def main() -> None:
    """Greedy and sampled."""
    device, seed = arguments()
    cpu = torch.device("cpu")
    weights = dict(RandomWeights(SMALL, cpu, seed))
    theirs = Decoder(SMALL, weights, cpu)
    there = {name: tensor.to(device) for name, tensor in weights.items()}
    ours = Decoder(SMALL, there, device)
    prompt = torch.randint(SMALL.vocab_size, (200,)).tolist()
    compared = 0
    with torch.inference_mode():
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, top_p=0.95, top_k=300, seed=seed),
        ):
            expected = plain_text(theirs, sampling, prompt)
            found = plain_text(ours, sampling, prompt)
            require(found == expected, f"plain text differs from token {_first(found, expected)}")
            for graphs in (False, True)[: 2 if device.type == "cuda" else 1]:
                text = Text(ours, sampling, graphs)
                text.prefill(prompt)
                rounds = 0
                while len(text.tokens) + 5 < len(expected):
                    at = len(text.tokens)
                    drafted = expected[at : at + 4]
                    if rounds % 3 == 2:  # wrong from its third token on
                        drafted[2] = (drafted[2] + 7) % SMALL.vocab_size
                    text.step(drafted)
                    rounds += 1
                same = text.tokens == expected[: len(text.tokens)]
                at = _first(text.tokens, expected)
                require(same, f"in trees (graphs: {graphs}) it differs from token {at}")
                require(rounds < TOKENS // 2, "drafted tokens are not accepted")
                compared += len(text.tokens) - len(prompt)
        if device.type == "cuda":
            check_notes(ours)
    report("tokens_compared", compared + 2 * TOKENS)
    finish()


def check_notes(decoder: Decoder) -> None:
    """Scores that a captured pass notes in all layers are those of a pass launched step by step."""
    config, device, prefix, nodes = decoder.config, decoder.device, 700, (0, 2)
    pages = Pages(config, device, 1024)
    pages.pool.normal_()
    segment = TreeSegment(0, prefix, (-1, 0, 0), 3)
    layers = tuple(layer for layer, window in enumerate(config.windows) if window is None)
    shape = (len(layers), len(nodes), config.kv_heads, prefix)
    captured, plain = (torch.full(shape, torch.nan, device=device) for _ in range(2))
    noted = [NotedBlock(0, nodes, captured)]
    GraphRunner(decoder, pages).forward([1, 2, 3], [segment], [0], (), layers, noted)
    tokens = torch.tensor([1, 2, 3], device=device)
    plan = plan_trees([segment], device=device)
    observer = Noting(dict(zip(layers, plain, strict=True)), nodes)
    decoder.forward(tokens, plan, [pages], logit_rows=None, observer=observer)
    gap = float((captured - plain).abs().max())
    require(gap < 1e-2, f"scores noted in a graph differ by {gap}")
    report("noted_in_a_graph", gap)


class Noting:
    """Notes rows of the first block into a room for each layer; an ``AttentionObserver``."""

    def __init__(self, rooms: Mapping[int, Tensor], nodes: Sequence[int]) -> None:
        self._rooms, self._nodes = rooms, nodes

    def probes(self, layer: int) -> list[Probe]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        return [
            Probe(0, node, room)
            for node, room in zip(self._nodes, self._rooms.get(layer, ()), strict=False)
        ]

    def attended(self, layer: int, q: Tensor) -> None:
        """Nothing more is to be done."""


def _first(found: list[int], expected: list[int]) -> int:
    pairs = zip(found, expected, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


if __name__ == "__main__":
    main()
