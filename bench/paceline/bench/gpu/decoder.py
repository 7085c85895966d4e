"""Steps of an 8B model with random weights: times by CUDA graphs and without, and equal bits."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.bench.gpu.cases import (
    EIGHT_BILLION,
    SMALL,
    Pages,
    RandomWeights,
    Targets,
    copy_bandwidth,
    fail_if_missed,
    median_ms,
    missed_targets,
    report,
)
from paceline.convert import Packer
from paceline.cuda.graphs import GraphRunner
from paceline.cuda.products import use_library_without_splits
from paceline.decoder import Decoder, DecoderConfig
from paceline.device import device_of
from paceline.kernels import MAX_TREE_NODES, ProbedBlock, QueryBlock, plan_trees

# Tokens in front of a pass, by the format of weights. Chunks of keys begin at 2,048 and 32,768,
# which is the best case of a tree; behind the others its paths compute the keys of a chunk again.
STEP_CONTEXTS = {"bfloat16": (2048, 2300, 32768, 33000), "int8": (2048, 2300)}
NODES = (1, 8, 16, 64)
# Largest times: of a step with equal bits over one with the library's choice of products, of a step
# with 64 nodes over one with one, and of a step on an H100 in milliseconds.
TARGETS: Targets = {
    **{(f"bfloat16, context {n}", "step_over_fast"): 1.04 for n in STEP_CONTEXTS["bfloat16"]},
    **{(f"bfloat16, context {n}", "64_nodes_over_step"): 1.3 for n in (32768, 33000)},
    ("int8, context 2048", "step_ms"): 4.2,
}
# Positions in front of the compared tokens, by the format of weights. Fewer in int8, because
# attention is the same. Some trees cross a multiple of 64, 256 or 1,024.
CONTEXTS = {"bfloat16": (200, 250, 2040, 8000, 12280), "int8": (250, 2040)}
ROWS = 24  # tokens that plain decoding takes one at a time
OTHERS = 31  # sequences beside the compared one, in shorter contexts
OTHER_SLOTS = 1536  # positions of each of them
LEVELS = 12  # nodes on the compared path of a tree


def step(device: torch.device) -> None:
    """Report times of n nodes in each format of weights. Fails if a target is missed."""
    config, contexts = EIGHT_BILLION, STEP_CONTEXTS
    if device.type == "cpu":
        config = replace(SMALL, layers=2, windows=(None, 300))
        contexts = dict.fromkeys(("float32", "int8"), (300,))
    bandwidth = copy_bandwidth(device)
    report("copy_gb_s", bandwidth)
    figures: dict[str, dict[str, Any]] = {}
    for weights, behind in contexts.items():
        figures |= measure(replace(config, weights=weights), behind, device, bandwidth)
    fail_if_missed(missed_targets(figures, TARGETS), device)


def measure(
    config: DecoderConfig, contexts: Sequence[int], device: torch.device, bandwidth: float
) -> dict[str, dict[str, Any]]:
    """Report times of n nodes behind each context, beside the bound by memory bandwidth.

    Args:
        contexts: Unit: tokens.
        bandwidth: Of memory. Unit: GB/s.

    Returns:
        What was reported of each context.
    """
    decoder = Decoder(config, Packer(config, RandomWeights(config, device, 0), device), device)
    fast: dict[int, float] = {}
    if device.type == "cuda":  # numerics fast, then what a verifier serves by default
        use_library_without_splits(fixed=False)
        fast = {context: _times(decoder, context, (1,))["1"] for context in contexts}
        device_of(device).prepare(decoder, "auto")
        report(f"{config.weights}, products", str(decoder.products))
    *layer, head = (linear.in_features * linear.out_features for linear in decoder.linears())
    weight_bytes = sum(layer) * config.layers + head
    weight_bytes *= 1 if config.weights == "int8" else config.dtype.itemsize
    report(f"{config.weights}, weight_bytes", weight_bytes)
    by_case: dict[str, dict[str, Any]] = {}
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
        by_case[name] = figures | _others(decoder, context, by_nodes["16"])
        report(name, by_case[name])
        gc.collect()  # graphs and the pages that they read refer to one another
    return by_case


@torch.inference_mode()
def _times(decoder: Decoder, context: int, counts: Sequence[int]) -> dict[str, float]:
    """Return the milliseconds of passes of so many nodes behind `context` tokens."""
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
    """Return what recorded scores add to a pass of 16 nodes, and a step without a graph."""
    config, device = decoder.config, decoder.device
    pages = Pages(config, device, context + 256)
    pages.pool.normal_()
    graphs = GraphRunner(decoder, pages)
    figures: dict[str, float] = {}
    if device.type == "cuda":
        scores = torch.empty(config.layers, 2, config.kv_heads, context, device=device)
        chain = [QueryBlock(0, context, None, 16)]
        layers = tuple(range(config.layers))
        probed = [ProbedBlock(0, (0, 15), scores)]
        note = partial(graphs.forward, list(range(16)), chain, [0], (), layers, probed)
        assert note() is not None, "there is no graph that records scores"
        figures["16_nodes_with_scores_over_without"] = median_ms(note, device) / ms_of_16

    def eager() -> None:
        plan = plan_trees([QueryBlock(0, context, None, 1)], device=device)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        decoder.forward(token, plan, [pages], logit_rows=None)

    return {**figures, "ms_without_graph": median_ms(eager, device)}


def comb(levels: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the parents of a tree with `width` children at each level, and the nodes of the
    compared path: the last child of each level, so that its siblings lie in the slots before it."""
    parents, path = [-1], [0]
    for _ in range(1, levels):
        parents += [path[-1]] * width
        path.append(len(parents) - 1)
    return tuple(parents), tuple(path)


