"""Prompts: the demo's sets of short ones, long ones of any length, and the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.decoder import open_model
from paceline.harness import read_prompts

_LENGTH = 384  # tokens of a demo prompt, at most
_REPEATED = 40  # tokens of its beginning that a copying prompt ends with
_SEPARATOR = "<|endoftext|>"  # between texts, in the training of the demo target


@dataclass(frozen=True)
class Prompt:
    """Token ids, and how their continuation is sampled; greedily by default."""

    set: str
    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0


def tokenizer(target: Path) -> Tokenizer:
    """The target's tokenizer.

    Raises:
        ValueError: The target has none.
    """
    found = open_model(target).tokenizer
    if found is None:
        raise ValueError(f"{target} has no tokenizer: give a model with one")
    return Tokenizer.from_buffer(found)


def encode(prompts: Sequence[str | list[int]], target: Path) -> list[list[int]]:
    """Token ids of texts; token ids stay as they are."""
    encoder = tokenizer(target)
    return [each if isinstance(each, list) else encoder.encode(each).ids for each in prompts]


def texts_of(*categories: str) -> list[str]:
    """The prompts of the table, of some categories."""
    files = (Path("bench/prompts") / f"{name}.jsonl" for name in categories)
    return [str(each) for file in files for each in read_prompts(file)]


def demo_prompts(folder: Path, target: Path) -> list[Prompt]:
    """The demo prompts, by set.

    ``heldout`` and ``trained`` are beginnings of files that the demo target was not and was trained
    on, continued greedily. ``sampled`` are the held-out ones at temperature 1. ``copying`` holds
    a trained text whole and then its beginning once more.

    Raises:
        ValueError: The target's tokenizer has no ``<|endoftext|>`` to separate texts with.
    """
    separator = tokenizer(target).token_to_id(_SEPARATOR)
    if separator is None:
        raise ValueError(f"{target} has no token {_SEPARATOR}: use the demo target")
    heldout, trained = (
        [ids[-_LENGTH:] for ids in encode(read_prompts(folder / f"{name}.jsonl"), target)]
        for name in ("heldout", "trained")
    )
    return [
        *(Prompt("heldout", ids) for ids in heldout),
        *(Prompt("trained", ids) for ids in trained),
        *(Prompt("sampled", ids, 1.0, seed) for seed, ids in enumerate(heldout, 1)),
        *(Prompt("copying", [*ids, separator, *ids[:_REPEATED]]) for ids in trained),
    ]


def long_prompts(folder: Path, target: Path, length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens of the held-out files, joined, at evenly spread offsets.

    Raises:
        ValueError: All files together are shorter than one piece.
    """
    files = sorted((folder / "heldout").glob("*.txt"))
    [ids] = encode(["\n".join(file.read_text(encoding="utf-8") for file in files)], target)
    if len(ids) < length:
        raise ValueError(f"{folder}/heldout has {len(ids)} tokens, expected at least {length}")
    step = (len(ids) - length) // max(1, count - 1)
    return [ids[start : start + length] for start in (step * index for index in range(count))]
