"""Tokenizers, chat templates and special tokens of folders are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.client import TextCodec
from paceline.convert import folder_tokenizer, open_model
from paceline.decoder import UnsupportedModelError

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = {letter: place for place, letter in enumerate(LETTERS)} | {"ab": 256}
MERGES = [("a", "b")]
SPECIAL = {"<b>": 257, "<e>": 258}
TEXTS = ["ab c", "", "<b>ab<e>", "  x\n\n1", "日本 😀"]
MODEL = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "bos_token_id": 3, "eos_token_id": 4, "max_position_embeddings": 64,
}  # fmt: skip


def folder_of(path: Path, files: dict[str, Any], **config: Any) -> Path:
    """A folder with config.json and these files, as JSON unless they are text."""
    for name, content in ({"config.json": {**MODEL, **config}} | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return path


def fast(**parts: Any) -> Tokenizer:
    """A byte-level tokenizer with two special tokens."""
    found = Tokenizer(models.BPE(vocab=VOCAB, merges=MERGES))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(SPECIAL))
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def same_as_transformers(folder: Path) -> TextCodec:
    """The folder's tokenizer, whose ids are those of transformers."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    codec = TextCodec(open_model(folder).tokenizer)
    for text in TEXTS:
        assert codec.encode(text) == reference(text).input_ids, text
        plain = reference(text, add_special_tokens=False).input_ids
        assert codec.encode_rendered(text) == plain
    return codec


NAMED = {"bos_token": "<b>", "eos_token": "<e>", "unk_token": None, "pad_token": None}
SLOW = {
    "vocab.json": {**VOCAB, **SPECIAL},
    "merges.txt": "#version: 0.2\na b\n",
    "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", **NAMED},
}


def test_a_vocabulary_and_merges_become_a_tokenizer(tmp_path: Path) -> None:
    codec = same_as_transformers(folder_of(tmp_path, SLOW))
    assert codec.encode("ab") == [256]


ADDS = processors.TemplateProcessing(
    single="<b> $A <e>", pair="<b> $A $B", special_tokens=list(SPECIAL.items())
)


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_first_and_last_tokens_are_the_tokenizer_s(
    adds: bool, add_bos: bool | None, tmp_path: Path
) -> None:
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    if add_bos is not None:  # which counts where there is no tokenizer.json
        named["add_bos_token"] = add_bos
    text = fast(**({"post_processor": ADDS} if adds else {})).to_str()
    files = {"tokenizer.json": text, "tokenizer_config.json": named}
    codec = same_as_transformers(folder_of(tmp_path, files))
    assert codec.encode("ab") == ([257, 256, 258] if adds else [256])
    config = open_model(tmp_path).config()
    assert config.bos_token_id == (257 if adds else None)  # whatever config.json names
    assert config.eos_token_ids == (258, 4)


@pytest.mark.parametrize("bos", [-1, 10**12])
def test_an_id_without_a_token_is_no_bos(bos: int, tmp_path: Path) -> None:
    for named, expected in ((3, 3), (bos, None)):
        folder = folder_of(tmp_path, {}, bos_token_id=named)
        assert open_model(folder).config().bos_token_id == expected


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_vocabulary_has_the_bos_that_its_configuration_adds(
    add_bos: bool, tmp_path: Path
) -> None:
    named = {"tokenizer_class": "Qwen2Tokenizer", **NAMED, "add_bos_token": add_bos}
    codec = same_as_transformers(folder_of(tmp_path, {**SLOW, "tokenizer_config.json": named}))
    assert codec.encode("ab") == ([257, 256] if add_bos else [256])
    assert open_model(tmp_path).config().bos_token_id == (257 if add_bos else None)


def test_a_tokenizer_that_needs_no_change_keeps_its_bytes(tmp_path: Path) -> None:
    text = json.dumps(json.loads(fast().to_str()), indent=3)
    config = {"add_bos_token": False, **NAMED}
    folder = folder_of(tmp_path, {"tokenizer.json": text, "tokenizer_config.json": config})
    assert open_model(folder).tokenizer == text.encode()


