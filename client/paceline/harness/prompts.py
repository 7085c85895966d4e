"""Prompt files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIELDS = ("prompt", "text", "turns", "question")
"""Keys of the prompt in common data sets: HumanEval, MBPP, MT-bench and GSM8K among them."""

PROMPT_FILE = (
    "JSON lines, each a text, a list of token ids, or an object with one as "
    f"{', '.join(FIELDS)} (of turns the first); any other file is one prompt"
)
"""Description of the format, for --help."""


def read_prompts(path: Path) -> list[str | list[int]]:
    """Reads a prompt file; `PROMPT_FILE` describes the format.

    Returns:
        Each prompt: text or token ids.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no prompt, or a line that is not a prompt.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".jsonl", ".json"):
        if not text.strip():
            raise ValueError(f"{path} is empty; expected a prompt")
        return [text]
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompt; expected one a line")
    return [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str | list[int]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if isinstance(entry, dict):
        entry = next((entry[name] for name in FIELDS if name in entry), None)
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            entry = entry[0]  # a conversation: its first turn
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, list) and entry and all(type(id) is int and id >= 0 for id in entry):
        return entry
    raise ValueError(f"{where}: expected a text or token ids, or an object with one of {FIELDS}")
