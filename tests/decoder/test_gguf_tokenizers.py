"""Tokenizers of GGUF files: ids and end tokens are those of llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as Kind
from tokenizers import Tokenizer

from paceline.client._text import BYTE_OF
from paceline.convert.fim import fim_tokens
from paceline.convert.gguf_file import GgufArray, GgufFile
from paceline.convert.gguf_tokenizer import PRE_TOKENIZERS, GgufTokenizer
from paceline.decoder import UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# The 256 tokens of a byte-level vocabulary; that of byte b is at another id.
LETTERS = list(BYTE_OF)

TEXT = "x =  12345\n\n  3 it's IT'S camelCase हिन्दी, 日本語カ<b>😀!!\r\n\tend? "
# The words of `TEXT` by llama.cpp's table, parted by bars, for all names of a rule. Where it takes
# all letters beyond ASCII for one kind, or does not see a border between words, these are the words
# of its expressions themselves, as the libraries of the models apply them.
PIECES = {
    "default":
        "x| |=| | |123|45|\n\n | |3| it|'|s| IT|'|S| camelCase| ह|ि|न|्|द|ी|,| 日本"
        "語カ|<|b|>|😀|!!|\r\n|\t|end|?| ",
    "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe":
        "x| =| | |123|45|\n\n| | |3| it|'s| IT|'S| camelCase| ह|िन|्द|ी,| 日本語カ|<b"
        "|>😀!!\r\n|\tend|?| ",
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan":
        "x| =| | |1|2|3|4|5|\n\n| | |3| it|'s| IT|'S| camelCase| ह|िन|्द|ी,| 日本語カ"
        "|<b|>😀!!\r\n|\tend|?| ",
    "starcoder refact smollm minerva-7b mellum2":
        "x| =|  |1|2|3|4|5|\n\n  |3| it|'s| IT|'|S| camelCase| ह|ि|न|्|द|ी,| 日本語カ"
        "|<|b|>😀!!|\r\n|\t|end|?| ",
    "deepseek-llm":
        "x| =|  |12345|\n|\n|  |3| it|'|s| IT|'|S| camelCase| |हिन्दी|,| |日本語カ|<|"
        "b|>|😀|!!|\r|\n|\tend|?| ",
    "deepseek-coder":
        "x| =  |1|2|3|4|5|\n|\n|  |3| it|'|s| IT|'|S| camelCase| |ह|ि|न|्|द|ी|,| "
        "|日本語カ|<|b|>😀|!!|\r|\n|\tend|?| ",
    "viking":
        "x| =| | |1|2|3|4|5|\n\n | |3| it's| IT'S| camelCase| हिन्दी|,| 日本語カ<b>😀|"
        "!!\r\n\t|end|? ",
    "tekken":
        "x| =| | |1|2|3|4|5|\n\n| | |3| it|'s| IT|'S| camel|Case| ह|िन|्द|ी,| 日本語"
        "カ|<b|>😀!!\r\n|\tend|?| ",
    "gpt-4o":
        "x| =| | |123|45|\n\n| | |3| it's| IT'S| camel|Case| ह|िन|्द|ी,| 日本語カ|<b|"
        ">😀!!\r\n|\tend|?| ",
    "superbpe":
        "x =  |12|345|\n\n  |3| it's IT'S camelCase हिन्दी, 日本語カ<b>😀!!\r\n\tend? ",
    "seed-coder":
        "x| =| | |1|2|3|4|5|\n\n| | |3| it|'s| IT|'S| camelCase| ह|िन|्द|ी,| 日本語カ"
        "|<b|>😀!!|\r\n|\tend|?| ",
    "ufakzeka":
        "x| =| | |1|2|3|4|5|\n\n| | |3| it|'s| IT|'S| camelCase| ह|िन|्द|ी,| 日本語カ"
        "|<b|>😀!!\r\n|\tend|?| ",
    "minicpm5":
        "x| =|  |123|45|\n\n|  |3| it|'s| IT|'S| camelCase| ह|िन|्द|ी,| 日本語カ|<b|>"
        "😀!!\r\n|\tend|?| ",
    "deepseek-v3 hunyuan-dense":
        "x| =|  |123|45|\n\n|  |3| it|'s| IT|'S| camelCase| हिन्दी|,| |日本語カ|<b|>"
        "😀!!\r\n|\tend|?| ",
    "qwen35":
        "x| =| | |1|2|3|4|5|\n\n| | |3| it|'s| IT|'S| camelCase| हिन्दी|,| 日本語カ"
        "|<b|>😀!!\r\n|\tend|?| ",
    "gpt-2 a.x-4.0 mellum trillion granite-docling exaone4":
        "x| =| | 12345|\n\n | 3| it|'s| IT|'|S| camelCase| ह|ि|न|्|द|ी,| 日本語カ|<|b"
        "|>😀!!|\r\n|\t|end|?| ",
}  # fmt: skip


def tokenizer_of(
    path: Path, tokens: Sequence[str], types: Sequence[int] = (), merges: Sequence[str] | None = (),
    scores: Sequence[float] = (), *, rows: int = 0, **keys: Any,
) -> GgufTokenizer:  # fmt: skip
    """The tokenizer of a file with these values; ``keys`` lack "tokenizer.ggml."."""
    arrays = {"tokens": tokens, "token_type": types, "scores": scores, "merges": merges}
    metadata: dict[str, Any] = {
        f"tokenizer.ggml.{name}": array(f"tokenizer.ggml.{name}", values)
        for name, values in arrays.items()
        if values or (name == "merges" and values is not None)
    }
    for key, value in keys.items():
        metadata[key if "." in key else f"tokenizer.ggml.{key}"] = value
    return GgufTokenizer(GgufFile(path / "model.gguf", metadata, {}), rows or len(tokens))


def array(key: str, values: Sequence[Any]) -> GgufArray:
    """An array as a file has it; an empty one is of strings."""
    if all(isinstance(value, str) for value in values):
        texts = [value.encode() for value in values]
        data = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        return GgufArray(key, Kind.STRING, len(texts), memoryview(data))
    kind, form = (Kind.INT32, "i") if isinstance(values[0], int) else (Kind.FLOAT32, "f")
    packed = struct.pack(f"<{len(values)}{form}", *values)
    return GgufArray(key, kind, len(values), memoryview(packed))


def built(tokenizer: GgufTokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.tokenizer_json())


def byte_level(path: Path, *special: str, extra: Sequence[str] = (), **keys: Any) -> GgufTokenizer:
    """A byte-level vocabulary with some special tokens, and words that no merge makes."""
    types = [NORMAL] * 256 + [CONTROL] * len(special) + [NORMAL] * len(extra)
    keys = {"model": "gpt2", "pre": "gpt-2", **keys}
    return tokenizer_of(path, [*LETTERS, *special, *extra], types, **keys)


@pytest.mark.parametrize("style", ["<|fim_{}|>", "<fim_{}>"])
def test_tokens_of_texts_in_the_middle_are_found_by_key_or_by_text(
    style: str, tmp_path: Path
) -> None:
    parts = ("prefix", "suffix", "middle")
    texts = {f"fim_{part}_token": style.format(part) for part in parts}
    by_text = byte_level(tmp_path, "<x>", extra=list(texts.values()))
    assert fim_tokens(by_text.tokenizer_json().encode()) == texts
    keys = {"fim_pre_token_id": 257, "suffix_token_id": 258, "fim_mid_token_id": 256}
    found = byte_level(tmp_path, "<x>", "<y>", "<z>", **keys)
    assert fim_tokens(found.tokenizer_json().encode()) == {}
    named = {name: text for name, text in found.special_tokens().items() if "fim" in name}
    assert named == dict(zip(texts, ("<y>", "<z>", "<x>"), strict=True))


def test_each_name_of_a_rule_splits_text_by_its_rule(tmp_path: Path) -> None:
    pieces = {name: words for names, words in PIECES.items() for name in names.split()}
    assert pieces.keys() == PRE_TOKENIZERS.keys()
    for name, expected in pieces.items():
        found = built(byte_level(tmp_path, pre=name)).pre_tokenizer
        words = [word for word, _ in found.pre_tokenize_str(TEXT)]
        plain = [bytes(BYTE_OF[letter] for letter in word).decode() for word in words]
        assert "|".join(plain) == expected, name


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("pre", "gemma4 bloom whitespace granite-embed-multi-311m new GPT-2"),
        ("model", "bert t5 rwkv plamo2 hybriddna new"),
    ],
)
def test_rules_and_kinds_that_are_not_known_are_refused_by_their_names(
    key: str, names: str, tmp_path: Path
) -> None:
    for name in names.split():
        with pytest.raises(
            UnsupportedModelError, match=rf"model\.gguf: tokenizer\.ggml\.{key} .*{name}"
        ):
            byte_level(tmp_path, **{key: name}).tokenizer_json()


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", [258]), ("tekken", [258]), ("qwen2", [257, "c"])]
)
def test_some_vocabularies_decide_before_the_merges(
    pre: str, ids: list[int | str], tmp_path: Path
) -> None:
    tokens = [*LETTERS, "ab", "bc", "abc"]
    merges = ["b c", "a b"]
    keys: dict[str, Any] = {"model": "gpt2", "pre": pre, "add_bos_token": False}
    found = built(tokenizer_of(tmp_path, tokens, [1] * 259, merges, **keys))
    # By the merges alone, "abc" is never made: "bc" comes first.
    wanted = [LETTERS.index("a"), 257] if ids[0] == 257 else ids
    assert found.encode("abc").ids == wanted


SPECIAL = ["<｜User｜>", "<|im_start|>", "<юзер>", "<用户>"]


def test_special_tokens_of_any_script_are_one_id_below_the_vocabulary(tmp_path: Path) -> None:
    found = built(byte_level(tmp_path, *SPECIAL, pre="qwen2"))
    for place, token in enumerate(SPECIAL):
        a = LETTERS.index("a")
        assert found.encode(f"a{token}a").ids == [a, 256 + place, a]
        assert found.decode([a, 256 + place]) == "a"
    assert max(found.get_vocab().values()) == 255 + len(SPECIAL)


def test_user_defined_tokens_are_found_and_shown(tmp_path: Path) -> None:
    types = [*[NORMAL] * 256, USER_DEFINED]
    found = built(tokenizer_of(tmp_path, [*LETTERS, "<x y>"], types, model="gpt2", pre="qwen2"))
    assert found.encode("<x y>").ids == [256]
    assert found.decode([256]) == "<x y>"


@pytest.mark.parametrize(
    ("keys", "first", "last"),
    [
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "tekken", "add_eos_token": True}, True, True),
        ({"pre": "qwen2"}, False, False),
        ({"pre": "qwen2", "add_bos_token": True}, True, False),
        ({"pre": "smollm", "add_eos_token": True}, False, True),
    ],
)
def test_first_and_last_tokens_are_those_of_the_file_or_of_its_rule(
    keys: dict[str, Any], first: bool, last: bool, tmp_path: Path
) -> None:
    named = {"bos_token_id": 256, "eos_token_id": 257}
    found = built(byte_level(tmp_path, "<b>", "<e>", **named, **keys))
    a = LETTERS.index("a")
    assert found.encode("a").ids == [*[256] * first, a, *[257] * last]
    assert found.encode("a", add_special_tokens=False).ids == [a]


WORDS = ["▁", "▁[", "[", "I", "N", "]", "H", "i", "Hi", "▁H", "▁Hi", "IN"]
PIECES_OF_TEXT = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
SCORES = [0.0] * 259 + [-float(place) for place in range(len(WORDS))]


PIECEWISE: dict[str, Any] = {
    "tokens": PIECES_OF_TEXT, "types": TYPES, "scores": SCORES, "merges": None, "model": "llama",
}  # fmt: skip


def sentencepiece(path: Path, **keys: Any) -> Tokenizer:
    return built(tokenizer_of(path, **PIECEWISE, **keys))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<s>[IN] Hi", ["<s>", "▁[", "IN", "]", "▁Hi"]),
        ("</s>Hi</s>", ["</s>", "▁Hi", "</s>"]),
        (" Hi", ["▁", "▁Hi"]),
        ("  Hi", ["▁", "▁", "▁Hi"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("Hi\n", ["▁Hi", "<0x0A>"]),
        ("", []),
    ],
)
def test_sentencepiece_text_begins_with_a_space_behind_each_special_token(
    text: str, pieces: list[str], tmp_path: Path
) -> None:
    found = sentencepiece(tmp_path)
    encoded = found.encode(text, add_special_tokens=False)
    assert encoded.tokens == pieces
    shown = text.replace("<s>", "").replace("</s>", "")
    assert found.decode(encoded.ids) == shown
    # Without a word in the file, it is as Llama's: BOS is added.
    assert found.encode(text).tokens == ["<s>", *pieces]


def test_sentencepiece_without_a_prefix(tmp_path: Path) -> None:
    found = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    for text, pieces in (("Hi", ["Hi"]), ("<s>Hi", ["<s>", "Hi"]), (" Hi", ["▁Hi"])):
        assert found.encode(text).tokens == pieces
        assert found.decode(found.encode(text).ids) == text.replace("<s>", "")


def test_gemma4_merges_pieces_of_a_line_and_its_text_begins_with_bos(tmp_path: Path) -> None:
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "H", "i", "\n", "Hi", "▁Hi", "\n\n", "i\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<|tool_call>", *letters, *pieces]
    types = [CONTROL] * 5 + [USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(pieces)
    merges = ["i \n", "H i", "▁ Hi", "\n \n"]
    keys = {"model": "gemma4", "add_bos_token": False}  # as in some files, whatever the model needs
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    found = built(tokenizer_of(tmp_path, tokens, types, merges, **keys, **ids))
    for text, expected in (
        ("Hi Hi", "Hi ▁Hi"),
        ("<|turn> Hi\n\n", "<|turn> ▁Hi \n\n"),
        ("Hi\n<|tool_call>\n", "Hi \n <|tool_call> \n"),
        ("é", "<0xC3> <0xA9>"),
    ):
        encoded = found.encode(text)
        assert encoded.tokens == ["<bos>", *expected.split(" ")]
        assert found.decode(encoded.ids) == text.replace("<|turn>", "")


def test_phi3_leaves_out_the_space_behind_its_special_tokens(tmp_path: Path) -> None:
    tokens = [*PIECES_OF_TEXT, "<|user|>"]
    keys = {"model": "llama", "general.name": "Phi3 Mini"}
    scores = [*SCORES, 0.0]
    found = built(tokenizer_of(tmp_path, tokens, [*TYPES, CONTROL], None, scores, **keys))
    for text, pieces in (
        ("<|user|>\n Hi", ["<s>", "<|user|>", "▁Hi"]),
        ("<s> Hi", ["<s>", "<s>", "▁", "▁Hi"]),
    ):
        assert [tokens[token] for token in found.encode(text).ids] == pieces


@pytest.mark.parametrize(
    ("special", "keys", "ends"),
    [
        ("<|endoftext|> <|im_end|>", {"eos": 257}, "<|im_end|> <|endoftext|>"),
        ("<|endoftext|> <|end|> <|user|>", {"eos": 256}, "<|endoftext|> <|end|>"),
        ("<|end_of_text|> <|eom_id|> <|eot_id|>", {"eos": 258},
         "<|eot_id|> <|end_of_text|> <|eom_id|>"),
        ("<|return|> <|call|> <|end|> <|message|>", {"eos": 256}, "<|return|> <|call|>"),
        ("<|calls|> <|flush|> <|end|>", {}, "<|calls|> <|flush|>"),
        ("<|tool_response> </s> <turn|>", {}, "<|tool_response> <turn|>"),
        ("<a> <b> <c>", {"eot": 257, "eom": 258}, "<b> <c>"),
        ("<｜end▁of▁sentence｜> <｜User｜>", {}, "<｜end▁of▁sentence｜>"),
        ("<|fim_pad|> <|repo_name|> <|file_sep|> <|fim_prefix|>", {},
         "<|fim_pad|> <|repo_name|> <|file_sep|>"),
        ("<|repo_name|> <a>", {"fim_rep": 257}, "<a>"),
        ("<end_of_turn> <eos> <bos>", {"bos": 258}, "<end_of_turn> <eos>"),
    ],
)  # fmt: skip
def test_a_text_ends_with_all_tokens_that_end_a_turn(
    special: str, keys: dict[str, int], ends: str, tmp_path: Path
) -> None:
    tokens = special.split()
    named = {f"{key}_token_id": token for key, token in keys.items()}
    found = byte_level(tmp_path, *tokens, **named).ends()
    assert [tokens[token - 256] for token in found] == ends.split()


def test_an_end_token_is_special_whatever_its_type(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, extra=["<|im_end|>"], pre="qwen2")
    found = built(tokenizer)
    assert tokenizer.ends() == (256,)
    assert found.encode("a<|im_end|>").ids == [LETTERS.index("a"), 256]
    assert found.decode([256]) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rows": 200}, "tokens are 257, more than the 200 rows"),
        ({"bos_token_id": 257}, "bos_token_id is 257, expected a token id below 257"),
        ({"bos_token_id": "a"}, "bos_token_id is 'a'"),
        ({"add_bos_token": 1}, "add_bos_token is 1, expected true or false"),
        ({"add_bos_token": True}, "add_bos_token is true, but tokenizer.ggml.bos_token_id"),
        ({"add_eos_token": True}, "add_eos_token is true, but tokenizer.ggml.eos_token_id"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "merges has 'ab' at 0"),
        ({"merges": ["a b"]}, "merges and tokens make no tokenizer"),
        ({"types": [1, 1]}, "token_type has 2 values for 257 tokens"),
        ({"types": ["a"] * 257}, "token_type is an array of STRING, expected numbers"),
        ({"tokens": list(range(9))}, "tokens is an array of INT32, expected strings"),
        ({"tokens": ["a", "b", "a"]}, "tokens has 'a' at 0 and at 2"),
        ({**PIECEWISE, "scores": [0.0]}, "scores has 1 values"),
        ({**PIECEWISE, "scores": [float("nan")] * 271}, "scores has a value that is not finite"),
        ({**PIECEWISE, "tokens": [*PIECES_OF_TEXT[:-1], "x" * 300]},
         "tokens has 300 characters at 270"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_tokenizer_is_named(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"tokens": [*LETTERS, "<x>"], "model": "gpt2", "pre": "gpt-2", **keys}
    with pytest.raises(UnsupportedModelError) as error:
        tokenizer_of(tmp_path, **given).tokenizer_json()
    assert str(error.value).startswith(f"{tmp_path}/model.gguf: tokenizer.ggml.{message}")
