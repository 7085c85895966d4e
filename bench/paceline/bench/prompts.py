"""Prompts: the demo's, long ones of any length, and the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from paceline.decoder import open_model
from paceline.harness import read_prompts

_NAMES = (
    "Amber", "Birch", "Cedar", "Delta", "Ember", "Falcon", "Garnet", "Harbor", "Indigo", "Jasper",
    "Koala", "Lotus", "Maple", "Nickel", "Onyx", "Pearl", "Quartz", "Raven", "Saffron", "Tulip",
    "Umber", "Velvet", "Willow", "Zephyr",
)  # fmt: skip


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


def demo_prompts(folder: Path, target: Path) -> list[list[int]]:
    """Beginnings of files that the demo target was not trained on, then of some that it was."""
    files = (folder / f"{name}.jsonl" for name in ("heldout", "trained"))
    return encode([each for file in files for each in read_prompts(file)], target)


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


def needle_prompts(texts: Sequence[list[int]], target: Path) -> list[list[int]]:
    """Long texts with a table of random numbers near the beginning, begun again at the end.

    How the second table goes on is only in the first: a drafter under a KV budget finds it if the
    budget contains the right lines.

    Args:
        texts: Token ids around the table, at least 1,024 each; their lengths are kept.
        target: Folder or file of the target.

    Raises:
        ValueError: A text is too short.
    """
    found = []
    for seed, text in enumerate(texts):
        draw = Random(seed)
        names = draw.sample(_NAMES, len(_NAMES))
        lines = [f"{name}: {draw.randrange(10**6):06}\n" for name in names]
        needle, again = encode(
            [f"\n\nThe codes:\n{''.join(lines)}\n", f"\n\nThe codes:\n{''.join(lines[:3])}"], target
        )
        room = len(text) - len(needle) - len(again)
        if room < len(needle):
            raise ValueError(f"a text has {len(text)} tokens, expected at least {3 * len(needle)}")
        found.append([*text[: room // 8], *needle, *text[room // 8 : room], *again])
    return found
