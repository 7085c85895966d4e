"""Prompt sets of the benchmark: plain continuation, and text that copies itself."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_EXCERPT = 88  # tokens


@dataclass(frozen=True)
class Prompt:
    """Token ids under a set's name."""

    set: str
    name: str
    tokens: list[int]


def load(folder: Path, target: Path, *, length: int = 384, copies: int = 4) -> list[Prompt]:
    """The demo prompts as they are, and `copying` prompts made from the held-out files.

    A copying prompt is a short excerpt over and over, cut off in the middle, so that a model goes
    on with what stands above. `length` is the longest prompt, in tokens.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            ids = tokenizer.encode(entry["text"]).ids[-length:]
            prompts.append(Prompt(entry["split"], entry["id"], ids))
    for file in sorted((folder / "heldout").glob("*"))[:copies]:
        ids = tokenizer.encode(file.read_text(errors="replace")).ids
        if len(ids) >= length:
            excerpt = ids[length // 2 : length // 2 + _EXCERPT]
            repeated = excerpt * (length // _EXCERPT) + excerpt[: length % _EXCERPT]
            prompts.append(Prompt("copying", file.name, repeated))
    return prompts
