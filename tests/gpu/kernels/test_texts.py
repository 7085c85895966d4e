"""Texts in float32 on the GPU are those of the CPU: plain, in trees, and by CUDA graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.bench.gpu.cases import SMALL, Pages, RandomWeights
from paceline.convert import Packer
from paceline.cuda.graphs import GraphRunner
from paceline.decoder import Decoder
from paceline.kernels import (
    Probe,
    ProbedBlock,
    QueryBlock,
    SamplingRules,
    choose_tokens,
    plan_trees,
)

pytestmark = pytest.mark.gpu

TOKENS = 96


class Text:
    """One text, extended by trees whose right path is accepted."""

    def __init__(self, decoder: Decoder, sampling: SamplingRules, graphs: bool = False) -> None:
        self.decoder, self.sampling = decoder, sampling
        self.pages = Pages(decoder.config, decoder.device, 2048)
        self.graphs = GraphRunner(decoder, self.pages) if graphs else None
        self.tokens: list[int] = []

    def run(self, start: int, tokens: list[int], parents: tuple[int, ...] | None) -> list[int]:
        """Token behind each node of a block at ``start``."""
        block = QueryBlock(0, start, parents, len(tokens))
        logits = None
        if self.graphs is not None:
            found = self.graphs.forward(tokens, [block], [0])
            logits = None if found is None else found.logits
        if logits is None:
            device = self.decoder.device
            plan = plan_trees([block], device=device)
            logits = self.decoder.forward(
                torch.tensor(tokens, device=device), plan, [self.pages], logit_rows=None
            ).logits
        positions = [start + depth + 1 for depth in block.depths]
        return choose_tokens(logits, [self.sampling] * len(tokens), positions).tolist()

    def prefill(self, prompt: list[int]) -> None:
        """Put in a prompt of at most 256 tokens and choose the first token."""
        self.tokens = [*prompt, self.run(0, prompt, None)[-1]]

    def step(self, drafted: list[int]) -> int:
        """Verify a tree: a trunk of drafted tokens with a wrong sibling beside each.

        Returns the number of tokens emitted.
        """
        start, tokens, parents = len(self.tokens) - 1, [self.tokens[-1]], [-1]
        trunk = [0]
        for token in drafted:
            tokens += [(token + 1) % self.decoder.config.vocab_size, token]
            parents += [trunk[-1], trunk[-1]]
            trunk.append(len(tokens) - 1)
        behind = self.run(start, tokens, tuple(parents))
        emitted = []
        for at, node in enumerate(trunk):
            emitted.append(behind[node])
            if at == len(drafted) or behind[node] != drafted[at]:
                break
        self.keep([start + node for node in trunk[1 : len(emitted)]], start + 1)
        self.tokens += emitted
        return len(emitted)

    def keep(self, slots: list[int], start: int) -> None:
        """Move accepted keys and values up behind the anchor's."""
        device = self.decoder.device
        there = torch.tensor(slots, dtype=torch.int64, device=device)
        goals = torch.arange(start, start + len(slots), device=device)
        for layer in range(self.decoder.config.layers):
            for plane in self.pages.layer(layer):
                plane.write(goals, plane.gather(there))


def test_weights_in_8_bits_run_in_graphs(device: torch.device) -> None:
    config = replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, weights="bfloat16")
    tokens, block, found = list(range(64)), QueryBlock(0, 0, None, 64), []
    for weights, graphs in (("bfloat16", False), ("int8", False), ("int8", True)):
        pages = Pages(config, device, 2048)
        other = replace(config, weights=weights)
        decoder = Decoder(other, Packer(other, RandomWeights(config, device, 0), device), device)
        if graphs:
            result = GraphRunner(decoder, pages).forward(tokens, [block], [0])
            assert result is not None
        else:
            plan = plan_trees([block], device=device)
            result = decoder.forward(
                torch.tensor(tokens, device=device), plan, [pages], logit_rows=None
            )
        found.append(result.logits.float())
    plain, eager, replayed = found
    # Roundings grow through random layers; unrelated logits differ by 1.4.
    assert (replayed - eager).norm() < 0.1 * eager.norm()
    assert 0.001 < (eager - plain).norm() / plain.norm() < 0.2


