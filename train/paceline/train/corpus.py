"""The text that drafters are trained on, and which files are held out."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from paceline.convert import open_model
from paceline.train.phases import Phase

STDLIB = "stdlib"
# Installed packages have other licences; `_sysconfigdata*` describes one machine.
_NEVER = frozenset(
    {"site-packages", "encodings", "pydoc_data", "ensurepip", "lib-dynload", "__pycache__"}
)
# Tests and vendored programs are worse training text than the library proper.
_WIDE_ONLY = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"})
_SIZES = (4_000, 90_000)  # bytes
_WIDE_SIZES = (1_000, 400_000)
_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".go", ".js", ".ts")
Documents = Sequence[Sequence[int]]  # token ids of each document
_READ_TOGETHER = 64  # documents that are encoded at a time


@dataclass(frozen=True)
class Document:
    """One file of the corpus: its path inside the corpus, its text and the SHA-256 of its bytes."""

    path: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents; no file is in both, and the order is always the same."""

    source: str
    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    is_stdlib: bool = False

    def manifest(self) -> dict[str, object]:
        """Return what the corpus is made of, JSON-ready: file lists with SHA-256 digests."""

        def rows(documents: tuple[Document, ...]) -> list[dict[str, str]]:
            return [{"path": d.path, "sha256": d.sha256} for d in documents]

        return {"source": self.source, "train": rows(self.train), "heldout": rows(self.heldout)}


def load_corpus(data: str, files: int, heldout_files: int, wide: bool = False) -> Corpus:
    """Collect text files and split them by file.

    `data` is "stdlib" (the source of this Python's standard library) or a folder. Files are put in
    the order of the digest of their path, so the split depends on names alone: the first
    `heldout_files` are held out, the next `files` are trained on. `wide` adds tests and long files
    to the training files; what is held out stays the same.

    Raises FileNotFoundError if the folder is missing or holds too few files.
    """
    is_stdlib = data == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"]) if is_stdlib else Path(data)
    if not root.is_dir():
        raise FileNotFoundError(
            f"corpus {data!r} is no folder: give 'stdlib' or a folder with text files"
        )
    paths = _candidates(root, _NEVER | _WIDE_ONLY, _SIZES)
    if len(paths) <= heldout_files:
        raise FileNotFoundError(
            f"corpus {data!r} holds {len(paths)} usable files, more than {heldout_files} are "
            f"needed: text files of {_SIZES[0]} to {_SIZES[1]} bytes, outside test folders"
        )
    heldout, rest = paths[:heldout_files], paths[heldout_files:]
    if wide:
        rest = [p for p in _candidates(root, _NEVER, _WIDE_SIZES) if p not in heldout]
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(
        source=f"Python {version} standard library" if is_stdlib else f"folder {root.name}",
        train=tuple(_read(path, root) for path in rest[:files]),
        heldout=tuple(_read(path, root) for path in heldout),
        is_stdlib=is_stdlib,
    )


def _candidates(root: Path, skipped: frozenset[str], sizes: tuple[int, int]) -> list[Path]:
    """Return usable files under `root`, in the order of the digest of their relative path."""
    paths = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skipped]
        paths += [
            path
            for path in (Path(folder, name) for name in names)
            if path.suffix in _SUFFIXES
            and not path.name.startswith("_sysconfigdata")
            and path.is_file()
            and sizes[0] <= path.stat().st_size <= sizes[1]
        ]
    return sorted(paths, key=lambda path: _digest(path.relative_to(root).as_posix().encode()))


def _read(path: Path, root: Path) -> Document:
    data = path.read_bytes()
    text = data.decode("utf-8", errors="replace")
    return Document(path.relative_to(root).as_posix(), text, _digest(data))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_tokenizer(target: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model folder or GGUF file, as a service reads it, with its chat
    template. Raises ``FileNotFoundError`` if there is no such model, and ``ValueError`` if it
    cannot be read, or has no tokenizer."""
    source = open_model(target)
    if not source.tokenizer:
        raise ValueError(
            f"{target} has no tokenizer, and training needs one to read texts: give a folder with "
            "a tokenizer.json, or a GGUF file"
        )
    inner = Tokenizer.from_str(source.tokenizer.decode())
    special = {name: source.special_tokens.get(name) for name in ("bos_token", "eos_token")}
    special["eos_token"] = special["eos_token"] or inner.id_to_token(
        source.config().eos_token_ids[0]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = source.chat_template or None
    return tokenizer


def encode_all(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]
) -> list[list[int]]:
    """Return token ids of each document, whole and without special tokens."""
    phase, ids = Phase("reading files", len(documents)), list[list[int]]()
    # The Rust tokenizer below does not warn that a file is longer than the context.
    inner = tokenizer.backend_tokenizer
    for start in range(0, len(documents), _READ_TOGETHER):
        texts = [document.text for document in documents[start : start + _READ_TOGETHER]]
        ids += [encoding.ids for encoding in inner.encode_batch(texts, add_special_tokens=False)]
        phase.add(len(texts))
    return ids


class EncodedDocuments(Sequence[list[int]]):
    """The same, where each document is encoded when it is read."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> None:
        self._inner, self._documents = tokenizer.backend_tokenizer, documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        return self._inner.encode(self._documents[index].text, add_special_tokens=False).ids
