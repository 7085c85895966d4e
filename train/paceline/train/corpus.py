"""The text a model is trained on: which files, in which order, and which are held out."""

import hashlib
import json
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
# Tests, tables and vendored copies teach little; `_sysconfigdata*` describes one machine.
_SKIPPED_FOLDERS = frozenset(
    "test tests idle_test idlelib lib2to3 site-packages encodings pydoc_data ensurepip "
    "turtledemo lib-dynload __pycache__".split()
)
_SMALLEST, _LARGEST = 4_000, 90_000  # bytes
_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".go", ".js", ".ts")


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

    def manifest(self) -> dict[str, object]:
        """What the corpus is made of, as JSON-ready data: file lists with SHA-256 digests."""

        def rows(documents: tuple[Document, ...]) -> list[dict[str, str]]:
            return [{"path": d.path, "sha256": d.sha256} for d in documents]

        return {
            "source": self.source,
            "train": rows(self.train),
            "heldout": rows(self.heldout),
        }

    def write_manifest(self, path: Path) -> None:
        """Write `manifest()` to `path` as JSON."""
        path.write_text(json.dumps(self.manifest(), indent=1) + "\n")


def load_corpus(data: str, files: int, heldout_files: int) -> Corpus:
    """Collect text files and split them by file.

    `data` is "stdlib" (the source of this Python's standard library) or a folder. Files are put in
    the order of the digest of their path, so the split depends on names alone: the first
    `heldout_files` are held out, the next `files` are trained on.

    Raises FileNotFoundError where the folder is missing or holds too few files.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if data == STDLIB else Path(data)
    if not root.is_dir():
        raise FileNotFoundError(
            f"corpus {data!r} is no folder: give 'stdlib' or a folder with text files"
        )
    found = sorted(_candidates(root), key=lambda p: _digest(p.relative_to(root).as_posix().encode()))
    if len(found) <= heldout_files:
        raise FileNotFoundError(
            f"corpus {data!r} holds {len(found)} usable files, more than {heldout_files} are "
            f"needed: text files of {_SMALLEST} to {_LARGEST} bytes, outside test folders"
        )
    documents = tuple(_read(path, root) for path in found[: heldout_files + files])
    version = ".".join(map(str, sys.version_info[:3]))
    source = f"Python {version} standard library" if data == STDLIB else root.name
    return Corpus(source, train=documents[heldout_files:], heldout=documents[:heldout_files])


def _candidates(root: Path) -> list[Path]:
    return [
        path
        for path in root.rglob("*")
        if path.suffix in _TEXT_SUFFIXES
        and not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")
        and path.is_file()
        and _SMALLEST <= path.stat().st_size <= _LARGEST
    ]


def _read(path: Path, root: Path) -> Document:
    data = path.read_bytes()
    text = data.decode("utf-8", errors="replace")
    return Document(path.relative_to(root).as_posix(), text, _digest(data))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
