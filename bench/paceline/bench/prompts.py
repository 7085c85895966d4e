"""Prompt sets of the benchmark: plain text, text that copies itself, text that repeats nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_RETOLD = 40  # tokens of a text that a copying prompt gives again
_SEPARATOR = "<|endoftext|>"  # between texts, in the demo target's training
_HOT = 2.0  # temperature at which hardly any two tokens follow each other twice


@dataclass(frozen=True)
class Prompt:
    """Token ids under a set's name, and how their continuation is sampled; greedily by default."""

    set: str
    name: str
    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0


def load(folder: Path, target: Path, *, length: int = 384, matchless: int = 4) -> list[Prompt]:
    """The demo prompts as they are, and three sets made from them.

    `sampled` are the held-out ones at temperature 1.

    A `copying` prompt holds a text whole and then its beginning once more, so that what follows
    stands in the prompt already; from files the demo target was trained on, because a model so
    small copies what it knows and little else. `no match` is the other end: a held-out prompt whose
    continuation is sampled so hot that what was written before is no guide to what follows, and
    prompt lookup can only cost. `length` is the longest demo prompt, in tokens.

    Raises ValueError where the target's tokenizer has no separator of texts.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            ids = tokenizer.encode(entry["text"]).ids[-length:]
            prompts.append(Prompt(entry["split"], entry["id"], ids))
    heldout = [prompt for prompt in prompts if prompt.set == "heldout"]
    for seed, prompt in enumerate(heldout, 1):
        prompts.append(Prompt("sampled", prompt.name, prompt.tokens, 1.0, seed))
    for seed, prompt in enumerate(heldout[:matchless], 1):
        prompts.append(Prompt("no match", prompt.name, prompt.tokens, _HOT, seed))
    separator = tokenizer.token_to_id(_SEPARATOR)
    if separator is None:
        raise ValueError(f"{target} has no token {_SEPARATOR}: bench the demo target")
    for prompt in [prompt for prompt in prompts if prompt.set == "trained"]:
        retold = [*prompt.tokens, separator, *prompt.tokens[:_RETOLD]]
        prompts.append(Prompt("copying", prompt.name, retold))
    return prompts
