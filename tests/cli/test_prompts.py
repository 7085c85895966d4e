"""Files of prompts, as commands read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.harness import read_prompts


def test_prompts_are_texts_or_tokens(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"a"\n\n[1, 2]\n{"prompt": "b"}\n{"text": [3]}\n')
    assert read_prompts(file) == ["a", [1, 2], "b", [3]]
    file = tmp_path / "p.txt"
    file.write_text("one\nprompt\n")
    assert read_prompts(file) == ["one\nprompt\n"]


@pytest.mark.parametrize(
    ("prompts", "says"), [("7", "line 1"), ("", "no prompt"), ("[[", "Expecting")]
)
def test_other_files_are_refused(prompts: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(prompts)
    with pytest.raises(ValueError, match=says):
        read_prompts(file)
