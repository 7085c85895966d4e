"""Drafters for a target where none is named: those that ship, or a smaller model beside it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from paceline.convert import ModelSource
    from paceline.drafter import Drafter

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("paceline.cli")

_MIN_TARGET = 500_000_000  # bytes; a target of fewer has no smaller model that is worth a step
_LARGE = 1 << 26  # weights from which on a step of a CPU takes as long as reading them, in bytes

# The default drafter of a large target on a CPU, by its format: the fastest in docs/evidence.md.
_FIRST = {
    "float32": "selfspec",
    "bfloat16": "selfspec",
    "int8": "dspark",
    "int4": "ngram",
    "gguf": "ngram",  # a file in blocks of 8 bits or fewer
    "mxfp4": "ngram",  # a folder with such experts, which is not measured
}


def _on_a_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Run each call on a thread that ends with it, and so do its OpenMP workers: a fork of this
    process has none of them, and would wait for them in its first parallel operation."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return called


@_on_a_thread
def drafters_for(
    target: Path, device: str = "cpu", weights: str = "auto", lora: Path | None = None
) -> list[str]:
    """Return drafters for a target: those trained for it, its own heads (`mtp`), and `ngram`.

    A CPU runs trained drafters in 8 or 4 bits. Without any, the :func:`smaller_model` as `lm` if
    there is one, and `ngram`. Without both, `ngram`, and on a CPU `selfspec` in 4 bits: on a GPU
    that is a second copy of the target. The default of a large target on a CPU is by its format.

    Args:
        target: Hugging Face folder or GGUF file.
        device: torch name of the drafters' device.
        weights: Format in which the verifier has the target, as of `paceline verifier --weights`.
        lora: Adapter that the verifier merges into the target.

    Returns:
        Drafters in the form of `paceline drafter --load`, the default one first.

    Raises:
        OSError: There is no such model.
        LoadError: A folder in `models` or beside the target is damaged.
    """
    import torch

    from paceline.convert import open_model, prepare
    from paceline.convert.fastest import BLOCKS
    from paceline.drafter.methods import method_class
    from paceline.service.phases import packing

    model, adapter = open_model(target, lora), f",lora={lora}" if lora else ""
    on_cpu = device == "cpu"

    def described(method: type[Drafter], folder: Path | None) -> str:
        tree = method.cpu_tree if on_cpu else method.gpu_tree
        options = [f"{name}={value}" for name, value in tree.items()]
        if on_cpu and method.cpu_weights:
            options.append(f"weights={method.cpu_weights}")
        if "target" in method.path_options:
            options.append(f"target={target}{adapter}")
        where = f":{folder}" if folder is not None else ""
        return ",".join([f"{method.method}={method.method}{where}", *options])

    fitting = sorted(_fitting(target, model), key=lambda pair: -_accepted_length(pair[1]))
    trained = [described(method, folder) for method, folder in fitting]
    if _has_heads(model):
        trained.append(described(method_class("mtp"), None))
    if smaller := smaller_model(target, lora):
        return [described(method_class("lm"), smaller), "ngram=ngram"]
    selfspec = f"selfspec=selfspec:{target},weights=int4{adapter}"
    load = [*trained, "ngram=ngram"]
    recurrent = bool(model.config(weights).delta_layers)  # selfspec refuses such a target
    if not trained and on_cpu and not recurrent:
        load.append(selfspec)
    if recurrent:
        return load
    if on_cpu and model.weight_bytes >= _LARGE and not torch.cuda.is_available():
        stored = model.config(weights).weights
        if trained and weights == "auto" and stored == BLOCKS:  # or 8 bits, where these are faster
            stored = prepare(target, weights, lora, progress=packing).description.config.weights
        if (first := _FIRST[stored]) == "selfspec":
            return [selfspec, *trained, "ngram=ngram"]
        load.sort(key=lambda spec: not spec.startswith(f"{first}="))
    return load


@_on_a_thread
def only_looks_up(
    target: Path, *, on_gpu: bool, weights: str = "auto", lora: Path | None = None
) -> bool:
    """Return whether the best of :func:`drafters_for` is look-up, none was trained for the target,
    and it has no heads of its own and no smaller model: then a verifier with local sources needs no
    drafter service.

    Arguments are as there; ``on_gpu``: the machine has a GPU.
    """
    from paceline.convert import open_model

    model = open_model(target, lora)
    if _has_trained(target, model) or smaller_model(target, lora) is not None:
        return False
    if model.config(weights).delta_layers:  # selfspec refuses it
        return True
    large = model.weight_bytes >= _LARGE and not on_gpu
    return not large or _FIRST[model.config(weights).weights] != "selfspec"


@_on_a_thread
def smaller_model(target: Path, lora: Path | None = None) -> Path | None:
    """Return the model to load as `lm`: the largest one beside the target with the same tokenizer
    and at most half its size; None if there is none, or a drafter was trained for the target.

    A target below `_MIN_TARGET` has none. Another format of the target is none either. What does
    not fit is logged at debug level.
    """
    from paceline.convert import open_model
    from paceline.decoder import UnsupportedModelError
    from paceline.drafter.methods.base import LoadError

    model = open_model(target, lora)
    if model.weight_bytes < _MIN_TARGET or _has_trained(target, model):
        return None
    candidates: list[tuple[int, Path]] = []
    for path in sorted(target.parent.iterdir()):
        if path.is_dir() or path.suffix == ".gguf":
            try:
                candidates.append((_smaller_bytes(path, model), path))
            except (LoadError, UnsupportedModelError, OSError, ValueError) as error:
                logger.debug("%s is no drafter for %s: %s", path, target, error)
    return max(candidates)[1] if candidates else None


def _smaller_bytes(path: Path, target: ModelSource) -> int:
    """Return the size of a model's weights, in bytes. Raises ValueError if it does not draft for a
    target, and what reading it raises."""
    from paceline.convert import open_model
    from paceline.convert.folder_files import part_paths
    from paceline.convert.model_source import code_digest, file_facts
    from paceline.decoder import UnsupportedModelError
    from paceline.decoder.remembered import remembered
    from paceline.drafter.methods.base import SECTION
    from paceline.drafter.methods.checkpoint import refuse_recurrent

    if path.is_dir() and SECTION in json.loads((path / "config.json").read_text()):
        raise ValueError("it was trained for one target")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else part_paths(path)
    size = sum(file.stat().st_size for file in files)
    if not 0 < 2 * size <= target.weight_bytes:
        raise ValueError(f"it has {size} bytes of weights; at most half the target's are expected")

    def describe() -> list[Any]:
        try:
            model = open_model(path)
            config = model.config()
        except UnsupportedModelError as error:
            return [str(error)]  # remembered until this code changes
        refuse_recurrent("lm", config)
        return [model.tokenizer_digest, config.layers, config.hidden]

    files += sorted(path.glob("*.json"))
    digest, *shape = remembered(("smaller", code_digest(), *map(file_facts, files)), describe)
    if not shape:
        raise ValueError(digest)
    if not digest or digest != target.tokenizer_digest:
        raise ValueError(f"its tokenizer is {digest or 'missing'}, not {target.tokenizer_digest}")
    config = target.config()
    if shape == [config.layers, config.hidden]:
        raise ValueError("it is the same model in another format")
    return size


def models_folder() -> Path | None:
    """Return `models` below the working folder or of the checkout with this file, if any."""
    roots = (Path.cwd(), *Path(__file__).resolve().parents)
    folders = (root / "models" for root in roots if (root / "models" / "demo" / "target").is_dir())
    return next(folders, None)


def _accepted_length(folder: Path) -> float:
    """Return the accepted length of a drafter on held-out texts; 0 if training did not note it."""
    described = json.loads((folder / "config.json").read_text())
    training = described.get("paceline", {}).get("training", {})
    return float(training.get("accepted_length", 0.0))


def _has_trained(target: Path, model: ModelSource) -> bool:
    return next(_fitting(target, model), None) is not None or _has_heads(model)


def _has_heads(model: ModelSource) -> bool:
    """Return whether a target's own files have readable heads for multi-token prediction."""
    from paceline.convert.mtp import read_heads
    from paceline.decoder import UnsupportedModelError

    try:
        read_heads(model)
    except UnsupportedModelError:
        return False
    return True


def _fitting(target: Path, model: ModelSource) -> Iterator[tuple[type[Drafter], Path]]:
    """Yield methods and folders of drafters that fit the target, in `models` and beside it.

    A folder has the name of its method; variants with other names are loaded explicitly. The format
    of the target does not matter. What takes time, digests of weights and tokenizer, is read only
    if the vocabularies are equal.
    """
    from paceline.drafter.methods import method_class, method_names
    from paceline.drafter.methods.base import LoadError
    from paceline.drafter.methods.checkpoint import TargetRef, check_target, read_fit

    models = models_folder()
    groups = {group.resolve() for group in (target.parent, *(models.iterdir() if models else ()))}
    vocab_size = model.config().vocab_size
    for name in method_names():
        for folder in sorted(group / name for group in groups):
            if not (folder / "config.json").is_file():
                continue
            fit = read_fit(folder)
            if fit.vocab_size != vocab_size:
                continue
            try:
                check_target(folder, TargetRef.of(model), fit)
                method = method_class(name)
            except LoadError:  # made for another target, or a method that cannot be imported
                continue
            yield method, folder
