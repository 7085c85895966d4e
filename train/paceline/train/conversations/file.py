"""The file of conversations: one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Conversation:
    """One question with its answer, as token ids in the target's chat template.

    Attributes:
        kind: ``chat``, ``code``, ``mathematics``, ``edit`` or ``document``.
        temperature: Of the answer; 0: greedy.
        seed: Of the answer's noise.
        prompt: Everything before the answer.
        answer: What the target wrote, its end-of-turn token included if it came to that.
    """

    kind: str
    temperature: float
    seed: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """The whole text."""
        return [*self.prompt, *self.answer]


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file of conversations; a last line that was cut off while writing is left out.

    Raises:
        ValueError: Another line is no conversation.
    """
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):  # each line ends with a newline
        try:
            row = json.loads(line)
            row["prompt"], row["answer"] = tuple(row["prompt"]), tuple(row["answer"])
            found.append(Conversation(**row))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no conversation: {error!r}; expected a file of "
                "`paceline train own-text`"
            ) from error
    return found


def append(path: Path, conversations: Iterable[Conversation]) -> None:
    """Add lines to the file, in one write."""
    text = "".join(json.dumps(asdict(each)) + "\n" for each in conversations)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
