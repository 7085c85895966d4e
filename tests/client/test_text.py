"""Tokenizers are fetched once a digest; text of tokens one at a time has no half characters."""

import gzip
import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.transport import MockTransport
from fakes.verifier import DIGEST, TOKENIZER, World
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from paceline.client import Client, Detokenizer, InvalidRequestError, PreconditionError, _text
from paceline.client._text import TextCodec, TokenizerCache

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


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer is in memory."""
    monkeypatch.setattr(_text, "_loaded", {})


async def served(world: World) -> int:
    """How often the tokenizer itself was sent."""
    return sum(1 for asked in world.verifier.models_asked if not asked.omit_tokenizer)


async def generate(world: World, folder: Path | None) -> None:
    async with Client(world.address, cache_dir=folder) as client:
        result = await client.generate("ab", max_new_tokens=3)
        assert len(result.text) == 3


async def test_memory_serves_the_second_client(world: World) -> None:
    await generate(world, None)
    await generate(world, None)
    assert await served(world) == 1


async def test_disk_serves_the_next_process(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await generate(world, tmp_path / "new")
    monkeypatch.setattr(_text, "_loaded", {})
    await generate(world, tmp_path / "new")
    assert await served(world) == 1
    assert [file.name for file in (tmp_path / "new").iterdir()] == [f"{DIGEST}.json.gz"]


# Named, because gzip writes the time: two workers have to call a test the same.
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not gzip", id="not gzip"),
        pytest.param(gzip.compress(b"{}"), id="another tokenizer"),
        pytest.param(gzip.compress(TOKENIZER)[:-9], id="cut short"),
        pytest.param(gzip.compress(TOKENIZER)[:20] + b"\xff" * 20, id="damaged"),
    ],
)
async def test_an_invalid_file_is_ignored_and_replaced(
    world: World, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / f"{DIGEST}.json.gz"
    file.write_bytes(content)
    await generate(world, tmp_path)
    assert await served(world) == 1
    assert gzip.decompress(file.read_bytes()) == TOKENIZER


async def test_a_folder_that_cannot_be_written_is_no_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    await generate(world, tmp_path / "file" / "below")
    assert await served(world) == 1


def test_content_must_have_its_digest() -> None:
    with pytest.raises(PreconditionError, match="digest"):
        TokenizerCache(None).add(DIGEST, gzip.compress(TOKENIZER + b" "))


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"", "ends early"),
        (b"not gzip", "header"),
        (gzip.compress(TOKENIZER)[:-9], "ends early"),
        (gzip.compress(bytes(1 << 20)), "longer than 0 MiB"),
        (gzip.compress(b"{}"), "at line 1"),
        (gzip.compress(b'{"version": "1.0", "truncation": ' + b"[" * 9999), "at line 1"),
    ],
    ids=["empty", "not gzip", "cut short", "too long", "no tokenizer", "deep"],
)
def test_a_tokenizer_that_cannot_be_read(
    packed: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_text, "_MAX_TOKENIZER", 1 << 19)
    content = b""
    with suppress(OSError, EOFError):
        content = gzip.decompress(packed)
    digest = hashlib.sha256(content).hexdigest()
    with pytest.raises(PreconditionError, match=f"cannot be read.*{message}"):
        TokenizerCache(None).add(digest, packed)


def test_a_prompt_on_which_the_tokenizer_fails() -> None:
    """Its library gives up on some texts, with an error that is no `Exception`."""
    tokenizer = Tokenizer.from_str(TOKENIZER.decode())
    tokenizer.normalizer = normalizers.Replace(Regex("(a|aa)+$"), "b")
    codec = TextCodec(tokenizer.to_str().encode())
    assert codec.encode("aac")
    for encode in (codec.encode, codec.encode_rendered):
        with pytest.raises(InvalidRequestError, match="tokenizer fails on this prompt"):
            encode("a" * 60 + "c")
