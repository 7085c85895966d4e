"""Text: tokenizers, the served model, streamed text, and what a generation has emitted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from paceline.v1 import sampling_pb2, verifier_pb2

from ._errors import InvalidRequestError, PreconditionError

_REPLACEMENT = "\ufffd"
# A window of incomplete text is cut at the first length, to the second. Unit: tokens. An incomplete
# character has at most 3 bytes, so at most 3 tokens.
_LONG_WINDOW, _SHORT_WINDOW = 32, 8

# Maximum length of a tokenizer.json that is read. The largest known has some 35 MB. Unit: bytes.
_MAX_TOKENIZER = 256 << 20

# Longer prompts are tokenised in a thread, to keep the event loop free. Unit: characters.
_LONG_PROMPT = 20_000

LOCAL = "local"  # the drafter that is a verifier's own guesses, without a drafter service

_loaded: dict[str, TextCodec] = {}
FinishReason = Literal["stop", "length", "cancelled"]
Proposer = Literal["drafter", "verifier"]
Undrafted = Literal["no_drafter", "node_budget", "not_ready", "late", "empty", "last_token"]

UNDRAFTED: dict[int, Undrafted] = {
    verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER: "no_drafter",
    verifier_pb2.NO_DRAFT_REASON_NODE_BUDGET: "node_budget",
    verifier_pb2.NO_DRAFT_REASON_NOT_READY: "not_ready",
    verifier_pb2.NO_DRAFT_REASON_LATE: "late",
    verifier_pb2.NO_DRAFT_REASON_EMPTY: "empty",
    verifier_pb2.NO_DRAFT_REASON_LAST_TOKEN: "last_token",
}

_FINISH_REASONS: dict[int, FinishReason] = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


def _byte_level_alphabet() -> dict[str, int]:
    """Map printable bytes to their own characters, others to those from U+0100 on, in order."""
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
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._texts: dict[int, str] = {}
        # The file itself as Python objects would take five times its size.
        state = self._tokenizer.decoder
        decoder = state and json.loads(state.__getstate__())
        self._has_byte_fallback = _has_decoder(decoder, "ByteFallback")
        self._is_byte_level = _has_decoder(decoder, "ByteLevel")

    def __repr__(self) -> str:
        return f"<TextCodec of {self._tokenizer.get_vocab_size()} tokens>"

    def encode(self, text: str, bos_token_id: int | None = None) -> list[int]:
        """Return token ids of a prompt, with the special tokens that the tokenizer adds."""
        tokens = self._ids(text)
        if bos_token_id is not None and tokens[:1] != [bos_token_id]:
            tokens.insert(0, bos_token_id)
        return tokens

    def encode_rendered(self, text: str) -> list[int]:
        """Return token ids of a chat template's output, which contains its special tokens."""
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode`, this lets other threads run, and finds no offsets.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise InvalidRequestError(
                f"the model's tokenizer fails on this prompt: {error}", metadata={"param": "prompt"}
            ) from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def is_silent(self, token: int) -> bool:
        """Return whether decoding skips the token: it is special, or beyond the vocabulary."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens with these names; others have none."""
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return self._special.intersection(ids)

    def added_id(self, name: str) -> int | None:
        """Return the id of an added token, special or not, by its name; None if there is none."""
        token = self._tokenizer.token_to_id(name)
        return token if token in self._added else None

    def is_raw_byte(self, token: int) -> bool:
        """Return whether the token is one byte, decoded together with its neighbours."""
        return token in self._raw_bytes

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, the name of a special one; empty beyond the vocabulary.

        The joined bytes of consecutive tokens are the text, except for what a decoder strips off
        its start. The bytes of one token may be part of a character.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
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
        text = self._texts.get(token)
        if text is None:
            raw = self.token_bytes(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token] = text  # at most the vocabulary; log-probabilities need thousands
        return text

    @cached_property
    def _raw_bytes(self) -> frozenset[int]:
        if not self._has_byte_fallback:
            return frozenset()
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in ids if token is not None)


class Detokenizer:
    """Converts streamed tokens to text. The joined pieces equal `codec.decode(all tokens)`, and
    have the names of special tokens of which the caller wants to know (`shown`) in between.

    Each step decodes a window of the newest tokens. The window starts where the text was complete,
    one piece before the incomplete part, because some decoders treat the first token of a text
    differently (they strip its space).

    The end of the text is buffered while a later token may change it: one U+FFFD, to which an
    incomplete UTF-8 sequence decodes, and a run of byte-fallback tokens, because one invalid byte
    changes the text of the whole run.

    `tokenizers.decoders.DecodeStream` (0.23) cannot replace it: it never returns an incomplete end,
    raises in byte-fallback runs that are no UTF-8, and takes quadratic time for a long run of
    invalid bytes.
    """

    def __init__(self, codec: TextCodec, shown: frozenset[int] = frozenset()) -> None:
        self._codec = codec
        self._shown = shown
        self._context: list[int] = []
        self._context_text = ""
        self._fresh: list[int] = []
        self._released = 0

    def __repr__(self) -> str:
        return f"<Detokenizer: {self._fresh_text()[self._released :]!r} is not final>"

    def push(self, token: int) -> str:
        """Add a token and return the text that became final, often empty."""
        if token in self._shown:
            return self._end_piece() + self._codec.token_text(token)
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
        """Return the buffered text, when no token follows."""
        piece = self._fresh_text()[self._released :]
        self._released += len(piece)
        return piece

    def _end_piece(self) -> str:
        """Return the buffered text, which later tokens no longer change."""
        piece = self.flush()
        if self._fresh:
            self._context, self._fresh = self._fresh, []
            self._context_text = self._codec.decode(self._context)
            self._released = 0
        return piece

    def _shorten(self, buffered: int) -> None:
        """Cut a long run of invalid bytes to its newest tokens; `buffered` characters remain.

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


class TokenizerCache:
    """Tokenizers by the SHA-256 hex digest of their tokenizer.json.

    A file with the wrong digest is ignored, and so is a folder that cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, digest: str) -> TextCodec | None:
        """Return the codec if it is cached. Reads and parses files: call it in a thread."""
        codec = _loaded.get(digest)
        if codec is None and self._folder is not None and digest:
            try:
                content = _unpacked(self._path(digest).read_bytes())
            except (OSError, ValueError):
                return None
            if hashlib.sha256(content).hexdigest() == digest:
                codec = _loaded[digest] = _codec_of(content)
        return codec

    def add(self, digest: str, packed: bytes) -> TextCodec:
        """Cache a gzip-compressed tokenizer.json from `GetModel` and return its codec.

        Raises PreconditionError if the content is no tokenizer, or does not have the digest.
        """
        try:
            content = _unpacked(packed)
        except ValueError as error:
            raise PreconditionError(f"the verifier's tokenizer cannot be read: {error}") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise PreconditionError(
                f"the verifier's tokenizer does not have the digest {digest} of its model"
            )
        codec = _loaded[digest] = _codec_of(content)
        if self._folder is not None:
            _write_atomically(self._path(digest), packed)
        return codec

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest}.json.gz"


def _unpacked(packed: bytes) -> bytes:
    """Return gzip-compressed content. Raises ValueError if it is not that, or too long."""
    reader = zlib.decompressobj(wbits=31)
    try:
        content = reader.decompress(packed, _MAX_TOKENIZER)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not reader.eof:
        raise ValueError(f"it ends early, or is longer than {_MAX_TOKENIZER >> 20} MiB")
    return content


def _codec_of(content: bytes) -> TextCodec:
    """Return the codec of a tokenizer.json. Raises PreconditionError if it is none."""
    try:
        return TextCodec(content)
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise PreconditionError(f"the verifier's tokenizer cannot be read: {error}") from None


def _is_panic(error: BaseException) -> bool:
    """Return whether it is a failure inside the tokenizers library, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file such that no reader sees a part of it; do nothing if it cannot be written."""
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            Path(folder, path.name).write_bytes(content)
            Path(folder, path.name).replace(path)


def drafters_of(facts: verifier_pb2.GetModelResponse) -> list[str]:
    """Return names of drafters that have joined a verifier, its default one first, and ``local`` if
    it guesses by itself: first where the default one would only look up too."""
    default, names = [], list[str]()
    for service in facts.drafter_services:
        first = service.default_drafter
        listed = sorted(service.drafters, key=lambda info: (info.name != first, info.name))
        names += [info.name for info in listed]
        default += [info.method for info in listed if info.name == names[0]]
    if not facts.local_sources:
        return names
    return [LOCAL, *names] if {*default} <= {"ngram"} else [*names, LOCAL]


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

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of drafters that had joined its verifier, as `Client.drafters` orders them."""
        return tuple(dict.fromkeys(drafters_of(self.facts)))

    async def encode(self, prompt: str) -> list[int]:
        """Return token ids of a text prompt, those that the tokenizer itself gives. Raises
        InvalidRequestError without a tokenizer."""
        return await _unblocked(self.tokens, prompt)

    async def encode_rendered(self, prompt: str) -> list[int]:
        """Return token ids of a chat template's output, which contains its special tokens."""
        return await _unblocked(self.tokens_of_rendered, prompt)

    def tokens(self, prompt: str) -> list[int]:
        """Return the synchronous form of `encode`, for threads: it takes long for a long prompt."""
        bos = self.facts.bos_token_id if self.facts.HasField("bos_token_id") else None
        return self._tokenizer.encode(prompt, bos)

    def tokens_of_rendered(self, prompt: str) -> list[int]:
        """Return the synchronous form of `encode_rendered`, for threads."""
        return self._tokenizer.encode_rendered(prompt)

    @property
    def _tokenizer(self) -> TextCodec:
        if self.codec is None:
            raise InvalidRequestError(
                f"{self.facts.name} is served without a tokenizer: give the prompt as token ids"
            )
        return self.codec


async def _unblocked(encode: Callable[[str], list[int]], prompt: str) -> list[int]:
    """Return the tokens of a prompt, in a thread if it is long."""
    if len(prompt) > _LONG_PROMPT:
        return await asyncio.to_thread(encode, prompt)
    return encode(prompt)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, before sampling parameters."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, likeliest first, if requested."""
    text: str = ""
    """The token by itself; a part of a character in OpenAI's form "bytes:\\xe2\\x98". Empty without
    a tokenizer."""


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The drafted tree of one step and its accepted nodes."""

    tokens: tuple[int, ...]
    """Token of each node, in topological order."""
    parents: tuple[int, ...]
    """Parent of each node: an earlier node, or -1 for the anchor, the newest token."""
    accepted: tuple[int, ...]
    """Accepted nodes, from the root down."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one step with a tree, or of consecutive steps without one."""

    text: str
    """Text that is final. An incomplete character, and text that may begin a stop string, come
    with a later chunk."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, if requested."""
    proposed_by: tuple[Proposer, ...]
    """Which service proposed each token."""
    round: int
    """Index in `Stats.rounds`, counted from 1; 0 is the prefill."""
    pieces: tuple[str, ...]
    """Text that became final with each token; joined they are `text`."""
    tree: VerifiedTree | None = None
    """The verified tree; None without one."""
    undrafted: Undrafted | None = None
    """Why there is no tree: no drafter was asked for; drafting does not pay at the moment; the
    drafter has not joined, is not ready or failed; its tree was late; it had nothing to propose;
    only one token is left. None with a tree, for the prefill, and for tokens received again."""
    steps: int = 0
    """Engine steps; 0 for the prefill, and for tokens received again."""


class EmittedText:
    """Collects the output of a generation.

    A stop string ends the text before it, and the tokens with the one that completes it.
    """

    def __init__(
        self, codec: TextCodec | None, stops: Sequence[str], special_tokens: Sequence[str] = ()
    ) -> None:
        self._codec = codec
        shown = codec.special_ids(special_tokens) if codec else frozenset()
        self._detokenizer = Detokenizer(codec, shown) if codec else None
        self._stops = StopMatcher(stops)
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | Literal[""] = ""

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def add(self, response: verifier_pb2.Round, round_index: int) -> Chunk:
        """Add the tokens of a response, detokenize them and find stop strings."""
        result = response.result
        pieces = [] if self._detokenizer is None else self._read(result.tokens)
        tokens = tuple(result.tokens[: len(pieces)] if self._detokenizer else result.tokens)
        logprobs = _logprobs(result, self._codec)[: len(tokens)]
        self.token_ids.extend(tokens)
        self.logprobs.extend(logprobs)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        elif result.finish_reason:
            self.finish_reason = _FINISH_REASONS.get(result.finish_reason, "stop")
            self._finish(pieces)
        text = "".join(pieces)
        if text:
            self._text.append(text)
        tree, accepted = None, tuple(result.accepted_nodes)
        if response.tree.tokens:
            tree = VerifiedTree(tuple(response.tree.tokens), tuple(response.tree.parents), accepted)
        return Chunk(
            text,
            tokens,
            tuple(logprobs),
            tuple("drafter" if i < len(accepted) else "verifier" for i in range(len(tokens))),
            round_index,
            tuple(pieces),
            tree,
            UNDRAFTED.get(response.no_draft),
            response.steps,
        )

    def _read(self, tokens: Iterable[int]) -> list[str]:
        """Return the final text of each token, up to the one that completes a stop string."""
        assert self._detokenizer is not None
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._stops.push(self._detokenizer.push(token)))
            if self._stops.matched is not None:
                break
        return pieces

    def _finish(self, pieces: list[str]) -> None:
        """Add the buffered text to the last piece."""
        if self._detokenizer is None:
            return
        rest = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        rest += self._stops.flush()
        if pieces:
            pieces[-1] += rest
        elif rest:
            pieces.append(rest)


class StopMatcher:
    """Returns text up to the first stop string that is complete.

    The stop string whose last character comes first ends the text; among those that end at the
    same character, the longest. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._buffer = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece and return the text that is final.

        The buffer keeps only text that may begin a stop string. After `matched` is set, the text
        has ended, and this returns nothing more.
        """
        if not self._stops or self.matched is not None:
            return piece if self.matched is None else ""
        text = self._buffer + piece
        ends = [(start + len(s), -len(s), s) for s in self._stops if (start := text.find(s)) >= 0]
        if ends:
            end, negative_length, self.matched = min(ends)
            self._buffer = ""
            return text[: end + negative_length]
        keep = undecided(text, self._stops)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the buffered text, when the generation has ended."""
        text, self._buffer = self._buffer, ""
        return text


def undecided(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that begins a mark and is shorter."""
    limit = min(len(text), max(map(len, marks), default=1) - 1)
    return next(
        (n for n in range(limit, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


def prompt_logprobs(
    prompt: Sequence[int], created: verifier_pb2.CacheCreated, codec: TextCodec | None
) -> list[TokenLogprob]:
    """Return the log-probabilities of the tokens of a prompt but the first."""
    return _entries(prompt[1:], created.prompt_logprobs, created.top_prompt_logprobs, codec)


def _logprobs(result: verifier_pb2.RoundResult, codec: TextCodec | None) -> list[TokenLogprob]:
    if not result.logprobs:
        return []
    return _entries(result.tokens, result.logprobs, result.top_logprobs, codec)


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[verifier_pb2.TopLogprobs],
    codec: TextCodec | None,
) -> list[TokenLogprob]:
    tops = [tuple(zip(top.tokens, top.logprobs, strict=True)) for top in top_logprobs]
    tops += [()] * (len(tokens) - len(tops))
    return [
        TokenLogprob(token, logprob, top, codec.token_text(token) if codec else "")
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
