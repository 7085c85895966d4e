"""Recorded texts, split into training texts and held-out texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.decoder import weights_fingerprint
from paceline.drafter.methods.base import LoadError
from paceline.drafter.recordings import Recording, read_recordings

TRAINED_FILE, HELDOUT_FILE = "recorded.jsonl", "heldout.jsonl"
"""The two parts, in a run's work folder."""

_HELDOUT = 8
"""One prompt of so many is held out."""


@dataclass(frozen=True)
class RecordedTexts:
    """Two parts of the texts of a folder, no prompt in both."""

    trained: Sequence[Recording]
    heldout: Sequence[Recording]


def recorded_texts(folder: Path, target: Path, work: Path) -> RecordedTexts:
    """The texts of a recorder's folder by the model in `target` or by an unknown target.

    They are copied to `work` and read from there next time: a resumed run reads the texts it began
    with. Whether a text is held out depends on its prompt alone, in every run.

    Raises ValueError if there are too few texts, or they cannot be read.
    """
    kept = work / TRAINED_FILE, work / HELDOUT_FILE
    try:
        if not all(file.is_file() for file in kept):
            fingerprint = weights_fingerprint(target)
            texts = [t for t in read_recordings(folder) if t.target in ("", fingerprint)]
            parts = _split(_whole(texts))
            if not all(parts):
                raise ValueError(
                    f"{folder} has {len(texts)} texts by this target, {len(parts[1])} of them with "
                    f"a prompt to hold out: record more, of different prompts"
                )
            work.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file, part in zip(kept, parts, strict=True):
                _write(file, part)
        return RecordedTexts(*(read_recordings(file) for file in kept))
    except LoadError as error:
        raise ValueError(str(error)) from error


def _whole(texts: Iterable[Recording]) -> list[Recording]:
    """Texts without those that are a prefix of another: a generation resumed after a failure."""
    by_ids = {text.prompt + text.tokens: text for text in texts}
    # In this order a text comes right before the first that begins with it.
    ordered = sorted(by_ids)
    begun = {ids for ids, after in pairwise(ordered) if after[: len(ids)] == ids}
    return [by_ids[ids] for ids in ordered if ids not in begun]


def _split(texts: Iterable[Recording]) -> tuple[list[Recording], list[Recording]]:
    trained, heldout = list[Recording](), list[Recording]()
    for text in texts:
        digest = hashlib.sha256(str(text.prompt).encode()).digest()
        (trained if digest[0] % _HELDOUT else heldout).append(text)
    return trained, heldout


def _write(file: Path, texts: Iterable[Recording]) -> None:
    """Write a file atomically, readable by its owner only, as the recorder's own files."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as lines:
        lines.writelines(text.to_json() + "\n" for text in texts)
    os.replace(partial, file)