class Recorder:
    """An ``AttentionObserver`` of rows of the first block, with a buffer for each layer."""

    def __init__(
        self, buffers: Mapping[int, Tensor], nodes: Sequence[int], *, weights: bool
    ) -> None:
        self.buffers, self.nodes, self.weights = buffers, nodes, weights

    def probes(self, layer: int) -> list[Probe]:
        return [
            Probe(0, node, buffer, weights=self.weights)
            for node, buffer in zip(self.nodes, self.buffers.get(layer, ()), strict=False)
        ]

    def rows(self, layer: int) -> list[int]:
        return []

    def attended(self, layer: int, q: Tensor) -> None:
        """Probes hold all there is."""


def decoders(device: torch.device) -> tuple[Decoder, Decoder]:
    """The same weights on the CPU and on the device."""
    weights = dict(RandomWeights(SMALL, torch.device("cpu"), 0))
    there = {name: tensor.to(device) for name, tensor in weights.items()}
    return (
        Decoder(SMALL, Packer(SMALL, weights, "cpu"), "cpu"),
        Decoder(SMALL, Packer(SMALL, there, device), device),
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingRules(temperature=0.0),
        SamplingRules(temperature=1.0, top_p=0.95, top_k=300, seed=1),
    ],
)
@torch.inference_mode()
def test_texts_are_those_of_the_cpu(device: torch.device, sampling: SamplingRules) -> None:
    prompt = torch.randint(SMALL.vocab_size, (200,)).tolist()
    plain = []
    cpu, gpu = decoders(device)
    for decoder in (cpu, gpu):
        text = Text(decoder, sampling)
        text.prefill(prompt)
        while len(text.tokens) < len(prompt) + TOKENS:
            text.step([])
        plain.append(text.tokens)
    expected = plain[0]
    assert plain[1] == expected
    for graphs in (False, True):
        text = Text(gpu, sampling, graphs)
        text.prefill(prompt)
        rounds = 0
        while (at := len(text.tokens)) + 5 < len(expected):
            drafted = expected[at : at + 4]
            if rounds % 3 == 2:  # wrong from the third token on
                drafted[2] = (drafted[2] + 7) % SMALL.vocab_size
            text.step(drafted)
            rounds += 1
        assert text.tokens == expected[: len(text.tokens)], f"graphs: {graphs}"
        assert rounds < TOKENS // 2, "drafted tokens are not accepted"


@pytest.mark.parametrize(("nodes", "weights"), [((0, 2), False), ((0, 1, 2), False), ((1,), True)])
@torch.inference_mode()
def test_graphs_record_the_scores_of_a_plain_pass(
    device: torch.device, nodes: tuple[int, ...], weights: bool
) -> None:
    _, decoder = decoders(device)
    prefix = 700
    pages = Pages(SMALL, device, 1024)
    pages.pool.normal_()
    block = QueryBlock(0, prefix, (-1, 0, 0), 3)
    layers = tuple(layer for layer, window in enumerate(SMALL.windows) if window is None)
    shape = (len(layers), len(nodes), SMALL.kv_heads, prefix)
    captured, plain = (torch.full(shape, torch.nan, device=device) for _ in range(2))
    probed = [ProbedBlock(0, nodes, captured, weights)]
    GraphRunner(decoder, pages).forward([1, 2, 3], [block], [0], (), layers, probed)
    tokens = torch.tensor([1, 2, 3], device=device)
    plan = plan_trees([block], device=device)
    recorder = Recorder(dict(zip(layers, plain, strict=True)), nodes, weights=weights)
    decoder.forward(tokens, plan, [pages], logit_rows=None, observer=recorder)
    torch.testing.assert_close(captured, plain, atol=1e-2, rtol=0)
