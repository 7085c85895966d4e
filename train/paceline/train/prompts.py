"""The demo prompts."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """A prompt; `split` is "heldout" or "trained": whether its file was in the training data."""

    id: str
    split: str
    text: str


def load_prompts(folder: Path) -> list[Prompt]:
    """Read every `*.jsonl` of `folder`, in name order; each line is {"id", "split", "text"}.

    Raises FileNotFoundError if the folder holds no prompts, ValueError on a bad line.
    """
    prompts = [prompt for path in sorted(folder.glob("*.jsonl")) for prompt in _read(path)]
    if not prompts:
        raise FileNotFoundError(f"{folder} holds no *.jsonl prompts: give --prompts a folder")
    return prompts


def _read(path: Path) -> Iterable[Prompt]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            yield Prompt(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f'{path}:{number} is no prompt: expected {{"id", "split", "text"}}'
            ) from error
