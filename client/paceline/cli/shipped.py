"""Drafters that ship with the project for a target."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from paceline.convert import ModelSource
    from paceline.drafter import Drafter

P = ParamSpec("P")
R = TypeVar("R")

_LARGE = 1 << 26  # weights from which on a step of a CPU takes as long as reading them, in bytes

_FIRST = {
    "float32": "selfspec",
    "bfloat16": "selfspec",
    "int8": "dspark",
    "int4": "ngram",
    "gguf": "ngram",
    "mxfp4": "ngram",
}
"""The default drafter of a large target on a CPU, by its format: the fastest in
docs/evidence.md. "gguf" is a GGUF file in blocks of 8 bits or fewer,
"mxfp4" a folder with such experts, which is not measured."""


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
    """What to load for a target: the drafters trained for it, its own heads (`mtp`), and `ngram`.

    A CPU runs trained drafters in 8 or 4 bits. Without any, `ngram`, and on a CPU
    `selfspec` with the target's own weights in 4 bits: on a GPU that is a second copy in the
    verifier's format. The default of a large target on a CPU is by its format. Imports torch.

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

    from paceline.convert import open_model
    from paceline.drafter.methods import method_class

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

    found = sorted(_fitting(target, model), key=lambda each: -_accepted_length(each[1]))
    trained = [described(method, folder) for method, folder in found]
    if _has_heads(model):
        trained.append(described(method_class("mtp"), None))
    own = f"selfspec=selfspec:{target},weights=int4{adapter}"
    load = [*trained, "ngram=ngram"]
    recurrent = bool(model.config(weights).delta_layers)  # selfspec refuses such a target
    if not trained and on_cpu and not recurrent:
        load.append(own)
    if recurrent:
        return load
    if on_cpu and model.weight_bytes >= _LARGE and not torch.cuda.is_available():
        if (first := _FIRST[model.config(weights).weights]) == "selfspec":
            return [own, *trained, "ngram=ngram"]
        load.sort(key=lambda spec: not spec.startswith(f"{first}="))
    return load


@_on_a_thread
def only_looks_up(
    target: Path, *, on_gpu: bool, weights: str = "auto", lora: Path | None = None
) -> bool:
    """Whether the best of :func:`drafters_for` is look-up, none was trained for the target, and it
    has no heads of its own: then a verifier with local sources needs no drafter service.

    Arguments and errors are as there; ``on_gpu``: the machine has a GPU.
    """
    from paceline.convert import open_model

    model = open_model(target, lora)
    if next(_fitting(target, model), None) is not None or _has_heads(model):
        return False
    if model.config(weights).delta_layers:  # selfspec refuses it
        return True
    large = model.weight_bytes >= _LARGE and not on_gpu
    return not large or _FIRST[model.config(weights).weights] != "selfspec"


def models_folder() -> Path | None:
    """`models` below the working folder or of the checkout that contains this file, if any."""
    roots = (Path.cwd(), *Path(__file__).resolve().parents)
    found = (root / "models" for root in roots if (root / "models" / "demo" / "target").is_dir())
    return next(found, None)


def _accepted_length(folder: Path) -> float:
    """The accepted length of a drafter on held-out texts, as training noted it; 0: it did not."""
    described = json.loads((folder / "config.json").read_text())
    training = described.get("paceline", {}).get("training", {})
    return float(training.get("accepted_length", 0.0))


def _has_heads(model: ModelSource) -> bool:
    """Whether a target's own files have heads for multi-token prediction that can be read."""
    from paceline.decoder import UnsupportedModelError
    from paceline.drafter.methods.mtp import read_mtp

    try:
        read_mtp(model)
    except UnsupportedModelError:
        return False
    return True


def _fitting(target: Path, model: ModelSource) -> Iterator[tuple[type[Drafter], Path]]:
    """Methods and folders of drafters that fit the target, in `models` and beside it.

    A folder has the name of its method; variants with other names are loaded explicitly. The format
    of the target does not matter. What takes time, digests of weights and tokenizer, is read only
    if the vocabularies are equal.
    """
    from paceline.drafter.methods import method_class, method_names
    from paceline.drafter.methods.base import LoadError
    from paceline.drafter.methods.checkpoint import check_target, read_fit

    models = models_folder()
    groups = {
        each.resolve(): each for each in (target.parent, *(models.iterdir() if models else ()))
    }
    vocab_size = model.config().vocab_size
    for name in method_names():
        for folder in sorted(group / name for group in groups):
            if not (folder / "config.json").is_file():
                continue
            fit = read_fit(folder)
            if fit.vocab_size != vocab_size:
                continue
            try:
                check_target(folder, model, fit)
                method = method_class(name)
            except LoadError:  # made for another target, or a method that cannot be imported
                continue
            yield method, folder
