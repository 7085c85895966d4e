"""Tokenizers: a cache of them, text of streamed tokens, and the served model."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from paceline.v1 import verifier_pb2

from ._errors import InvalidRequestError, PreconditionError

_REPLACEMENT = "\ufffd"
# A window of incomplete text is cut at the first length, to the second. Unit: tokens. An incomplete
# character has at most 3 bytes, so at most 3 tokens.
_LONG_WINDOW, _SHORT_WINDOW = 32, 8

# Longer prompts are tokenised in a thread, to keep the event loop free. Unit: characters.
_LONG_PROMPT = 20_000


def _byte_level_alphabet() -> dict[str, int]:
    """Printable bytes map to their own characters, the others to those from U+0100 on, in order."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


BYTE_OF = _byte_level_alphabet()
"""Byte of each character in the tokens of a byte-level tokenizer."""


class TextCodec:
    """A tokenizer, with its properties for incremental detokenization. Immutable; shared."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        # Truncation and padding that were saved with the tokenizer must not change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = frozenset(
            token
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        )
        decoder = json.loads(tokenizer_json).get("decoder")
        self._has_byte_fallback = _has_decoder(decoder, "ByteFallback")
        self._is_byte_level = _has_decoder(decoder, "ByteLevel")

    def encode(self, text: str, bos_token_id: int | None = None) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        if bos_token_id is not None and tokens[:1] != [bos_token_id]:
            tokens.insert(0, bos_token_id)
        return tokens

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a chat template's output, which contains its special tokens."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def is_silent(self, token: int) -> bool:
        """Whether decoding skips the token: it is special, or beyond the vocabulary."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def is_raw_byte(self, token: int) -> bool:
        """Whether the token is one byte, decoded together with its neighbours."""
        return token in self._raw_bytes

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token, the name of a special one; empty beyond the vocabulary.

        The joined bytes of consecutive tokens are the text, except for what a decoder strips off
        its start. The bytes of one token may be part of a character.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._tokenizer.get_added_tokens_decoder():
            return str(name).encode()
        if self._is_byte_level:
            return bytes(BYTE_OF[character] for character in name if character in BYTE_OF)
        if self.is_raw_byte(token):
            return bytes.fromhex(name[3:5])
        # After another token, so that the decoder strips nothing off it.
        once, twice = self.decode([token]), self.decode([token, token])
        return twice[len(once) :].encode()

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; a part of a character in OpenAI's form "bytes:\\xe2\\x98"."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def _raw_bytes(self) -> frozenset[int]:
        if not self._has_byte_fallback:
            return frozenset()
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in ids if token is not None)


class Detokenizer:
    """Converts streamed tokens to text. The joined pieces equal `codec.decode(all tokens)`.

    Each step decodes a window of the newest tokens. The window starts where the text was complete,
    one piece before the incomplete part, because some decoders treat the first token of a text
    differently (they strip its space).

    The end of the text is buffered while a later token may change it: one U+FFFD, to which an
    incomplete UTF-8 sequence decodes, and a run of byte-fallback tokens, because one invalid byte
    changes the text of the whole run.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._context: list[int] = []
        self._context_text = ""
        self._fresh: list[int] = []
        self._released = 0

    def push(self, token: int) -> str:
        """Adds a token and returns the text that became final, often empty."""
        if self._codec.is_silent(token):
            return ""
        self._fresh.append(token)
        if self._codec.is_raw_byte(token):
            return ""
        text = self._fresh_text()
        complete = not text.endswith(_REPLACEMENT)
        end = len(text) if complete else len(text) - 1
        piece = text[self._released : end]
        self._released = max(end, self._released)
        if complete and text:
            self._context, self._fresh = self._fresh, []
            self._context_text = self._codec.decode(self._context)
            self._released = 0
        elif not complete and len(self._fresh) >= _LONG_WINDOW:
            self._shorten(len(text) - self._released)
        return piece

    def flush(self) -> str:
        """The buffered text, when no token follows."""
        piece = self._fresh_text()[self._released :]
        self._released += len(piece)
        return piece

    def _shorten(self, buffered: int) -> None:
        """Cuts a long run of invalid bytes to its newest tokens; `buffered` characters remain.

        The character at the cut may decode differently, but it was returned before.
        """
        self._context, self._context_text = [], ""
        self._fresh = self._fresh[-_SHORT_WINDOW:]
        self._released = len(self._fresh_text()) - buffered

    def _fresh_text(self) -> str:
        text = self._codec.decode(self._context + self._fresh)
        return text[len(self._context_text) :]


def _has_decoder(decoder: object, kind: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == kind:
        return True
    return any(_has_decoder(part, kind) for part in decoder.get("decoders") or ())


_loaded: dict[str, TextCodec] = {}


class TokenizerCache:
    """Tokenizers by the SHA-256 hex digest of their tokenizer.json.

    A file with the wrong digest is ignored, and so is a folder that cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, digest: str) -> TextCodec | None:
        """The codec if it is cached. Reads and parses files: call it in a thread."""
        codec = _loaded.get(digest)
        if codec is None and self._folder is not None and digest:
            try:
                content = gzip.decompress(self._path(digest).read_bytes())
            except (OSError, EOFError, ValueError):
                return None
            if hashlib.sha256(content).hexdigest() == digest:
                codec = _loaded[digest] = TextCodec(content)
        return codec

    def add(self, digest: str, packed: bytes) -> TextCodec:
        """Caches a gzip-compressed tokenizer.json from `GetModel` and returns its codec.

        Raises PreconditionError if the content does not have the digest.
        """
        content = gzip.decompress(packed)
        if hashlib.sha256(content).hexdigest() != digest:
            raise PreconditionError(
                f"the verifier's tokenizer does not have the digest {digest} of its model"
            )
        codec = _loaded[digest] = TextCodec(content)
        if self._folder is not None:
            _write_atomically(self._path(digest), packed)
        return codec

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest}.json.gz"


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file such that no reader sees a part of it; does nothing if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except (OSError, ValueError):
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Model:
    """The served model and its tokenizer."""

    facts: verifier_pb2.GetModelResponse
    """Response of the verifier, without the tokenizer's content."""
    codec: TextCodec | None
    """The tokenizer. None if the model has none: then prompts and results are token ids."""

    def __repr__(self) -> str:
        facts = self.facts
        return f"<Model {facts.name}: context {facts.max_context}, vocabulary {facts.vocab_size}>"

    async def encode(self, prompt: str) -> list[int]:
        """Token ids of a text prompt. Raises InvalidRequestError without a tokenizer."""
        bos = self.facts.bos_token_id if self.facts.HasField("bos_token_id") else None
        return await self._encode(prompt, lambda codec: codec.encode(prompt, bos))

    async def encode_rendered(self, prompt: str) -> list[int]:
        """Token ids of a chat template's output, which contains its special tokens."""
        return await self._encode(prompt, lambda codec: codec.encode_rendered(prompt))

    async def _encode(self, prompt: str, encode: Callable[[TextCodec], list[int]]) -> list[int]:
        if self.codec is None:
            raise InvalidRequestError(
                f"{self.facts.name} is served without a tokenizer: give the prompt as token ids"
            )
        if len(prompt) > _LONG_PROMPT:
            return await asyncio.to_thread(encode, self.codec)
        return encode(self.codec)