class Comparison:
    """Plain decoding of some tokens behind a context of random KV, and what else has their bits."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        """Fill the caches, and decode :data:`ROWS` tokens one at a time."""
        config, device = decoder.config, decoder.device
        self._decoder, self._context = decoder, context
        self._pages = Pages(config, device, context + 512, *[OTHER_SLOTS] * OTHERS)
        self._pages.pool.normal_()
        self._graphs = GraphRunner(decoder, self._pages)
        self._vocab = config.vocab_size
        self._tokens = [(7 * index + 11) % self._vocab for index in range(ROWS)]
        self._plain = self._alone()

    def _run(self, tokens: Sequence[int], blocks: Sequence[QueryBlock]) -> Tensor:
        rows = [block.sequence for block in blocks]
        placed = [replace(block, sequence=index) for index, block in enumerate(blocks)]
        result = self._graphs.forward(tokens, placed, rows)
        assert result is not None, "no graph has so many rows"
        return result.logits.clone()

    def _alone(self) -> Tensor:
        parts = [
            self._run([token], [QueryBlock(0, self._context + index, None, 1)])
            for index, token in enumerate(self._tokens)
        ]
        return torch.cat(parts)

    def _differing(self, logits: Tensor, wanted: Tensor | None = None) -> int:
        wanted = self._plain[: len(logits)] if wanted is None else wanted
        return int((logits != wanted).any(1).sum())

    def again(self) -> int:
        return self._differing(self._alone())

    def chains(self, length: int) -> int:
        """Decode the tokens in chains of a length."""
        parts = [
            self._run(
                self._tokens[at : at + length], [QueryBlock(0, self._context + at, None, length)]
            )
            for at in range(0, ROWS, length)
        ]
        return self._differing(torch.cat(parts))

    def beside(self, others: int, nodes: int) -> int:
        """Decode each token in a pass with other sequences, which have trees of `nodes` nodes."""
        parents = tuple((node - 1) // 2 for node in range(nodes))
        beside = [
            QueryBlock(row, min(self._context, 1000) * row // (others + 1), parents, nodes)
            for row in range(1, others + 1)
        ]
        filler = [(5 * index + 3) % self._vocab for index in range(others * nodes)]
        parts = []
        for index, token in enumerate(self._tokens):
            one = QueryBlock(0, self._context + index, None, 1)
            parts.append(self._run([*filler, token], [*beside, one])[-1:])
        return self._differing(torch.cat(parts))

    def tree(self, width: int) -> int:
        """Decode the tokens on a path of a tree whose other nodes hold other tokens."""
        parents, path = comb(LEVELS, width)
        tokens = [(13 * node + 5) % self._vocab for node in range(len(parents))]
        for node, token in zip(path, self._tokens, strict=False):
            tokens[node] = token
        logits = self._run(tokens, [QueryBlock(0, self._context, parents, len(parents))])
        differing = self._differing(logits[list(path)])
        self._alone()  # the slots of the tree get the KV of plain decoding again
        return differing

    def prompt(self) -> int:
        """Run the tokens as the end of a prompt, kernel by kernel."""
        return self._differing(self._eager(self._tokens, self._context, 0))

    def cuts(self) -> int:
        """Run one prompt in two sequences, cut at different places, and one step behind each."""
        prompt = [(3 * index + 1) % self._vocab for index in range(min(self._context, 1200))]
        runs = []
        for row, cuts in ((1, (512,)), (2, (100, 356, 700))):
            start = 0
            for stop in (*(cut for cut in cuts if cut < len(prompt)), len(prompt)):
                last = self._eager(prompt[start:stop], start, row)[-1:]
                start = stop
            step = self._run([self._tokens[0]], [QueryBlock(row, len(prompt), None, 1)])
            runs.append(torch.cat([last, step]))
        return self._differing(*runs)

    def _eager(self, tokens: Sequence[int], start: int, row: int) -> Tensor:
        device = self._decoder.device
        stop = start + len(tokens)
        blocks = [
            QueryBlock(0, at, None, min(MAX_TREE_NODES, stop - at))
            for at in range(start, stop, MAX_TREE_NODES)
        ]
        plan = plan_trees(blocks, device=device)
        packed = torch.tensor(tokens, device=device)
        cache = self._pages.sequence(row)
        return self._decoder.forward(packed, plan, [cache], logit_rows=None).logits


def compare(decoder: Decoder, context: int) -> dict[str, int]:
    """Count rows that differ from plain decoding, by how they were packed."""
    run = Comparison(decoder, context)
    cases: dict[str, Callable[[], int]] = {
        "alone again": run.again,
        "chains of 8": lambda: run.chains(8),
        f"a chain of {ROWS}": lambda: run.chains(ROWS),
        f"beside {OTHERS // 4} trees": lambda: run.beside(OTHERS // 4, 8),
        f"beside {OTHERS} trees": lambda: run.beside(OTHERS, 8),
        "the path of a tree of 2 children": lambda: run.tree(2),
        "the path of a tree of 5 children": lambda: run.tree(5),
        "the end of a prompt": run.prompt,
        "a prompt in other cuts": run.cuts,
    }
    return {name: case() for name, case in cases.items()}


def check(config: DecoderConfig, contexts: Sequence[int], device: torch.device) -> int:
    """Report the rows of a model with random weights that differ behind each context; returns their
    number."""
    decoder = Decoder(config, Packer(config, RandomWeights(config, device, 0), device), device)
    device_of(device).prepare(decoder, "auto")  # as a verifier serves by default
    report(f"{config.weights}, products", str(decoder.products))
    differing = 0
    for context in contexts:
        with torch.inference_mode():
            rows = compare(decoder, context)
        report(f"{config.weights}, rows that differ behind {context} tokens", rows)
        differing += sum(rows.values())
        gc.collect()  # graphs and the pages that they read refer to one another
    return differing


def bits(device: torch.device) -> None:
    """Compare rows of packed passes with plain decoding, bit by bit, as the verifier serves them.

    A model decodes some tokens one at a time. The same tokens then run in chains, beside other
    sequences, on the paths of trees, and as the end of a prompt; each row must have the logits of
    plain decoding, bit for bit, in every format of weights. Fails if a row differs.
    """
    if device.type == "cpu":
        report("skipped", "tests compare the rows of Triton's interpreter on a CPU")
        return
    differing = sum(
        check(replace(EIGHT_BILLION, weights=weights), contexts, device)
        for weights, contexts in CONTEXTS.items()
    )
    if differing:
        sys.exit(f"{differing} rows differ from plain decoding")
