"""A drafter that replays recorded continuations: for benchmarks and tests only.

Each level contains the recorded token with a chosen probability, so the system can be measured
apart from any model. For texts without a recording the trees are empty.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Generation,
    LoadError,
    Resources,
    Update,
)
from paceline.drafter.methods.options import check_range, parse_options
from paceline.tree import EMPTY, TokenTree

RECORD_FILE = "continuations.jsonl"
"""Name of the file when a folder is given."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``replay``."""

    p: float = 0.8
    """Probability at each level that the recorded token is drafted."""

    max_nodes: int = 8
    """Most nodes of a tree."""

    width: int = 1
    """Nodes of a level: 1 drafts a chain; more add wrong tokens."""

    seed: int = 0
    """Seed of the draws. Equal seeds give equal trees for the same text."""

    def __post_init__(self) -> None:
        check_range("p", self.p, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, 255)
        check_range("width", self.width, 1, self.max_nodes)


def prompt_digest(tokens: Sequence[int]) -> str:
    """Returns the key of a prompt: SHA-256 hex over its ids as little-endian 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()


def write_records(path: Path, records: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Writes (prompt, continuation) pairs as JSON lines that ``replay`` reads."""
    with path.open("w", encoding="ascii") as file:
        for prompt, tokens in records:
            line = {"prompt_sha": prompt_digest(prompt), "tokens": list(tokens)}
            file.write(json.dumps(line) + "\n")


def read_records(path: Path) -> dict[str, array[int]]:
    """Reads recorded continuations, by prompt digest.

    Each line is an object with ``tokens``, and ``prompt_sha`` or the ``prompt`` tokens themselves.

    Raises:
        LoadError: The file cannot be read or a line has another form.
    """
    records: dict[str, array[int]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError("UNREADABLE_RECORD", f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key = record.get("prompt_sha") or prompt_digest(array("I", record["prompt"]))
            records[key] = array("I", record["tokens"])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise LoadError(
                "UNREADABLE_RECORD",
                f"{path} line {number}: expected a JSON object with 'tokens' and 'prompt_sha' or "
                f"'prompt' ({type(error).__name__}: {error})",
            ) from error
    return records


class ReplaySequence(DraftSequence):
    """A generation, as far as it agrees with its recording."""

    def __init__(
        self, options: ReplayOptions, records: Mapping[str, array[int]], generation: Generation
    ) -> None:
        self._options = options
        self._vocab_size = generation.vocab_size
        prompt = generation.tokens[: generation.prompt_length]
        self._record: Sequence[int] = records.get(prompt_digest(prompt), ())
        self._emitted = 0
        self._follow(generation.tokens[generation.prompt_length :])

    def extend(self, update: Update) -> None:
        self._follow(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        options = self._options
        nodes = min(budget.nodes, options.max_nodes)
        levels = min(budget.depth, len(self._record) - self._emitted, -(-nodes // options.width))
        if levels <= 0:
            return EMPTY
        tokens: list[int] = []
        parents: list[int] = []
        main = -1
        for level in range(levels):
            at = self._emitted + level
            draw = _mix(options.seed, at)
            right = draw < options.p * (1 << 64)
            width = min(options.width, nodes - len(tokens), max(1, self._vocab_size - 1))
            level_start = len(tokens)
            # Wrong tokens step through all other ids, so none repeats or equals the recorded one.
            for child in range(width):
                wrong = 1 + (draw + child) % max(1, self._vocab_size - 1)
                shift = 0 if right and child == 0 else wrong
                tokens.append((self._record[at] + shift) % self._vocab_size)
                parents.append(main)
            main = level_start
        return TokenTree(tuple(tokens), tuple(parents))

    def _follow(self, tokens: Sequence[int]) -> None:
        end = self._emitted + len(tokens)
        if list(self._record[self._emitted : end]) != list(tokens):
            self._record = ()  # the text differs from the recording
        self._emitted = end


class ReplayDrafter(Drafter):
    """The method ``replay``. Thread-safe."""

    method: ClassVar[str] = "replay"
    inline: ClassVar[bool] = True

    def __init__(self, options: ReplayOptions, records: Mapping[str, array[int]]) -> None:
        self._options = options
        self._records = records
        self.max_nodes = options.max_nodes
        self.weight_bytes = sum(len(tokens) * tokens.itemsize for tokens in records.values())

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> ReplayDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "replay needs a recording: replay:FILE.jsonl")
        parsed = parse_options(ReplayOptions, options)
        return cls(parsed, read_records(folder / RECORD_FILE if folder.is_dir() else folder))

    def start(self, generation: Generation) -> ReplaySequence:
        return ReplaySequence(self._options, self._records, generation)


def _mix(seed: int, position: int) -> int:
    """Hashes (seed, position) to 64 bits with the finaliser of SplitMix64."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
