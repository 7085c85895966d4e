"""Packed models in the user's cache folder, made once, in a process with bounds.

An entry is a folder as :mod:`paceline.decoder.packed_model` reads it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import BinaryIO

import torch

from paceline.convert.fastest import faster_weights
from paceline.convert.fim import fim_tokens
from paceline.convert.folder_files import part_paths
from paceline.convert.model_source import ModelSource, code_digest, file_facts
from paceline.convert.pack import Packer
from paceline.convert.sandbox import Progress, run_in_child
from paceline.convert.sources import Origin, open_model
from paceline.decoder.config import DecoderConfig, about
from paceline.decoder.model import Decoder, config_for
from paceline.decoder.packed import LAYOUT, PackedWriter, new_memory
from paceline.decoder.packed_model import (
    MODEL,
    TOKENIZER,
    WEIGHTS,
    Description,
    PackedModel,
    describe,
    digest_of,
    read_entry,
)
from paceline.decoder.remembered import cache_folder
from paceline.device import CPU, device_of

_log = logging.getLogger(__name__)
_PARTIAL, _LOCK = ".partial", "lock"
_SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt", ".tiktoken")
_SECONDS, _BYTES_PER_SECOND = 300.0, 5e6  # a conversion's time, besides its share of the size
_UNUSED_SECONDS = 86400.0  # after which an entry of another version is removed
_MEMORY, _COPIES = 6 << 30, 8  # a conversion's memory, and besides so many times the file


def load_decoder(
    source: str | Path | ModelSource,
    weights: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    kv_cache_dtype: str = "auto",
    max_context: int | None = None,
    numerics: str = "portable",
) -> Decoder:
    """Pack a Hugging Face folder with safetensors weights, or a GGUF file, in memory.

    ``weights`` is float32, bfloat16, int8, int4, or "auto" for the stored format (bfloat16 for
    float16). int8 quantises with one scale an output over rotated inputs
    (:mod:`paceline.kernels.rotated`), int4 in blocks of 32. For the rest and errors see
    :func:`config_for`, :func:`numerics_for` and :func:`open_model`.
    """
    model = open_model(source)
    with about(model.path), torch.inference_mode():
        config = config_for(model.config(weights), device, kv_cache_dtype, max_context)
        return Decoder(config, _packer(model, config, device), device, numerics)


def prepare(
    path: str | Path,
    weights: str = "auto",
    lora: str | Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = lambda count, total: None,
) -> PackedModel:
    """Return a model, as of :func:`load_decoder`, ready to be run: read from the cache folder, or
    packed into it first.

    A GPU's weights are packed on the GPU, and not kept. Where the folder cannot be written, the
    model is packed in memory. ``progress`` is called with the number of layers that are packed, and
    of all. Raises ``UnsupportedModelError`` if it is damaged, of a kind that is not supported, or
    takes too much memory or time, and ``FileNotFoundError`` as :func:`open_model`.
    """
    path, lora = Path(path), str(Path(lora).resolve()) if lora else ""
    if not device_of(device).packs:
        source = open_model(path, lora)
        description = _described(source, lora, weights)
        return PackedModel(description, source.tokenizer, None, lambda *at: _packer(source, *at))
    if not path.exists():
        open_model(path)  # raises
    entry = _entry(path, weights, lora, code_digest())
    with suppress(OSError, ValueError):
        return read_entry(entry)
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


def _packer(source: ModelSource, config: DecoderConfig, device: torch.device | str) -> Packer:
    return Packer(config, source.weights(config, device), device)


def _described(source: ModelSource, lora: str, requested: str) -> Description:
    """Read a model's files, but not its weights."""
    return Description(
        source.name, str(source.path.resolve()), lora, requested, source.config(requested),
        source.architectures, source.fingerprint(), asdict(Origin.of(source)),
        source.tokenizer_digest,
        {**fim_tokens(source.tokenizer), **source.special_tokens}, dict(source.chat_templates),
        source.weight_bytes, code_digest(),
    )  # fmt: skip


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
    """Return the packed models in the cache folder, those used last first."""
    entries = []
    for folder in _entries():
        with suppress(OSError, ValueError):  # a damaged one is made again, or swept
            used = (folder / MODEL).stat().st_mtime
            entries.append(Entry(folder, describe(folder), _size(folder), used))
    return sorted(entries, key=lambda entry: -entry.used)


