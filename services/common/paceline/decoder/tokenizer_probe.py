"""Tries a tokenizer.json in a process of its own, which may take little time and memory.

Its expressions and replacements are programs: they may take for ever, or make a text endless. The
process is started by :func:`paceline.decoder.folder_tokenizer.probe`, as a script, so that it
imports nothing but the library of tokenizers.
"""

from __future__ import annotations

import json
import resource
import sys

from tokenizers import Tokenizer

MEMORY = 4 << 30
"""Address space that it may take. Unit: bytes."""
_LENGTH = 1024
_PROBES = [
    *(
        letter * _LENGTH + end
        for letter in ("a", "A", " ", "1", "é", "日", "\n", "!")
        for end in "a!"
    ),
    "the quick brown fox, 12345 times.\n\t" * 30,
]
_TOKENS_OF_A_CHARACTER = 16


def main() -> None:
    """Read a tokenizer.json; print what it adds to a text, and the ids of named tokens."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given = json.load(sys.stdin)
    tokenizer = Tokenizer.from_str(given["content"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.encode("").ids
    for text in _PROBES:
        ids = tokenizer.encode(text).ids
        if len(ids) > len(added) + _TOKENS_OF_A_CHARACTER * len(text):
            sys.exit(f"{len(text)} characters become {len(ids)} tokens")
        shown = tokenizer.decode(ids)
        if len(shown) > 4 * _TOKENS_OF_A_CHARACTER * len(text):
            sys.exit(f"{len(text)} characters become {len(shown)} when they are decoded")
    ids_of = {text: tokenizer.token_to_id(text) for text in given["tokens"]}
    largest = max(tokenizer.get_vocab().values(), default=-1)
    json.dump({"added": added, "ids": ids_of, "largest": largest}, sys.stdout)


if __name__ == "__main__":
    main()
