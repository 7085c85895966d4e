"""Packed models in the user's cache folder: made once, in a process with bounds, and then read.

An entry is a folder: ``weights.bin`` (:mod:`paceline.decoder.packed`), ``tokenizer.json``, and
``model.json`` with all else that a service asks of a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any, BinaryIO, Self

import torch

import paceline.kernels
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.device import map_on_cores
from paceline.decoder.folder_files import part_paths
from paceline.decoder.model import Decoder, config_for
from paceline.decoder.model_source import ModelSource, about, cache_folder, file_facts
from paceline.decoder.pack import Packer
from paceline.decoder.packed import (
    LAYOUT,
    PackedWeights,
    PackedWriter,
    new_memory,
    read_header,
)
from paceline.decoder.products import digest_of_sources
from paceline.decoder.sandbox import run_in_child
from paceline.decoder.sources import open_model

_log = logging.getLogger(__name__)

_MODEL, _WEIGHTS, _TOKENIZER, _LOCK = "model.json", "weights.bin", "tokenizer.json", "lock"
_PARTIAL = ".partial"
_SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt", ".tiktoken")
_SECONDS, _BYTES_PER_SECOND = 300.0, 5e6  # a conversion's time, besides its share of the size
_UNUSED_SECONDS = 86400.0  # after which an entry of another version is removed
_MEMORY, _COPIES = 6 << 30, 8  # a conversion's memory, and besides so many times the file

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Description:
    """What a packed model says of itself."""

    name: str  # for display
    source: str  # folder or file that it was made of
    lora: str  # adapter that is merged into it; empty: none
    requested: str  # format of weights that was asked for
    config: DecoderConfig
    architectures: tuple[str, ...]  # names of the model's classes in transformers
    fingerprint: str  # SHA-256 of the model, see `weights_fingerprint`
    tokenizer_digest: str  # SHA-256; empty: it has no tokenizer
    special_tokens: Mapping[str, str]  # texts by name
    chat_templates: Mapping[str, str]  # Jinja, by name; the usual one is "default"
    weights_kept: str  # in words, what is not in the format that was asked for
    source_bytes: int  # size of the files with the weights
    code: str  # digest of the code that has packed it

    @classmethod
    def of(cls, source: ModelSource, lora: str, requested: str) -> Self:
        """Read a model's files, but not its weights."""
        return cls(
            source.name, str(source.path.resolve()), lora, requested, source.config(requested),
            source.architectures, source.fingerprint(), source.tokenizer_digest,
            dict(source.special_tokens), dict(source.chat_templates), "", source.weight_bytes,
            _code(),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        config = DecoderConfig.from_json(fields["config"])
        return cls(**{**fields, "config": config, "architectures": tuple(fields["architectures"])})


@dataclass(frozen=True)
class PackedModel:
    """A model that a service runs."""

    description: Description
    tokenizer: bytes  # the content of a tokenizer.json; empty: it has none
    file: BinaryIO | None  # its packed weights; None: those of `source` are packed on their device
    source: ModelSource | None = None

    @property
    def path(self) -> Path:
        """The folder or file that it was made of."""
        return Path(self.description.source)

    def decoder(
        self,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
        max_context: int | None = None,
        numerics: str = "portable",
        *,
        share: bool = False,
    ) -> Decoder:
        """Build the decoder, see :meth:`Decoder.load`; ``share``: see :class:`PackedWeights`.
        Raises ``UnsupportedModelError`` if it cannot run on the device."""
        with about(self.path), torch.inference_mode():
            config = config_for(self.description.config, device, kv_cache_dtype, max_context)
            if self.file is None:
                assert self.source is not None
                packer = Packer(config, self.source.weights(config, device), device)
                return Decoder(config, packer, device, numerics)
            parts = PackedWeights(self.file.fileno(), share=share)
            decoder = Decoder(config, parts, device, numerics)
            decoder.mapped_bytes = parts.mapped_bytes
            return decoder


def prepare(
    path: str | Path,
    weights: str = "auto",
    lora: str | Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = lambda count, total: None,
) -> PackedModel:
    """A model ready to be run: read from the cache folder, or packed into it first.

    A GPU's weights are packed on the GPU, and not kept. Where the folder cannot be written, the
    model is packed in memory.

    Args:
        path: A Hugging Face folder with safetensors weights, or a GGUF file.
        weights: float32, bfloat16, int8, int4 or auto; see :meth:`Decoder.load`.
        lora: Folder of an adapter that is merged into it.
        device: Where it will run.
        progress: Called with the number of layers that are packed, and of all.

    Raises:
        UnsupportedModelError: It is damaged, of a kind that is not supported, or takes too much
            memory or time.
        FileNotFoundError: There is no such file, or the folder has no config.json.
    """
    path, lora = Path(path), str(Path(lora).resolve()) if lora else ""
    if torch.device(device).type != "cpu":
        source = open_model(path, lora)
        return PackedModel(Description.of(source, lora, weights), source.tokenizer, None, source)
    if not path.exists():
        open_model(path)  # raises
    entry = _entry(path, weights, lora, _code())
    with suppress(OSError, ValueError):
        return _read(entry)
    try:
        return _make(entry, path, weights, lora, progress)
    except OSError as error:
        _log.warning(
            "%s is packed in memory at each start, since %s cannot be written: %s; make room "
            "there, or set XDG_CACHE_HOME to another folder",
            path, entry.parent, error,
        )  # fmt: skip
    file = os.fdopen(new_memory(), "r+b")
    return PackedModel(*_pack_in_child(path, weights, lora, file, progress), file)


def convert(
    path: str | Path,
    folder: Path,
    weights: str = "auto",
    lora: str | Path | None = None,
    progress: Progress = lambda count, total: None,
) -> None:
    """Pack a model into a folder, which :func:`read_converted` reads. Raises ``OSError`` if it
    cannot be written or is there already, and as :func:`prepare`."""
    folder.mkdir(parents=True)
    try:
        _write(folder, Path(path), weights, str(Path(lora).resolve()) if lora else "", progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Entry:
    """A packed model in the cache folder."""

    folder: Path
    description: Description
    size: int  # in bytes
    used: float  # time of its last use, in seconds since 1970


def packed_models() -> list[Entry]:
    """The packed models in the cache folder, those used last first."""
    entries = []
    for folder in _entries():
        with suppress(OSError, ValueError):  # a damaged one is made again, or swept
            used = (folder / _MODEL).stat().st_mtime
            entries.append(Entry(folder, _describe(folder), _size(folder), used))
    return sorted(entries, key=lambda entry: -entry.used)


def remove_packed(folder: Path) -> None:
    """Remove an entry; services that run keep its file open. Raises ``OSError``."""
    shutil.rmtree(folder)


def is_converted(path: Path) -> bool:
    """Whether a folder looks like one that :func:`convert` has written."""
    return (path / _MODEL).is_file()


def read_converted(
    path: Path, weights: str = "auto", lora: str | Path | None = None
) -> PackedModel:
    """Read a folder that :func:`convert` has written.

    Its content is trusted, so it must not be named by callers of a service. Raises
    ``UnsupportedModelError`` if it is damaged, older than this version, or of other ``weights`` or
    another adapter.
    """
    try:
        model = _read(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} cannot be used: {error}; make it again with `paceline convert`"
        ) from error
    has = model.description.config.weights
    if lora or weights not in ("auto", has):
        asked = f"with the adapter {lora}" if lora else f"as {weights!r}"
        raise UnsupportedModelError(
            f"{path} was packed as {has!r}, and is asked for {asked}: give what it was made of, "
            f"{model.description.source}"
        )
    return model


def _read(entry: Path) -> PackedModel:
    """Read an entry. Raises ``OSError`` if there is none, ``ValueError`` if it is damaged or older
    than this version."""
    description = _describe(entry)
    tokenizer = (entry / _TOKENIZER).read_bytes()
    if description.tokenizer_digest != (hashlib.sha256(tokenizer).hexdigest() if tokenizer else ""):
        raise ValueError("its tokenizer.json is damaged")
    file = (entry / _WEIGHTS).open("rb")
    try:
        read_header(file.fileno())
    except BaseException:
        file.close()
        raise
    with suppress(OSError):  # of a folder that is only read
        os.utime(entry / _MODEL)
    return PackedModel(description, tokenizer, file)


def _describe(entry: Path) -> Description:
    """Read the description of an entry. Raises ``ValueError`` if it is damaged."""
    try:
        stored = json.loads((entry / _MODEL).read_text(encoding="utf-8"))
        if stored["digest"] != _digest(stored["model"]):
            raise ValueError("model.json is damaged")
        return Description.from_json(stored["model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"model.json is damaged, or of another version: {error}") from error


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _make(entry: Path, path: Path, weights: str, lora: str, progress: Progress) -> PackedModel:
    """Make an entry, unless another process does. Raises ``OSError`` if it cannot be written."""
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = entry.with_name(entry.name + _PARTIAL)
    with _locked(partial):
        try:
            with suppress(OSError, ValueError):
                return _read(entry)  # another process has made it
            shutil.rmtree(entry, ignore_errors=True)
            _sweep()
            _write(partial, path, weights, lora, progress)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    model = _read(entry)
    size = _size(entry) / 1e9
    _log.info("%s is packed: %.2f GB in %s, which `paceline models` lists", path, size, entry)
    return model


def _size(entry: Path) -> int:
    """Size of an entry on disk. Unit: bytes."""
    return sum(file.stat().st_size for file in entry.iterdir())


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the folder of an entry that is being made."""
    while True:
        partial.mkdir(exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError), (partial / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # it was renamed or removed meanwhile
                if os.path.samestat(os.fstat(lock.fileno()), (partial / _LOCK).stat()):
                    yield
                    return


def _write(folder: Path, path: Path, weights: str, lora: str, progress: Progress) -> None:
    """Pack a model into a folder. Raises ``OSError`` if it cannot be written."""
    with (folder / _WEIGHTS).open("wb") as file:
        description, tokenizer = _pack_in_child(path, weights, lora, file, progress)
    (folder / _TOKENIZER).write_bytes(tokenizer)
    fields = json.loads(json.dumps(description.to_json()))
    stored = {"digest": _digest(fields), "model": fields}
    (folder / _MODEL).write_text(json.dumps(stored, indent=1), encoding="utf-8")


def _pack_in_child(
    path: Path, weights: str, lora: str, file: BinaryIO, progress: Progress
) -> tuple[Description, bytes]:
    files = _files(path) + (_files(Path(lora)) if lora else [])
    size = sum(each.stat().st_size for each in files)
    cores = torch.get_num_threads()

    def pack(say: Progress) -> tuple[Description, bytes]:
        return _pack(path, weights, lora, file.fileno(), cores, say)

    return run_in_child(
        pack,
        f"{path}: to read and pack the model",
        seconds=_SECONDS + size / _BYTES_PER_SECOND,
        memory=_MEMORY + _COPIES * size,
        progress=progress,
    )


def _pack(
    path: Path, weights: str, lora: str, file: int, cores: int, progress: Progress
) -> tuple[Description, bytes]:
    """Write the packed weights of a model; returns all else."""
    source = open_model(path, lora)
    with about(source.path), torch.inference_mode():
        described = Description.of(source, lora, weights)
        config = described.config
        packer, writer = Packer(config, source.weights(config), "cpu"), PackedWriter(file)
        writer.add_outer(packer.outer())
        done = iter(range(1, config.layers + 1))

        def pack_layer(index: int) -> None:
            writer.add_layer(index, packer.layer(index))
            progress(next(done), config.layers)

        map_on_cores(pack_layer, range(config.layers), cores)
        writer.finish()
    return replace(described, weights_kept=packer.kept), source.tokenizer


def _entry(path: Path, weights: str, lora: str, code: str) -> Path:
    """The folder of a model: its name has a digest of all that the content depends on."""
    files = [file_facts(file) for each in (path, lora) if each for file in _files(Path(each))]
    facts = (code, LAYOUT, version("transformers"), weights, str(path.resolve()), lora, files)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]", "_", path.resolve().stem)[:64]
    return cache_folder("packed") / f"{name}-{weights}-{key}"


@cache
def _code() -> str:
    """A digest of the code that packs."""
    folders = (Path(__file__).parent, Path(paceline.kernels.__file__).parent)
    return " ".join(map(digest_of_sources, folders))


def _files(path: Path) -> list[Path]:
    """The files of a model or an adapter."""
    if path.is_file():
        return [each for each in part_paths(path) if each.is_file()]
    folders = (path, path / "additional_chat_templates")
    files = [each for folder in folders if folder.is_dir() for each in folder.iterdir()]
    return sorted(each for each in files if each.suffix in _SUFFIXES and each.is_file())


def _entries() -> list[Path]:
    folder = cache_folder("packed")
    return [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []


@cache
def _sweep() -> None:
    """Remove, once in a process, entries whose model has changed or is gone, those of another
    version that nobody uses, and what a process left that was killed."""
    for entry in _entries():
        with ExitStack() as held:
            try:
                if entry.suffix == _PARTIAL:
                    lock = held.enter_context((entry / _LOCK).open("r+"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    stale = True
                else:
                    it = _describe(entry)
                    stale = entry != _entry(Path(it.source), it.requested, it.lora, it.code)
                    unused = time() - (entry / _MODEL).stat().st_mtime > _UNUSED_SECONDS
                    stale = stale or (it.code != _code() and unused)
            except BlockingIOError:  # a process is at it
                continue
            except (OSError, ValueError):
                stale = True
            if stale:
                shutil.rmtree(entry, ignore_errors=True)
