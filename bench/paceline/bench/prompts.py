"""Prompt sets of the benchmark: plain text, text that copies itself, text that repeats nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_EXCERPT = 88  # tokens
_HOT = 2.0  # temperature at which hardly any two tokens follow each other twice


@dataclass(frozen=True)
class Prompt:
    """Token ids under a set's name, and how their continuation is sampled; greedily by default."""

    set: str
    name: str
    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0


def load(
    folder: Path, target: Path, *, length: int = 384, copies: int = 4, matchless: int = 4
) -> list[Prompt]:
    """The demo prompts as they are, and two sets made from what is held out.

    A `copying` prompt is a short excerpt over and over, cut off in the middle, so that a model goes
    on with what stands above. `no match` is the other end: a held-out prompt whose continuation is
    sampled so hot that what was written before is no guide to what follows, and prompt lookup can
    only cost. `length` is the longest prompt, in tokens.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            ids = tokenizer.encode(entry["text"]).ids[-length:]
            prompts.append(Prompt(entry["split"], entry["id"], ids))
    heldout = [prompt for prompt in prompts if prompt.set == "heldout"]
    for seed, prompt in enumerate(heldout[:matchless], 1):
        prompts.append(Prompt("no match", prompt.name, prompt.tokens, _HOT, seed))
    for file in sorted((folder / "heldout").glob("*"))[:copies]:
        ids = tokenizer.encode(file.read_text(errors="replace")).ids
        if len(ids) >= length:
            excerpt = ids[length // 2 : length // 2 + _EXCERPT]
            repeated = excerpt * (length // _EXCERPT) + excerpt[: length % _EXCERPT]
            prompts.append(Prompt("copying", file.name, repeated))
    return prompts
