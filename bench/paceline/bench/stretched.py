"""The comparison on a stretched target (`paceline.bench.stretch`), where a step is dear."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.comparison import compare
from paceline.bench.prompts import Prompt
from paceline.bench.stretch import fit_drafter, stretch
from paceline.decoder import Decoder
from paceline.drafter.acceptance import record

SETS = ("heldout", "sampled", "trained")
"""Prompt sets that are measured."""

_FREE_NODES = 8
"""Nodes that a step of this size verifies at hardly more than its own cost; 16 take one and a half
times as long on two cores. Where a step is so dear, a deeper tree than the default pays."""

_CHECKED = 48  # tokens of the first prompt that both targets write
DTYPE = "bfloat16"


async def measure(
    prompts: Sequence[Prompt],
    target: Path,
    layer: Path | None,
    work: Path,
    *,
    tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Summaries by prompt set and mode, once over the prompts.

    `layer` is the LongSpec drafter of `target`, or None; `work` takes the stretched folders
    (0.8 GB).

    Raises RuntimeError where the stretched target writes another text than the target.
    """
    large, drafters = work / "stretched", {"ngram": "ngram"}
    if not large.exists():
        progress("stretching the target")
        stretch(target, large)
    if layer is not None:
        fit_drafter(layer, large, work / "stretched-longspec")
        fitted = f"longspec:{work / 'stretched-longspec'},target={large}"
        drafters |= {
            "longspec": fitted,
            f"longspec-{_FREE_NODES}": f"{fitted},widths=4,8,8,8,max_nodes={_FREE_NODES}",
        }
    _check(prompts[0], target, large)
    return await compare(
        prompts,
        large,
        None,
        drafters,
        dtype=DTYPE,
        tokens=tokens,
        repeats=1,
        progress=lambda line: progress(f"stretched target: {line}"),
    )


def _check(prompt: Prompt, target: Path, large: Path) -> None:
    texts = [
        record(Decoder.load(folder, torch.bfloat16), prompt.tokens, _CHECKED).continuation
        for folder in (target, large)
    ]
    if texts[0] != texts[1]:
        raise RuntimeError(
            "the stretched target writes another text than the target, so that accepted lengths "
            "would not carry over: this machine's products add up wide rows in another order"
        )
