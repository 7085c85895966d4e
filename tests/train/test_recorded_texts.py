"""Which recorded texts are trained on, and which are held out."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paceline.decoder import weights_fingerprint
from paceline.drafter.recordings import Recording
from paceline.train.online import recorded_texts


def write(file: Path, texts: list[Recording]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(text.to_json() + "\n" for text in texts))
    return file.parent


def test_what_is_read(target: Path, tmp_path: Path) -> None:
    mine = weights_fingerprint(target)
    whole = [Recording((1, 2, n), tuple(range(9)), target=mine) for n in range(60)]
    broken_off = Recording((1, 2, 7), (0, 1, 2), target=mine)
    once_more = Recording((1, 2, 8), (0, 1, 9), temperature=1, target=mine)
    foreign = Recording((3, 3, 3), (4,), target="f" * 64)
    folder = write(tmp_path / "texts" / "a.jsonl", [broken_off, foreign, *whole, once_more])
    work = tmp_path / "work"
    texts = recorded_texts(folder, target, work)
    every = [*texts.trained, *texts.heldout]
    assert len(every) == 61
    assert set(every) == {*whole, once_more}
    assert not {t.prompt for t in texts.trained} & {t.prompt for t in texts.heldout}
    assert {stat.S_IMODE(file.stat().st_mode) for file in work.iterdir()} == {0o600}
    # A run that goes on reads what it began with; another one holds the same texts out.
    more = [Recording((5, n), (1,), target=mine) for n in range(20)]
    write(folder / "b.jsonl", more)
    assert recorded_texts(folder, target, work) == texts
    later = recorded_texts(folder, target, tmp_path / "later")
    assert set(texts.heldout) == set(later.heldout) - set(more)


def test_too_little_is_told(target: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "texts" / "a.jsonl", [Recording((1,), (2,), target="f" * 64)])
    with pytest.raises(ValueError, match="0 texts by this target"):
        recorded_texts(folder, target, tmp_path / "work")
    with pytest.raises(ValueError, match="nowhere"):
        recorded_texts(tmp_path / "nowhere", target, tmp_path / "work")
