"""What all parts of a benchmark share: its arguments, the demo's models, and prompts."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.bench import prompts, texts
from paceline.bench.record import Book


@dataclass
class Bench:
    """One run.

    Attributes:
        args: Of `paceline bench`.
        work: Takes made-up models.
        console: Where progress goes.
        book: Takes results, part by part.
    """

    args: argparse.Namespace
    work: Path
    console: Console
    book: Book

    @property
    def models(self) -> Path:
        """The demo's models."""
        return Path(self.args.models)

    @property
    def target(self) -> Path:
        """The demo target."""
        return self.models / "target"

    @property
    def small(self) -> Path | None:
        """A small model of the target's text, if there is one."""
        folder = self.models / "lm"
        return folder if (folder / "config.json").exists() else None

    @property
    def longspec(self) -> Path | None:
        """The LongSpec drafter, if there is one."""
        folder: Path = self.args.longspec or self.models / "longspec"
        return folder if (folder / "config.json").exists() else None

    @property
    def dspark(self) -> Path | None:
        """The DSpark drafter, if there is one."""
        folder = self.models / "dspark"
        return folder if (folder / "config.json").exists() else None

    @property
    def tokens(self) -> int:
        """New tokens a prompt, where a part has no number of its own."""
        return self.args.tokens or 256

    @property
    def repeats(self) -> int:
        """Passes over the prompts, where a part has no number of its own."""
        return self.args.repeats or 3

    @property
    def each(self) -> int:
        """Long prompts of each set and context length."""
        return self.args.texts or 4

    def drafters(self) -> dict[str, str]:
        """Specifications, METHOD[:DIR][,key=value...], by name."""
        found = {"ngram": "ngram"}
        if self.small is not None:
            found["lm"] = f"lm:{self.small}"
        if self.longspec is not None:
            found["longspec"] = f"longspec:{self.longspec},target={self.target}"
        if self.dspark is not None:
            found["dspark"] = f"dspark:{self.dspark},target={self.target}"
        return found

    def wanted(self, name: str) -> bool:
        """Whether to measure this set of prompts."""
        return not self.args.set or name in self.args.set

    def texts(self) -> list[texts.Text]:
        """Long prompts of the sets asked for."""
        sets = [name for name in texts.SETS if self.wanted(name)]
        return texts.load(self.models, self.each, sets=sets)

    def every_prompt(self) -> list[prompts.Prompt]:
        """Short prompts of all sets."""
        return prompts.load(self.models / "prompts", self.target)

    def prompts(self) -> list[prompts.Prompt]:
        """Those of the sets asked for."""
        return [prompt for prompt in self.every_prompt() if self.wanted(prompt.set)]
