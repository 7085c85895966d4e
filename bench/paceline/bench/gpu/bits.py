"""Compares rows of packed passes with plain decoding, bit by bit, as the verifier serves them.

An 8B model with random weights decodes some tokens one at a time. The same tokens then run in
chains, beside other sequences, on the paths of trees, and as the end of a prompt; each row must
have the logits of plain decoding, bit for bit.

    python -m paceline.bench.gpu.bits cuda 0      # reports lines of JSON

Fails if a row differs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.bench.gpu.cases import EIGHT_BILLION, Pages, RandomWeights, arguments, report
from paceline.decoder import Decoder, DecoderConfig, GraphRunner
from paceline.decoder.products import use_library_without_splits
from paceline.kernels import MAX_TREE_NODES, QueryBlock, plan_trees

CONTEXTS = {"bfloat16": (200, 250, 2040, 8000, 12280), "int8": (250, 2040)}
"""Positions in front of the compared tokens, by the format of weights. Fewer in int8, because
attention is the same. Some trees cross a multiple of 64, 256 or 1,024."""

ROWS = 24
"""Tokens that plain decoding takes one at a time."""

OTHERS = 31
"""Sequences beside the compared one, in shorter contexts."""

OTHER_SLOTS = 1536
"""Positions of each of them."""

LEVELS = 12
"""Nodes on the compared path of a tree."""


def comb(levels: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents of a tree with `width` children at each level, and the nodes of the compared path:
    the last child of each level, so that its siblings lie in the slots before it."""
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

    def _differing(self, found: Tensor, wanted: Tensor | None = None) -> int:
        wanted = self._plain[: len(found)] if wanted is None else wanted
        return int((found != wanted).any(1).sum())

    def again(self) -> int:
        """Decode the same tokens alone once more."""
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
        found = self._run(tokens, [QueryBlock(0, self._context, parents, len(parents))])
        differing = self._differing(found[list(path)])
        self._alone()  # the slots of the tree get the KV of plain decoding again
        return differing

    def prompt(self) -> int:
        """Run the tokens as the end of a prompt, kernel by kernel."""
        return self._differing(self._eager(self._tokens, self._context, 0))

    def cuts(self) -> int:
        """Run one prompt in two sequences, cut at different places, and one step behind each."""
        prompt = [(3 * index + 1) % self._vocab for index in range(min(self._context, 1200))]
        found = []
        for row, cuts in ((1, (512,)), (2, (100, 356, 700))):
            start = 0
            for stop in (*(cut for cut in cuts if cut < len(prompt)), len(prompt)):
                last = self._eager(prompt[start:stop], start, row)[-1:]
                start = stop
            step = self._run([self._tokens[0]], [QueryBlock(row, len(prompt), None, 1)])
            found.append(torch.cat([last, step]))
        return self._differing(*found)

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
    decoder = Decoder(config, RandomWeights(config, device, 0), device)
    if device.type == "cuda":
        use_library_without_splits(fixed=True)  # as a verifier serves by default
        report(f"{config.weights}, products", str(decoder.fix_products()))
    differing = 0
    for context in contexts:
        with torch.inference_mode():
            found = compare(decoder, context)
        report(f"{config.weights}, rows that differ behind {context} tokens", found)
        differing += sum(found.values())
        gc.collect()  # graphs and the pages that they read refer to one another
    return differing


def main() -> None:
    """Check every format of weights."""
    device = arguments()
    if device.type == "cpu":
        report("skipped", "tests compare the rows of Triton's interpreter on a CPU")
        return
    differing = sum(
        check(replace(EIGHT_BILLION, weights=weights), contexts, device)
        for weights, contexts in CONTEXTS.items()
    )
    if differing:
        sys.exit(f"{differing} rows differ from plain decoding")


if __name__ == "__main__":
    main()
