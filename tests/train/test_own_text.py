"""Texts that a target writes itself."""

from pathlib import Path

import pytest

from paceline.convert import load_decoder
from paceline.kernels import SamplingRules
from paceline.train.own_text import Task, own_texts, write_texts


def test_own_texts_are_what_the_target_emits(target: Path, tmp_path: Path) -> None:
    """Each text is the same as when it is written alone."""
    decoder = load_decoder(target)
    document, path = list(range(1, 201)), tmp_path / "own.safetensors"
    texts = own_texts(decoder, [document], 3, 0, path)
    for number, text in enumerate(texts):
        assert text[:128] == list(range(text[0], text[0] + 128))
        task = Task(text[:128], SamplingRules(temperature=number % 2, seed=number), 384)
        [(_, alone)] = write_texts(decoder, [task], stop=0)
        assert text[128:] == [token for token in alone if token]
    assert own_texts(decoder, [], 3, 0, path) == texts, "read from the file"
    with pytest.raises(ValueError, match="no document has 128 tokens"):
        own_texts(decoder, [[1, 2]], 1, 0, tmp_path / "other.safetensors")