def _make(entry: Path, path: Path, weights: str, lora: str, progress: Progress) -> PackedModel:
    """Make an entry, unless another process does. Raises ``OSError`` if it cannot be written."""
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = entry.with_name(entry.name + _PARTIAL)
    with _locked(partial):
        try:
            with suppress(OSError, ValueError):
                return read_entry(entry)  # another process has made it
            shutil.rmtree(entry, ignore_errors=True)
            _sweep()
            _write(partial, path, weights, lora, progress)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    model = read_entry(entry)
    faster = weights == "auto" and model.description.config.weights == "int8"
    _log.info(
        "%s is packed in %s%s: %.2f GB in %s, which `paceline models` lists",
        path,
        model.description.config.weights,
        ", faster here than as stored" if faster else "",
        _size(entry) / 1e9,
        entry,
    )
    return model


def _size(entry: Path) -> int:
    """Return the size of an entry on disk. Unit: bytes."""
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
    with (folder / WEIGHTS).open("wb") as file:
        description, tokenizer = _pack_in_child(path, weights, lora, file, progress)
    (folder / TOKENIZER).write_bytes(tokenizer)
    fields = json.loads(json.dumps(description.to_json()))
    stored = {"digest": digest_of(fields), "model": fields}
    (folder / MODEL).write_text(json.dumps(stored, indent=1), encoding="utf-8")


def _pack_in_child(
    path: Path, weights: str, lora: str, file: BinaryIO, progress: Progress
) -> tuple[Description, bytes]:
    files = _files(path) + (_files(Path(lora)) if lora else [])
    size = sum(file.stat().st_size for file in files)
    opened = f"/proc/{os.getpid()}/fd/{file.fileno()}"  # by the child, in memory or on disk
    return run_in_child(
        partial(_pack, path, weights, lora, opened, torch.get_num_threads()),
        f"{path}: to read and pack the model",
        seconds=_SECONDS + size / _BYTES_PER_SECOND,
        memory=_MEMORY + _COPIES * size,
        progress=progress,
    )


def _pack(
    path: Path, weights: str, lora: str, written: str, cores: int, progress: Progress
) -> tuple[Description, bytes]:
    """Write the packed weights of a model; returns all else."""
    source = open_model(path, lora)
    with about(source.path), torch.inference_mode(), open(written, "r+b", buffering=0) as file:
        described = _described(source, lora, weights)
        if weights == "auto":
            faster = faster_weights(source, described.config, cores)
            if faster != described.config.weights:
                described = replace(described, config=source.config(faster))
        config = described.config
        packer, writer = _packer(source, config, "cpu"), PackedWriter(file.fileno())
        writer.add_outer(packer.outer())
        done = iter(range(1, config.layers + 1))

        def pack_layer(index: int) -> None:
            writer.add_layer(index, packer.layer(index))
            progress(next(done), config.layers)

        CPU.map(pack_layer, range(config.layers), cores)
        writer.finish()
    return described, source.tokenizer


def _entry(path: Path, weights: str, lora: str, code: str) -> Path:
    """Return the folder of a model: its name has a digest of all that the content depends on."""
    files = [file_facts(file) for source in (path, lora) if source for file in _files(Path(source))]
    facts = (code, LAYOUT, version("transformers"), weights, str(path.resolve()), lora, files)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]", "_", path.resolve().stem)[:64]
    return cache_folder("packed") / f"{name}-{weights}-{key}"


def _files(path: Path) -> list[Path]:
    """Return the files of a model or an adapter."""
    if path.is_file():
        return [part for part in part_paths(path) if part.is_file()]
    folders = (path, path / "additional_chat_templates")
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return sorted(file for file in files if file.suffix in _SUFFIXES and file.is_file())


def _entries() -> list[Path]:
    folder = cache_folder("packed")
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


@cache
def _sweep() -> None:
    """Remove, once in a process, entries whose model has changed or is gone, entries of another
    version that nobody uses, and what a process left that was killed."""
    for entry in _entries():
        with ExitStack() as held:
            try:
                if entry.suffix == _PARTIAL:
                    lock = held.enter_context((entry / _LOCK).open("r+"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    stale = True
                else:
                    it = describe(entry)
                    stale = entry != _entry(Path(it.source), it.requested, it.lora, it.code)
                    unused = time() - (entry / MODEL).stat().st_mtime > _UNUSED_SECONDS
                    stale = stale or (it.code != code_digest() and unused)
            except BlockingIOError:  # a process is at it
                continue
            except (OSError, ValueError):
                stale = True
            if stale:
                shutil.rmtree(entry, ignore_errors=True)
