import pytest

from paceline.train.model import build_model, distinct_ngrams, text_loss
from paceline.train.presets import Preset


def test_distinct_ngrams_tell_a_loop_from_text() -> None:
    assert distinct_ngrams(range(100)) == 1
    assert distinct_ngrams([1, 2, 3] * 40) < 0.05
    assert distinct_ngrams([1, 2]) == 1


def test_an_untrained_model_guesses_evenly(preset: Preset) -> None:
    model = build_model(preset, eos=0)
    assert text_loss(model, [list(range(200))], length=64) == pytest.approx(5.77, abs=0.3)
