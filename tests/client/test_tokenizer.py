"""Tokenizers are fetched once a digest, and kept in memory and on disk."""

import gzip
import hashlib
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.verifier import DIGEST, TOKENIZER, World
from tokenizers import Regex, Tokenizer, normalizers

from paceline.client import Client, InvalidRequestError, PreconditionError, _text
from paceline.client._text import TextCodec, TokenizerCache


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