def test_tokens_that_only_the_configuration_adds(tmp_path: Path) -> None:
    token = {
        "special": True,
        **dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False),
    }
    config = {**NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}
    config["added_tokens_decoder"] = {
        str(number): token | {"content": text} for text, number in {**SPECIAL, "<new>": 259}.items()
    }
    files = {"tokenizer.json": fast().to_str(), "tokenizer_config.json": config}
    codec = same_as_transformers(folder_of(tmp_path, files))
    assert codec.encode("<new>") == [259]


def test_end_tokens_are_the_tokenizer_s_and_the_generation_config_s(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": fast().to_str(),
        "tokenizer_config.json": NAMED,
        "generation_config.json": {"eos_token_id": [7, 258, 9]},
    }
    assert open_model(folder_of(tmp_path, files)).config().eos_token_ids == (258, 7, 9)


def test_a_folder_without_any_tokenizer_has_none(tmp_path: Path) -> None:
    source = open_model(folder_of(tmp_path, {}))
    assert source.tokenizer == b""
    assert (source.config().bos_token_id, source.config().eos_token_ids) == (3, (4,))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {}}, "has no tokenizer.json, although"),
        ({"special_tokens_map.json": {}}, "has no tokenizer.json, although"),
        ({"vocab.json": VOCAB}, "has vocab.json, but neither merges.txt nor tokenizer.json"),
        ({"merges.txt": "a b"}, "has merges.txt, but neither vocab.json nor tokenizer.json"),
        ({**SLOW, "vocab.json": "{"}, "cannot read .*vocab.json"),
        ({**SLOW, "vocab.json": ["a"]}, "vocab.json is list, expected a JSON object"),
        ({"tokenizer.model": "no model"}, "has tokenizer.model, of which .* expected tokenizer"),
        ({"tokenizer.json": "{"}, "cannot read .*tokenizer.json"),
        ({"tokenizer.json": {}}, "tokenizer.json is no tokenizer that can be used"),
        ({"tokenizer.json": "\ufeff{}"}, "tokenizer.json"),
        ({"tokenizer.json": "[1]"}, "tokenizer.json"),
        ({"tokenizer.json": fast().to_str(), "tokenizer_config.json": "1"}, "tokenizer_config"),
    ],
)
def test_files_that_make_no_tokenizer_are_named(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        _ = open_model(folder_of(tmp_path, files)).tokenizer
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


GROWS = normalizers.Sequence([normalizers.Replace("a", "aa")] * 24)
SHOWS_MORE = decoders.Sequence([decoders.Replace("a", "a" * 999)])
BACKTRACKS = pre_tokenizers.Split(Regex(r"(a|a)*(a|a)*b$|(1|1)+$"), "isolated")


@pytest.mark.parametrize(
    "parts", [{"normalizer": GROWS}, {"decoder": SHOWS_MORE}, {"pre_tokenizer": BACKTRACKS}]
)
def test_a_tokenizer_that_takes_too_much_is_refused(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_tokenizer, "_SECONDS", 1.0)
    folder = folder_of(tmp_path, {"tokenizer.json": fast(**parts).to_str()})
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        _ = open_model(folder).tokenizer


A, B, C = "{{ 'a' }}", "{{ 'b' }}", "{{ 'c' }}"
TOKENS: dict[str, Any] = {
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
        ({"chat_template": A},
         {"chat_template.jinja": B, "additional_chat_templates/tool_use.jinja": C}),
        ({"extra_special_tokens": {"audio_token": "<audio>"}}, {}),
        ({}, {"special_tokens_map.json": json.dumps({"eos_token": {"content": "<end>"}})}),
        ({"added_tokens_decoder": {}},
         {"special_tokens_map.json": json.dumps({"eos_token": "<end>"})}),
    ],
)  # fmt: skip
def test_a_folder_has_what_its_tokenizer_has(
    config: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS | kind | config))
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
