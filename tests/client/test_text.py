"""Detokenising a token at a time gives the whole text, and never half a character."""

import json
from collections.abc import Callable

import pytest
from fakes.transport import MockTransport
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from paceline.client import Detokenizer, TextCodec

CORPUS = [
    "the cat sat on the mat",
    "déjà vu à Zürich, привет мир",
    "日本語のテキスト",
    "🎉🎊 fête 🇨🇭 👩\u200d👩\u200d👧",
] * 4


def byte_level() -> Tokenizer:
    """A trained byte-level BPE, as most models have: merges cut across characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece-like, as Llama 2 and Mistral have: a space mark, and bytes for rare text."""
    vocabulary = {"<unk>": 0, "<s>": 1}
    vocabulary |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for text in ("▁", *"abcdefgh", "é", "�", "ab", "▁ab", "▁a"):
        vocabulary[text] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(["[UNK]", "a", "##b", "##c", "do", ".", "n't"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspace() -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(["<unk>", "▁", "▁a", "b", "▁▁", "c"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    build.__name__: build() for build in (byte_level, byte_fallback, word_piece, metaspace)
}
CODECS = {name: TextCodec(built.to_str().encode()) for name, built in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_give_the_whole_text(name: str, data: st.DataObject) -> None:
    """Even tokens no tokenizer would make, unknown ids among them, in runs longer than a window."""
    size = TOKENIZERS[name].get_vocab_size()
    ids = st.integers(0, size + 1)
    runs = st.tuples(ids, st.integers(1, 50)).map(lambda run: [run[0]] * run[1])
    pieces = data.draw(st.lists(st.one_of(st.lists(ids, max_size=6), runs), max_size=6))
    tokens = [token for piece in pieces for token in piece]
    detokenizer = Detokenizer(CODECS[name])
    text = "".join([*map(detokenizer.push, tokens), detokenizer.flush()])
    assert text == TOKENIZERS[name].decode(tokens)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=40))
def test_characters_are_never_split(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(CODECS[name])
    tokens = tokenizer.encode(text).ids
    whole = tokenizer.decode(tokens)
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        assert whole.startswith(shown)
    assert shown + detokenizer.flush() == whole


def test_a_step_decodes_only_the_newest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid text, and an endless run of bad bytes, cost the same at every length."""
    codec = TextCodec(TOKENIZERS["byte_level"].to_str().encode())
    lengths: list[int] = []
    decode: Callable[[list[int]], str] = codec.decode

    def counted(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return decode(tokens)

    monkeypatch.setattr(codec, "decode", counted)
    bad = TOKENIZERS["byte_level"].token_to_id("ÿ")
    for tokens in (codec.encode("the cat 日本 " * 100), [bad] * 500):
        detokenizer = Detokenizer(codec)
        for token in tokens:
            detokenizer.push(token)
        assert max(lengths) <= 64


def test_the_bos_token_is_added_once() -> None:
    codec = CODECS["byte_level"]
    assert codec.encode("the", bos_token_id=0)[0] == 0
    built = byte_level()
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    own = TextCodec(built.to_str().encode())
    assert own.encode("the", bos_token_id=0) == codec.encode("the", bos_token_id=0)


def test_a_tokenizer_without_decoder_works() -> None:
    content = json.loads(MockTransport("").json)
    content["decoder"] = None
    codec = TextCodec(json.dumps(content).encode())
    detokenizer = Detokenizer(codec)
    text = "".join(map(detokenizer.push, [97, 98])) + detokenizer.flush()
    assert text == codec.decode([97, 98])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_the_bytes_of_tokens_joined_are_the_text(name: str) -> None:
    """But for the space that a decoder strips off the beginning."""
    codec = CODECS[name]
    tokens = codec.encode("a bé ☃ 😀\n")
    assert b"".join(map(codec.token_bytes, tokens)).decode().strip(" ") == codec.decode(tokens)
    special = codec.encode("<s>")[-1]
    assert codec.token_text(special) == "<s>"
    assert codec.token_bytes(1 << 20) == b""
    halves = [codec.token_text(token) for token in codec.encode("☃")]
    assert "bytes:\\xe2" in halves[0] or name == "byte_fallback"
