from pathlib import Path

import pytest

from paceline.train.evaluate import distinct_ngrams, text_loss
from paceline.train.model import build_model
from paceline.train.preset import Preset
from paceline.train.prompts import load_prompts


def test_distinct_ngrams_tell_a_loop_from_text() -> None:
    assert distinct_ngrams(range(100)) == 1
    assert distinct_ngrams([1, 2, 3] * 40) < 0.05
    assert distinct_ngrams([1, 2]) == 1


def test_an_untrained_model_guesses_evenly(preset: Preset) -> None:
    model = build_model(preset, eos=0)
    assert text_loss(model, [list(range(200))], length=64) == pytest.approx(5.77, abs=0.3)


def test_text_too_short_to_measure_is_refused(preset: Preset) -> None:
    with pytest.raises(ValueError, match="no text to measure"):
        text_loss(build_model(preset, eos=0), [[1], []])


def test_the_demo_prompts_name_their_split() -> None:
    folder = Path(__file__).parents[2] / "models" / "demo" / "prompts"
    prompts = load_prompts(folder)
    assert {p.split for p in prompts} == {"trained", "heldout"}
    assert len({p.id for p in prompts}) == len(prompts) >= 6


def test_prompts_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        load_prompts(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1 is no prompt"):
        load_prompts(tmp_path)
