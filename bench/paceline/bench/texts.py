"""Long prompts from the demo target's own corpus: files it never saw, and files it knows."""

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.train.preset import PRESETS

CONTEXTS = (300, 1000, 2000, 3800)
"""Prompt lengths. Unit: tokens. The demo target's context is 4096."""

WRITTEN = 128
"""Tokens that the target writes after each."""

SETS = ("heldout", "trained")

_ENOUGH = 64  # times the length of all prompts: more text need not be read


@dataclass(frozen=True)
class Text:
    """A prompt: a piece of one file; `set` says whether the target was trained on the file."""

    set: str
    file: str
    tokens: list[int]


def load(
    models: Path, each: int, contexts: Sequence[int] = CONTEXTS, sets: Sequence[str] = SETS
) -> list[Text]:
    """`each` prompts of every set and context length, spread over files and over places in them.

    Files come from the standard library of this Python if they are those of the target's
    `corpus.json` by their digests, held-out ones else from the repository's copies; so with another
    Python there are fewer held-out files, and none of the trained set.
    """
    target = models / "target"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    corpus = json.loads((target / "corpus.json").read_text())
    known = corpus["train"][: PRESETS["cpu"].focus_files]  # trained on to the end
    found = []
    for name, entries in (("heldout", corpus["heldout"]), ("trained", known)):
        if name in sets:
            files = {
                entry["path"]: tokenizer.encode(text).ids
                for entry, text in _read(entries, models / "prompts" / name)
            }
            for length in contexts:
                found += [Text(name, file, ids) for file, ids in _pieces(files, length, each)]
    return found


def encoder(models: Path) -> Callable[[str], list[int]]:
    """Token ids of a text, by the demo target's tokenizer."""
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def joined(models: Path, length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens of the held-out files, put one after the other.

    Raises ValueError where all files together are too short.
    """
    entries = json.loads((models / "target" / "corpus.json").read_text())["heldout"]
    files = (text for _, text in _read(entries, models / "prompts" / "heldout"))
    return _spread(models, files, length, count, "the held-out files")


def packaged(models: Path, package: str, length: int, count: int) -> list[list[int]]:
    """The same of the source files of an installed package, in order of their names.

    Raises ValueError where there is no such package, or where it is too short.
    """
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        raise ValueError(f"{package} is no installed package: expected a name to import")
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    read = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return _spread(models, read, length, count, f"the files of {package}")


def _spread(
    models: Path, files: Iterable[str], length: int, count: int, what: str
) -> list[list[int]]:
    """Files are parted as in training, and pieces begin at places spread evenly."""
    encode = encoder(models)
    separator = json.loads((models / "target" / "config.json").read_text())["eos_token_id"]
    stream: list[int] = []
    for text in files:
        stream += (separator, *encode(text))
        if len(stream) > _ENOUGH * length * count:
            break
    if len(stream) < length:
        raise ValueError(f"{what} have {len(stream)} tokens, expected at least {length}")
    step = (len(stream) - length) // max(1, count - 1)
    return [stream[start : start + length] for start in range(0, step * count, step or 1)][:count]


def _read(entries: list[dict[str, str]], copies: Path) -> Iterator[tuple[dict[str, str], str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for entry in entries:
        name = entry["path"].removesuffix(".py").replace("/", ".")
        original, copy = library / entry["path"], copies / f"{name}.txt"
        data = original.read_bytes() if original.is_file() else b""
        if hashlib.sha256(data).hexdigest() == entry["sha256"]:
            yield entry, data.decode()
        elif copy.is_file():
            yield entry, copy.read_text()


def _pieces(
    files: dict[str, list[int]], length: int, count: int
) -> Iterator[tuple[str, list[int]]]:
    """In turns from every file that is long enough, the first from its start, the last its end."""
    fitting = [(file, ids) for file, ids in files.items() if len(ids) >= length]
    for index in range(count if fitting else 0):
        file, ids = fitting[index % len(fitting)]
        start = (len(ids) - length) * index // max(1, count - 1)
        yield file, ids[start : start + length]
