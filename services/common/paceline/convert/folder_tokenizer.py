"""The tokenizer of a Hugging Face folder: that which transformers builds of its files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.convert.folder_files import one_line, parse_object, read_file, read_object
from paceline.convert.model_source import file_facts, remembered_by_transformers
from paceline.convert.sandbox import Progress, run_in_child
from paceline.decoder.config import UnsupportedModelError
from paceline.decoder.remembered import remembered

_log = logging.getLogger(__name__)
_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_DESCRIPTIONS = (_CONFIG, "special_tokens_map.json", "added_tokens.json")
_VOCAB, _MERGES = "vocab.json", "merges.txt"
# Vocabularies of tokenizers that are not in tokenizer.json.
_VOCABULARIES = (
    _VOCAB, _MERGES, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt",
    "tekken.json", "tiktoken.model", "qwen.tiktoken",
)  # fmt: skip
_SECONDS, _MEMORY = 30.0, 4 << 30  # of a trial
_LENGTH = 1024
_PROBES = [
    *(
        letter * _LENGTH + end
        for letter in ("a", "A", " ", "1", "é", "日", "\n", "!")
        for end in "a!"
    ),
    "the quick brown fox, 12345 times.\n\t" * 30,
]
_TOKENS_OF_A_CHARACTER = 16


@dataclass(frozen=True)
class FolderTokenizer:
    """A tokenizer that was built and tried."""

    content: str  # content of a tokenizer.json, if the folder's differs; "": it does not
    added: list[int]  # token ids of an empty text: what the tokenizer adds

    # Token ids of the special tokens by their texts; None for those it does not have.
    ids: dict[str, int | None]


def folder_tokenizer(
    folder: Path, special_tokens: Mapping[str, str], vocab_size: int | None
) -> FolderTokenizer | None:
    """Return the tokenizer of a folder, kept between starts; None: it has no file of one.
    ``special_tokens`` are texts by name, such as "bos_token"; it warns of token ids from
    ``vocab_size`` on. Raises ``UnsupportedModelError`` if a file is missing or damaged, or the
    tokenizer takes too much time or memory."""
    files = [folder / name for name in (_JSON, *_DESCRIPTIONS, *_VOCABULARIES)]
    there = [file for file in files if file.exists() or file.is_symlink()]
    if not there:
        return None
    facts = ("folder tokenizer", *(file_facts(file) for file in there if file.is_file()))
    fields = remembered(
        (*facts, sorted(special_tokens.items())),
        lambda: {**asdict(_built(folder, special_tokens, vocab_size, facts))},
    )
    return FolderTokenizer(**fields)


def _built(
    folder: Path, special_tokens: Mapping[str, str], vocab_size: int | None, facts: tuple[Any, ...]
) -> FolderTokenizer:
    raw = read_file(folder / _JSON)
    config = read_object(folder / _CONFIG)
    changed = ""
    if not raw or _lacks(folder, raw, config):
        changed = str(remembered_by_transformers(facts, partial(_by_transformers, folder)))
    where = folder / (_JSON if raw else _CONFIG)
    named = set(special_tokens.values())
    probed = probe(where, changed or _text(folder / _JSON, raw), named)
    if vocab_size is not None and probed.max_id >= vocab_size:
        _log.warning(
            "%s has tokens up to %d, but the model has %d: texts with the others are refused",
            where, probed.max_id, vocab_size,
        )  # fmt: skip
    return FolderTokenizer(changed, probed.added, probed.ids)


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UnsupportedModelError(f"{path} is not UTF-8: {error}") from error


def _lacks(folder: Path, raw: bytes, config: Mapping[str, Any]) -> bool:
    """Return whether tokens that the folder adds with their ids are not in tokenizer.json."""
    described = config.get("added_tokens_decoder")
    added = [
        item.get("content") for item in (described if isinstance(described, dict) else {}).values()
        if isinstance(item, dict)
    ]  # fmt: skip
    added += read_object(folder / "added_tokens.json")
    known = parse_object(folder / _JSON, raw)
    model = known.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    tokens: set[Any] = {token for token in vocab if isinstance(token, str)}
    listed = known.get("added_tokens")
    if isinstance(listed, list):
        tokens |= {str(item.get("content")) for item in listed if isinstance(item, dict)}
    if isinstance(vocab, list):  # of a unigram model: pairs of text and score
        tokens |= {item[0] for item in vocab if isinstance(item, list) and item}
    return any(isinstance(token, str) and token not in tokens for token in added)


def _by_transformers(folder: Path) -> str:
    """Return the content of a tokenizer.json, built of the other files by transformers."""
    there = [name for name in (_JSON, *_VOCABULARIES) if (folder / name).is_file()]
    if not there:
        raise UnsupportedModelError(
            f"{folder} has no {_JSON}, although it describes a tokenizer; expected {_JSON}, or "
            f"{_VOCAB} with {_MERGES}, or tokenizer.model"
        )
    for name, other in ((_VOCAB, _MERGES), (_MERGES, _VOCAB)):
        if name in there and other not in there and _JSON not in there:
            raise UnsupportedModelError(f"{folder} has {name}, but neither {other} nor {_JSON}")
    vocab = read_object(folder / _VOCAB) if _VOCAB in there else {}
    try:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        backend = made.backend_tokenizer
        missing = [text for text, token in vocab.items() if backend.token_to_id(text) != token]
        if missing or (not vocab and backend.get_vocab_size() < 256 and _JSON not in there):
            raise ValueError(f"the tokenizer that it builds lacks the tokens of {there[0]}")
        text: str = backend.to_str()
    except Exception as error:  # damaged files make the libraries raise anything
        raise UnsupportedModelError(
            f"{folder} has {', '.join(there)}, of which transformers builds no tokenizer "
            f"({one_line(error)}); expected {_JSON}: save it with AutoTokenizer where all that "
            "the tokenizer needs is installed"
        ) from error
    return text


@dataclass(frozen=True)
class Probed:
    """What a tokenizer did: token ids that it adds, ids of named tokens, and the largest id."""

    added: list[int]
    ids: dict[str, int | None]
    max_id: int


def probe(path: Path, content: str, tokens: Iterable[str]) -> Probed:
    """Try a tokenizer in a child process: its expressions and replacements are programs, which may
    take for ever, or make a text endless.

    Raises ``UnsupportedModelError`` if it is no tokenizer, or takes too much time or memory.
    """
    what = f"{path}: an expression or a replacement of the tokenizer, on short texts,"
    try:
        return run_in_child(
            partial(_try, content, sorted(tokens)), what, seconds=_SECONDS, memory=_MEMORY
        )
    except UnsupportedModelError:
        raise
    except Exception as error:  # the library raises anything
        raise UnsupportedModelError(
            f"{path} is no tokenizer that can be used: {one_line(error)}"
        ) from error


def _try(content: str, tokens: Sequence[str], _: Progress) -> Probed:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.encode("").ids
    for text in _PROBES:
        ids = tokenizer.encode(text).ids
        if len(ids) > len(added) + _TOKENS_OF_A_CHARACTER * len(text):
            raise ValueError(f"{len(text)} characters become {len(ids)} tokens")
        shown = tokenizer.decode(ids)
        if len(shown) > 4 * _TOKENS_OF_A_CHARACTER * len(text):
            raise ValueError(f"{len(text)} characters become {len(shown)} when they are decoded")
    ids_of = {text: tokenizer.token_to_id(text) for text in tokens}
    return Probed(added, ids_of, max(tokenizer.get_vocab().values(), default=-1))
