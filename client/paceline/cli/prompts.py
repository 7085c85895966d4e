"""Files of prompts, for the commands that try something on the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIELDS = ("prompt", "text", "turns", "question")
"""Where data sets keep their prompt: HumanEval and MBPP, MT-bench, GSM8K among them."""

PROMPT_FILE = (
    "JSON lines, each a text, a list of token ids, or an object with one as "
    f"{', '.join(FIELDS)} (of turns the first); any other file is one prompt"
)
"""For --help."""


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a file; see `--prompts`.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no prompt, or a line that is none.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".jsonl", ".json"):
        if not text.strip():
            raise ValueError(f"{path} is empty; expected a prompt")
        return [text]
    lines = [line for line in text.splitlines() if line.strip()]
    found = [_prompt(json.loads(line), f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    if not found:
        raise ValueError(f"{path} holds no prompt; expected one a line")
    return found


def _prompt(entry: Any, where: str) -> str | list[int]:
    if isinstance(entry, dict):
        named = [entry[name] for name in FIELDS if name in entry]
        entry = named[0] if named else None
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            entry = entry[0]  # a conversation: its first turn
    if isinstance(entry, str) and entry:
        return entry
    if (
        isinstance(entry, list)
        and entry
        and all(type(token) is int and token >= 0 for token in entry)
    ):
        return entry
    raise ValueError(f"{where}: expected a text or token ids, or an object with one of {FIELDS}")
