"""What shared noise is worth at temperature 1: one layer and one target, five ways to accept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.bench import rejection
from paceline.bench.figures import accepted_length
from paceline.bench.texts import Text
from paceline.decoder import Decoder
from paceline.drafter import Resources
from paceline.drafter.acceptance import GREEDY, accepted_lengths, record
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.v1 import sampling_pb2

WIDTHS = "4,8,8,8,8"
NODES = 36
_OTHER_SEED = 1 << 40


def measure(
    target: Path,
    layer: Path,
    texts: Sequence[Text],
    *,
    dtype: str,
    tokens: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Accepted lengths by set of texts and way.

    The trees are one shape, nothing pruned, and so are the chains, as deep as the trees. Ranked by
    the verifier's noise, by plain probability, or by another noise, which makes children samples
    of the drafter's distribution.
    """
    decoder = Decoder.load(target, dtype)
    depth = len(WIDTHS.split(","))
    # Only with the whole vocabulary among its candidates is a drafted token a sample of q.
    vocab = str(decoder.config.vocab_size)
    tree = _load(target, layer, WIDTHS, NODES)
    chain = _load(target, layer, ",".join(["1"] * depth), depth, candidates=vocab)
    found: dict[str, dict[str, list[list[int]]]] = {}
    for index, text in enumerate(texts):
        progress(f"{text.set} {text.file}, {len(text.tokens)} tokens")
        seed = index + 1
        sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=seed)
        other = sampling_pb2.SamplingParams(temperature=1.0, seed=_OTHER_SEED + seed)
        recording = record(decoder, text.tokens, tokens, sampling)
        runs = {
            "tree, shared noise": accepted_lengths(tree, recording),
            "tree, ranked by probability": accepted_lengths(tree, recording, sampling=GREEDY),
            "tree, other noise": accepted_lengths(tree, recording, sampling=other),
            "chain, shared noise": accepted_lengths(chain, recording),
            # Last: it writes a text of its own over the recorded one.
            "chain, rejection sampling": rejection.accepted_lengths(
                decoder, chain, recording, _OTHER_SEED + seed
            ),
        }
        for name, rounds in runs.items():
            found.setdefault(text.set, {}).setdefault(name, []).append(rounds)
    return {
        name: {way: accepted_length(each) for way, each in ways.items()}
        for name, ways in found.items()
    }


def _load(target: Path, layer: Path, widths: str, nodes: int, **more: str) -> LongSpecDrafter:
    options = {"target": str(target), "widths": widths, "max_nodes": str(nodes)}
    return LongSpecDrafter.load(layer, options | {"min_survival": "0"} | more, Resources())
