"""Every family behind the first four: greedy text with drafters, and formats of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from decoder_cases import FAMILIES, extend, save_model

from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.methods.base import Budget, LoadError

from . import models

FIRST = ("Llama", "Mistral", "Qwen2", "Qwen3")  # whole services of these are tested
# Qwen3.5 is served in tests/verifier/test_recurrent.py.
RECURRENT = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "OlmoHybrid", "Lfm2", "Lfm2Moe")
NAMES = [name for name, (family, _) in FAMILIES.items() if family not in (*FIRST, *RECURRENT)]
TOKENS = 24
DRAFTERS: dict[str, dict[str, int]] = {"ngram": {}, "selfspec": {"context": 48, "min_survival": 0}}
"""Drafters that need no training, and their options."""
MAX_ERRORS = {"bfloat16": 0.04, "int8": 0.08, "int4": 0.6}
"""Of logits, as shares of their spread, in the middle row: rounding sends some rows to other
experts."""


@pytest.mark.parametrize("name", NAMES)
def test_a_family_with_drafters_and_formats(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name, eos_token_id=None, vocab_size=models.VOCAB)
    _, expected, logits = written(folder)
    decoder = load_decoder(folder)
    accepted = {method: accepted_tokens(decoder, folder, method, expected) for method in DRAFTERS}
    assert accepted["selfspec"] > 0
    for weights, max_error in MAX_ERRORS.items():
        loaded = load_decoder(folder, weights)
        found = extend(loaded, LocalCache(loaded.config), torch.tensor(expected)).float()
        errors = (found - logits).std(-1) / logits.std(-1)
        assert errors.median() < max_error, weights


def written(folder: Path) -> tuple[str, list[int], torch.Tensor]:
    """The class of a model in transformers, its greedy text, and the logits of each token."""
    prompt = torch.tensor(models.text_of(70))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        settings = {"max_new_tokens": TOKENS, "do_sample": False}
        expected = model.generate(prompt[None], **settings)[0].tolist()
        return type(model).__name__, expected, model(torch.tensor([expected])).logits[0]


@pytest.mark.parametrize("method", ["lm", "selfspec"])
def test_methods_whose_caches_have_no_states_refuse_a_recurrent_model(
    method: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, "qwen3-5")
    with pytest.raises(LoadError, match=f"{method} does not draft with a model of type 'qwen3_5"):
        models.load(method, folder)


def accepted_tokens(decoder: Decoder, folder: Path, method: str, expected: list[int]) -> int:
    """Drafted tokens that were right on the way to a text, which is checked."""
    text = expected[:-TOKENS]
    reads = method == "selfspec"
    drafter = models.load(method, folder if reads else None, **DRAFTERS[method])
    kv = models.recorded_kv(decoder, text, len(text) - 1) if reads else None
    sequence = models.start(drafter, text, kv)
    cache, accepted = LocalCache(decoder.config), 0
    extend(decoder, cache, torch.tensor(text[:-1]))
    while len(text) < len(expected):
        emitted = models.verify(decoder, cache, sequence, text[-1], Budget(8, 8))
        accepted += len(emitted) - 1
        text += emitted
    assert text[: len(expected)] == expected, method
    return accepted
