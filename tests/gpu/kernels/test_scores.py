"""Scores of attention that CUDA graphs record."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from paceline.bench.gpu.cases import SMALL, Pages, RandomWeights
from paceline.convert import Packer
from paceline.cuda.graphs import GraphRunner
from paceline.decoder import Decoder
from paceline.kernels import Probe, ProbedBlock, QueryBlock, plan_trees

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize(("nodes", "weights"), [((0, 2), False), ((0, 1, 2), False), ((1,), True)])
@torch.inference_mode()
def test_graphs_record_the_scores_of_a_plain_pass(
    device: torch.device, nodes: tuple[int, ...], weights: bool
) -> None:
    decoder = Decoder(SMALL, Packer(SMALL, RandomWeights(SMALL, device, 0), device), device)
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
