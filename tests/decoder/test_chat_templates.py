"""Chat templates and special tokens of model folders, compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from paceline.convert import open_model

A, B, C = "{{ 'a' }}", "{{ 'b' }}", "{{ 'c' }}"
SPECIAL: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>"},
    "pad_token": None,
    "image_token": "<image>",
}


def template_list(**named: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in named.items()]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": A}, {}),
        ({"chat_template": template_list(default=A, tool_use=B)}, {}),
        ({"chat_template": A}, {"chat_template.jinja": B}),
        (
            {"chat_template": A},
            {"chat_template.jinja": B, "additional_chat_templates/tool_use.jinja": C},
        ),
        ({"extra_special_tokens": {"audio_token": "<audio>"}}, {}),
        ({}, {"special_tokens_map.json": json.dumps({"eos_token": {"content": "<end>"}})}),
        (
            {"added_tokens_decoder": {}},
            {"special_tokens_map.json": json.dumps({"eos_token": "<end>"})},
        ),
    ],
)
def test_a_folder_has_what_its_tokenizer_has(
    config: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL | kind | config))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    source = open_model(tmp_path)
    assert source.special_tokens == tokenizer.special_tokens_map
    expected = tokenizer.chat_template or {}
    if isinstance(expected, str):
        expected = {"default": expected}
    assert source.chat_templates == expected
    assert source.chat_template == expected.get("default", "")
