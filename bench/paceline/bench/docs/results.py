"""Recorded results, as documents ask for them."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

RECORDED_ON = "cpu-2x-amd-epyc"
"""Kind of machine that the documents' figures are of."""


class Results:
    """The result files of one kind of machine in a repository, and its models' cards."""

    def __init__(self, root: Path, kind: str = RECORDED_ON) -> None:
        self.root = root
        self._kind = kind
        self._read: dict[str, Any] = {}

    def of(self, topic: str) -> Any:
        """All that a file holds. Raises FigureError where nothing was recorded."""
        if topic not in self._read:
            file = self.file(topic)
            if not file.is_file():
                raise FigureError(f"{file} is not there: measure it first")
            self._read[topic] = json.loads(file.read_text(encoding="utf-8"))
        return self._read[topic]

    def has(self, topic: str) -> bool:
        """Whether anything was recorded."""
        return self.file(topic).is_file()

    def file(self, topic: str) -> Path:
        """Where a topic's results are: `KIND-TOPIC.json`, of some commands `TOPIC-KIND.json`.

        Files of other machines are named whole, without their `.json`; `models/NAME` are the notes
        in a demo model's own folder.
        """
        if topic.startswith("models/"):
            return self.root / "models" / "demo" / topic.removeprefix("models/") / "config.json"
        folder = self.root / "bench" / "results"
        own = folder / f"{self._kind}-{topic}.json"
        others = (folder / f"{topic}-{self._kind}.json", folder / f"{topic}.json")
        return next((file for file in (own, *others) if file.is_file()), own)

    def value(self, topic: str, path: str) -> Any:
        """One figure, `path` being keys and list indices with slashes between them."""
        found = self.of(topic)
        for key in path.split("/"):
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise FigureError(f"{self.file(topic).name} has no {path}: {key!r}") from error
        return found

    @property
    def any(self) -> bool:
        """Whether this kind of machine has results at all."""
        return bool(self._files)

    @property
    def _files(self) -> list[Path]:
        return sorted((self.root / "bench" / "results").glob(f"{self._kind}-*.json"))

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Of any of the files: all are of one kind."""
        if not self.any:
            raise FigureError(f"bench/results has nothing of {self._kind}")
        found: dict[str, Any] = json.loads(self._files[0].read_text(encoding="utf-8"))["machine"]
        return found


class FigureError(ValueError):
    """A document asks for a figure that is not there."""
