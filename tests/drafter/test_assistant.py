"""Paceline drafters in transformers' generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.assistant import PacelineAssistant

PROMPT = torch.tensor([[5, 9, 2, 7, 5, 9, 2, 7, 5, 9]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: Any, assistant: Any = None, **options: Any) -> list[int]:
    options = {"max_new_tokens": 60, "do_sample": False, **options}
    ids = torch.ones_like(PROMPT)
    output = model.generate(PROMPT, attention_mask=ids, custom_generate=assistant, **options)
    return list(output[0].tolist())


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}])
def test_greedy_tokens_equal_those_of_transformers(model: Any, options: dict[str, Any]) -> None:
    assistant = PacelineAssistant("ngram", options={"min_n": "1"})
    assert generate(model, assistant, **options) == generate(model, **options)
    stats = assistant.stats
    assert stats.emitted == 60
    assert stats.emitted <= stats.rounds + stats.accepted <= stats.emitted + 1


def test_the_target_as_drafter_saves_passes(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assistant = PacelineAssistant("lm", tmp_path, options={"widths": "1", "depth": "6"})
    assert generate(model, assistant) == generate(model)
    assert assistant.stats.rounds < 30


def test_sampled_tokens_do_not_depend_on_the_drafter(model: Any) -> None:
    texts = []
    for options, nodes in (({"min_n": "1"}, 16), ({"min_n": "5", "max_n": "5"}, 1)):
        torch.manual_seed(7)
        assistant = PacelineAssistant("ngram", options=options, nodes=nodes)
        texts.append(generate(model, assistant, do_sample=True, temperature=0.8, top_k=20))
    assert texts[0] == texts[1]
    torch.manual_seed(8)
    other = generate(model, PacelineAssistant("ngram"), do_sample=True, temperature=0.8, top_k=20)
    assert other != texts[0]


def test_an_end_token_ends_the_text(model: Any) -> None:
    free = generate(model)
    end = free[PROMPT.shape[1] + 20]
    assert generate(model, PacelineAssistant(), eos_token_id=end) == generate(
        model, eos_token_id=end
    )


def test_batches_are_refused(model: Any) -> None:
    two = PROMPT.repeat(2, 1)
    ones = torch.ones_like(two)
    with pytest.raises(ValueError, match="one sequence"):
        model.generate(
            two, attention_mask=ones, custom_generate=PacelineAssistant(), max_new_tokens=2
        )
