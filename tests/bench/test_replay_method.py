"""The method ``replay``."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.replay_method import ReplayDrafter
from paceline.drafter.methods.base import Budget, GenerationInfo, LoadError, Resources, Update
from paceline.drafter.recordings import Recording
from paceline.tree import TokenTree

PROMPT = [1, 2, 3]
RECORD = [i * 7 % 90 for i in range(2000)]
VOCAB = 100


def write_records(path: Path, *texts: tuple[list[int], list[int]]) -> Path:
    """Write prompts and their continuations."""
    lines = [Recording(tuple(prompt), tuple(tokens)).to_json() for prompt, tokens in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write_records(tmp_path / "continuations.jsonl", ([9, 9], [5]), (PROMPT, RECORD))


def drafter(path: Path, **options: str) -> ReplayDrafter:
    return ReplayDrafter.load(path, options, Resources())


def test_with_p_1_every_level_is_right(record: Path) -> None:
    for folder_or_file in (record, record.parent):
        sequence = drafter(folder_or_file, p="1").start(
            GenerationInfo([*PROMPT, *RECORD[:4]], 3, VOCAB)
        )
        assert list(sequence.draft(Budget(8, 8)).tokens) == RECORD[4:12]
        sequence.extend(Update(RECORD[4:10]))
        assert list(sequence.draft(Budget(3, 8)).tokens) == RECORD[10:13]
        assert list(sequence.draft(Budget(8, 2)).tokens) == RECORD[10:12]


def test_each_level_is_right_with_probability_p(record: Path) -> None:
    sequence = drafter(record, p="0.8", max_nodes="200").start(GenerationInfo(PROMPT, 3, VOCAB))
    right = 0
    for start in range(0, 2000, 200):
        tree = sequence.draft(Budget(200, 200))
        right += sum(a == b for a, b in zip(tree.tokens, RECORD[start:], strict=False))
        sequence.extend(Update(RECORD[start : start + 200]))
    # 2000 draws of 0.8: a deviation of 0.05 is beyond five standard deviations.
    assert abs(right / 2000 - 0.8) < 0.05


@pytest.mark.parametrize("p", ["0", "0.5", "1"])
def test_other_nodes_are_distinct_and_wrong(record: Path, p: str) -> None:
    sequence = drafter(record, p=p, width="4", max_nodes="12").start(
        GenerationInfo(PROMPT, 3, VOCAB)
    )
    tree = sequence.draft(Budget(12, 8))
    tree.check(VOCAB)
    assert len(tree) == 12
    assert tree.depth == 3
    for level in range(3):
        tokens = [
            t for t, depth in zip(tree.tokens, tree.depths, strict=True) if depth == level + 1
        ]
        assert len(set(tokens)) == 4
        expected = {"0": 0, "1": 1}.get(p, tokens.count(RECORD[level]))
        assert tokens.count(RECORD[level]) == expected <= 1


def test_the_same_seed_gives_the_same_trees(record: Path) -> None:
    def draft(seed: str) -> TokenTree:
        loaded = drafter(record, p="0.5", seed=seed, max_nodes="64")
        return loaded.start(GenerationInfo(PROMPT, 3, VOCAB)).draft(Budget(64, 64))

    assert draft("1") == draft("1") != draft("2")


def test_other_texts_are_not_drafted(record: Path) -> None:
    loaded = drafter(record)
    assert not loaded.start(GenerationInfo([4, 5], 2, VOCAB)).draft(Budget(8, 8))
    left = loaded.start(GenerationInfo(PROMPT, 3, VOCAB))
    left.extend(Update([RECORD[0], RECORD[1] + 1]))
    assert not left.draft(Budget(8, 8))
    ended = loaded.start(GenerationInfo([9, 9, 5], 2, VOCAB))
    assert not ended.draft(Budget(8, 8))


def test_a_recording_must_exist(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot read"):
        drafter(tmp_path / "none.jsonl")
    with pytest.raises(LoadError, match="needs a record"):
        ReplayDrafter.load(None, {}, Resources())
