"""Tokenizers of GGUF files, as llama.cpp reads them: the content of a tokenizer.json, end tokens.

A file has a vocabulary, merges or scores, and the name of a rule that splits text into words
(``tokenizer.ggml.pre``); the rule itself is part of llama.cpp. The rules here are its regular
expressions, for the names that its converter writes into files of architectures in ``FAMILIES``.
What this module does not know is refused by name: another rule would give other tokens.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.convert.fim import FIM_TEXTS
from paceline.convert.gguf_file import GgufArray, GgufFile
from paceline.decoder.config import UnsupportedModelError

_log = logging.getLogger(__name__)
_KEY = "tokenizer.ggml."
# Types of tokens; the others are pieces of text, bytes, and tokens that are not used.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_MAX_CHARACTERS = (
    256  # characters of a SentencePiece token, whose splits are all tried; trainers allow 16
)

_TICKS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_TICKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_TICKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}"
_LATIN = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_THREE = rf"\p{{N}}{{1,3}}|{_SLASH}|{_SPACES}"

_ALIKE = {
    "gpt2": "gpt-2 a.x-4.0 mellum trillion granite-docling exaone4",
    "llama3": "llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez hunyuan",
    "deepseek-v3": "hunyuan-dense",
    "starcoder": "refact smollm minerva-7b mellum2",
}

_LLAMA3_NAMES = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"}
)

# Names whose vocabulary decides before the merges: a word that is a token is that token.
_IGNORE_MERGES = _LLAMA3_NAMES | {"tekken", "minicpm5"}

# Names whose texts begin with BOS unless the file says otherwise.
_ADD_BOS = _LLAMA3_NAMES | {"tekken"}

# Tokens that end a text, whatever the file says of them.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip

# Tokens of gaps and between files, which end a text too: by key, else by text.
_FILLS = {
    "fim_pad_token_id": FIM_TEXTS["fim_pad_token"],
    "fim_rep_token_id": FIM_TEXTS["fim_repo_token"],
    "fim_sep_token_id": FIM_TEXTS["fim_file_token"],
}

# Control tokens, whatever type a file gives them.
_CONTROL_TEXTS = _ENDS.union(*FIM_TEXTS.values())

# Names of special tokens in transformers, and in the file, where one is misspelt and some have an
# older name.
_SPECIAL_TOKENS = {
    "bos_token": ("bos_token_id",),
    "eos_token": ("eos_token_id",),
    "unk_token": ("unknown_token_id",),
    "sep_token": ("seperator_token_id",),
    "pad_token": ("padding_token_id",),
    "cls_token": ("cls_token_id",),
    "mask_token": ("mask_token_id",),
    "fim_prefix_token": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suffix_token": ("fim_suf_token_id", "suffix_token_id"),
    "fim_middle_token": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad_token": ("fim_pad_token_id",),
    "fim_repo_token": ("fim_rep_token_id",),
    "fim_file_token": ("fim_sep_token_id",),
}


def _cased(letters: tuple[str, str], ticks: str, rest: str) -> str:
    """Return the words of capital and then of small letters, or of capital letters alone."""
    capital, small = letters
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{capital}*{small}+{ticks}|{lead}{capital}+{small}*{ticks}|{rest}"


# How text is split into words: each expression splits the parts that the one before it made.
_RULES: Mapping[str, Sequence[str]] = {
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]",
    ),
    "gpt2": (_GPT2,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "starcoder": (r"\p{N}", _GPT2),
    "deepseek-llm": (
        "[\r\n]",
        "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
        "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ"
        "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$", _HAN, r"\p{N}+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    "qwen35": (
        rf"{_TICKS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "viking": (" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    "tekken": (_cased(_LATIN, "", rf"\p{{N}}|{_SLASH}|{_SPACES}"),),
    "gpt-4o": (_cased(_LATIN, f"{_TICKS}?", _THREE),),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "seed-coder": (
        rf"{_TICKS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
        rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
    "ufakzeka": (_QWEN2.removeprefix(f"{_TICKS}|"),),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
}  # fmt: skip

# Rules by their names in `tokenizer.ggml.pre`.
PRE_TOKENIZERS: Mapping[str, Sequence[str]] = {
    **{name: rule for name, rule in _RULES.items() if name != "gpt2"},
    **{name: _RULES[rule] for rule, names in _ALIKE.items() for name in names.split()},
}


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a file, and their types."""

    tokens: list[str]
    types: list[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


class GgufTokenizer:
    """The tokenizer of a file. All methods raise ``UnsupportedModelError`` for what is not known,
    missing or damaged."""

    def __init__(self, file: GgufFile, vocab_size: int) -> None:
        """Name the file; ``vocab_size`` is the number of tokens that the model knows."""
        self._file, self._vocab_size = file, vocab_size
        self.model = str(file.metadata.get(f"{_KEY}model", "none"))
        self._pre = str(file.metadata.get(f"{_KEY}pre", "default"))
        self._gemma4 = self.model == "gemma4"

    @property
    def exists(self) -> bool:
        """Whether the file has one."""
        return self.model not in ("none", "no_vocab") or f"{_KEY}tokens" in self._file.metadata

    def token(self, name: str) -> int | None:
        """Return a token id of the metadata by its key, or None."""
        token = self._file.metadata.get(_KEY + name)
        if token is None:
            return None
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._limit:
            raise self._error(name, f"is {token!r}, expected a token id below {self._limit}")
        return token

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the special tokens by their names in transformers; an id of padding
        and the like that is no token has none, since nothing else needs it."""
        if not self.exists:
            return {}
        ends = {"bos_token_id": self.bos, "eos_token_id": self.eos}
        named = {**self._file.metadata, **{_KEY + key: token for key, token in ends.items()}}
        ids = {
            name: next((named[_KEY + key] for key in keys if _KEY + key in named), None)
            for name, keys in _SPECIAL_TOKENS.items()
        }
        tokens = self._vocabulary.tokens
        return {
            name: tokens[token]
            for name, token in ids.items()
            if isinstance(token, int) and 0 <= token < len(tokens)
        }

    @property
    def added_bos(self) -> int | None:
        """The token that the tokenizer puts before a text."""
        if not self.exists:
            return self.bos
        bos, named = self.bos, f"{_KEY}add_bos_token" in self._file.metadata
        adds = self._flag("add_bos_token", self._is_spm or self._pre in _ADD_BOS) or self._gemma4
        if adds and bos is None and named:
            raise self._error("add_bos_token", f"is true, but {_KEY}bos_token_id is not set")
        return bos if adds else None

    @property
    def bos(self) -> int | None:
        """The token that begins a text, whether the tokenizer adds it or not."""
        token = self.token("bos_token_id")
        return 1 if token is None and self._is_spm and self._limit > 1 else token

    @property
    def eos(self) -> int | None:
        """The token that ends a text."""
        token = self.token("eos_token_id")
        return 2 if token is None and self._is_spm and self._limit > 2 else token

    def ends(self) -> tuple[int, ...]:
        """Return all tokens that end a text or a turn, the tokenizer's own first."""
        named = [self.eos, self.token("eot_token_id"), self.token("eom_token_id")]
        ends = [end for end in named if end is not None]
        if self.exists:
            ids = self._vocabulary.ids
            for key, texts in _FILLS.items():
                token = self.token(key)
                by_text = sorted(ids[text] for text in texts if text in ids)
                ends += [token] if token is not None else by_text[:1]
            ends += sorted(ids[text] for text in _ENDS if text in ids)
            ends = [end for end in ends if self._vocabulary.tokens[end] not in self._not_ends]
        return tuple(dict.fromkeys(ends))

    def tokenizer_json(self) -> str:
        """Return the content of a tokenizer.json; empty if the file has no tokenizer."""
        from tokenizers import Tokenizer

        if not self.exists:
            return ""
        if self.model == "gpt2":
            parts = self._byte_level()
        elif self._is_spm:
            parts = self._sentencepiece(self._pairs(), self._flag("add_space_prefix", True))
        elif self._gemma4:
            lines = {"type": "Split", "pattern": {"Regex": "\n+"}, "behavior": "Isolated"}
            parts = self._sentencepiece(self._merges(), prefix=False)
            parts["pre_tokenizer"] = {**lines, "invert": False}
        else:
            raise self._error(
                "model",
                f"is {self.model!r}, which is not supported; expected 'gpt2' (byte-level BPE), "
                "'llama' (SentencePiece) or 'gemma4' (BPE)",
            )
        described = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added()),
            **parts,
        }
        if begin_or_end := self._template():
            described["post_processor"] = begin_or_end
        text = json.dumps(described, ensure_ascii=False)
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise self._error("merges", f"and tokens make no tokenizer: {error}") from error
        return text

    @property
    def _is_spm(self) -> bool:
        return self.model == "llama"

    @property
    def _limit(self) -> int:
        return len(self._vocabulary.tokens) if self.exists else self._vocab_size

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        tokens = self._strings("tokens")
        if len(tokens) > self._vocab_size:
            raise self._error(
                "tokens",
                f"are {len(tokens)}, more than the {self._vocab_size} rows of the embedding",
            )
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        known: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if known.setdefault(token, index) != index:
                raise self._error("tokens", f"has {token!r} at {known[token]} and at {index}")
        types = self._numbers("token_type", len(tokens)) or [1] * len(tokens)
        return _Vocabulary(tokens, [int(kind) for kind in types])

    @cached_property
    def _not_ends(self) -> set[str]:
        """Tokens that end a message but no turn, and one that is text in models with tools."""
        known = self._vocabulary.ids.keys()
        harmony = {"<|return|>", "<|call|>"} <= known
        solar = "<|flush|>" in known and not known.isdisjoint(("<|call|>", "<|calls|>"))
        texts = {"<|end|>"} if harmony or solar else set()
        return texts | ({"</s>"} if "<|tool_response>" in known else set())

    def _added(self) -> Iterator[dict[str, Any]]:
        """Yield tokens that are found in a text before anything else."""
        known = self._vocabulary
        name = str(self._file.metadata.get("general.name", "")).lower()
        strips = "phi-3" in name or "phi3" in name
        for index, (token, kind) in enumerate(zip(known.tokens, known.types, strict=True)):
            by_name = token in _CONTROL_TEXTS and token not in self._not_ends
            special = kind in (_CONTROL, _UNKNOWN) or by_name
            if not special and kind != _USER_DEFINED:
                continue
            plain = token in ("<unk>", "<s>", "<|endoftext|>")
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and not plain,
                "normalized": False,
                "special": special,
            }

    def _byte_level(self) -> dict[str, Any]:
        if self._pre not in PRE_TOKENIZERS:
            raise self._error(
                "pre",
                f"is {self._pre!r}, a rule for splitting text that is not known; expected one of "
                f"{', '.join(sorted(PRE_TOKENIZERS))}",
            )
        if f"{_KEY}pre" not in self._file.metadata:
            _log.warning(
                "%s does not say how its text is split (%spre): llama.cpp's default is used, which "
                "is not that of any model",
                self._file.path, _KEY,
            )  # fmt: skip
        splits: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
            for expression in PRE_TOKENIZERS[self._pre]
        ]
        level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        bytes_of = {"type": "ByteLevel", **level}
        merges = dict.fromkeys(self._merges())
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_of]},
            "post_processor": None,
            "decoder": bytes_of,
            "model": self._bpe(merges, ignore_merges=self._pre in _IGNORE_MERGES),
        }

    def _merges(self) -> Iterator[tuple[str, str]]:
        for index, merge in enumerate(self._strings("merges")):
            first, gap, second = merge[:1], *merge[1:].partition(" ")[::2]
            if not second:
                raise self._error("merges", f"has {merge!r} at {index}, expected two tokens")
            yield first + gap, second

    def _sentencepiece(self, merges: Iterable[tuple[str, str]], prefix: bool) -> dict[str, Any]:
        unknown = self.token("unknown_token_id") or 0
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        model = self._bpe(
            merges,
            unk_token=self._vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*steps, space]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Yield all pairs of tokens that make a token, the highest score first."""
        known = self._vocabulary
        scores = self._numbers("scores", len(known.tokens)) or [0.0] * len(known.tokens)
        if not all(map(math.isfinite, scores)):
            raise self._error("scores", "has a value that is not finite")
        for index in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
            token = known.tokens[index]
            if len(token) > _MAX_CHARACTERS:
                raise self._error(
                    "tokens",
                    f"has {len(token)} characters at {index}, expected up to {_MAX_CHARACTERS}",
                )
            for at in range(1, len(token)):
                if token[:at] in known.ids and token[at:] in known.ids:
                    yield token[:at], token[at:]

    def _bpe(self, merges: Iterable[tuple[str, str]], **options: Any) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **options,
            "vocab": self._vocabulary.ids,
            "merges": [list(pair) for pair in merges],
        }

    def _template(self) -> dict[str, Any] | None:
        """Return what the tokenizer adds before and behind a text."""
        bos, eos, tokens = self.added_bos, self.eos, self._vocabulary.tokens
        add_eos = self._flag("add_eos_token", False)
        if add_eos and eos is None:
            raise self._error("add_eos_token", f"is true, but {_KEY}eos_token_id is not set")
        return _added_template(
            None if bos is None else (tokens[bos], bos),
            (tokens[eos], eos) if add_eos and eos is not None else None,
        )

    def _flag(self, name: str, default: bool) -> bool:
        value = self._file.metadata.get(_KEY + name, default)
        if not isinstance(value, bool):
            raise self._error(name, f"is {value!r}, expected true or false")
        return value

    def _array(self, name: str) -> GgufArray | None:
        value = self._file.metadata.get(_KEY + name)
        if value is not None and not isinstance(value, GgufArray):
            raise self._error(name, f"is {value!r}, expected an array")
        return value

    def _strings(self, name: str) -> list[str]:
        array = self._array(name)
        if array is None:
            raise self._error(name, "is missing")
        try:
            return array.strings()
        except ValueError as error:
            raise UnsupportedModelError(f"{self._file.path}: {error}") from error

    def _numbers(self, name: str, count: int) -> Sequence[float]:
        """Return the values of an array, at least so many; none: there is no such array."""
        array = self._array(name)
        if array is None:
            return ()
        if array.count < count:
            raise self._error(name, f"has {array.count} values for {count} tokens")
        try:
            return array.numbers()[:count]
        except ValueError as error:
            raise UnsupportedModelError(f"{self._file.path}: {error}") from error

    def _error(self, name: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._file.path}: {_KEY}{name} {what}")


def _added_template(
    begin: tuple[str, int] | None, end: tuple[str, int] | None
) -> dict[str, Any] | None:
    """Return the part of a tokenizer.json that adds tokens, each a text and an id, before and
    behind a text; None: it adds none."""
    if begin is None and end is None:
        return None

    def whole(sequence: str, kind: int) -> list[dict[str, Any]]:
        named = [end and {"SpecialToken": {"id": end[0], "type_id": kind}} for end in (begin, end)]
        parts = [named[0], {"Sequence": {"id": sequence, "type_id": kind}}, named[1]]
        return [part for part in parts if part]

    return {
        "type": "TemplateProcessing",
        "single": whole("A", 0),
        "pair": [*whole("A", 0), *whole("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token], "tokens": [text]}
            for text, token in filter(None, (begin, end))
        },
    }
