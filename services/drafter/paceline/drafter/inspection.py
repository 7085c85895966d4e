"""Tells what a drafter's folder is, for which target, and whether it fits one; reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.convert import open_model
from paceline.convert.drafters import read_described
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods import method_class, method_names
from paceline.drafter.methods.base import SECTION, Drafter, LoadError
from paceline.drafter.methods.checkpoint import TargetRef, check_target, read_fit

Json = Mapping[str, Any]

_OF_FILES = "lm"  # the method of models that are no drafter's folder


@dataclass(frozen=True)
class Inspection:
    """Facts about a folder, by name, and what prevents its use; none: it can be loaded."""

    facts: dict[str, str]
    problems: list[str]


def inspect_drafter(folder: Path, target: Path | None = None) -> Inspection:
    """Inspect a drafter's folder, or the GGUF file of a small model; None fits any ``target``.
    Raises ``OSError`` if there is no config.json, or no target, and ``ValueError`` if config.json
    is not JSON, or a file or the target is not supported."""
    described = {} if folder.is_file() else read_described(folder)
    source = open_model(target) if target is not None else None
    facts = {"method": "", "layout": ""}
    problems: list[str] = []
    try:
        if folder.is_file():
            method, facts["layout"] = method_class(_OF_FILES), "GGUF file"
        else:
            method, facts["layout"] = _method_of(described)
        if facts["layout"] in ("GGUF file", "transformers"):
            facts["use"] = f"a model for {method.method}: {method.method}:{folder}"
        facts |= {"method": method.method, "name": method.label or method.method}
        if made_for := _made_for(described):
            facts["made for"] = made_for
        facts |= method.inspect(folder, source)
        fit = read_fit(folder)
        if source is not None:
            check_target(folder, TargetRef.of(source), fit)
            facts["fits"] = str(target)
            if not fit.target_fingerprint and fit.tokenizer_digest:
                facts["fits"] += ", the tokenizers agree"
    except (UnsupportedModelError, LoadError) as error:
        problems.append(str(error))
    return Inspection(facts, problems)


def method_of_folder(folder: Path) -> type[Drafter]:
    """Return the method of a drafter's folder. Raises ``OSError`` if there is no config.json,
    ``ValueError`` if it is not JSON, ``UnsupportedModelError`` if no installed method has such
    folders, and ``LoadError`` if its method cannot be imported."""
    return _method_of(read_described(folder))[0]


def _method_of(described: Json) -> tuple[type[Drafter], str]:
    """Return the method of a folder, and its layout. Raises ``UnsupportedModelError`` if no
    installed method has such folders, and ``LoadError`` if its method cannot be imported."""
    for name in method_names():
        with suppress(LoadError):  # of a method that cannot be imported
            method = method_class(name)
            if (layout := method.layout(described)) is not None:
                return method, layout
    if method := described.get(SECTION, {}).get("method"):
        method_class(str(method))  # says why it cannot be imported
    kind, names = described.get("speculators_model_type"), described.get("architectures")
    raise UnsupportedModelError(
        f"no installed method has folders like this one; its config.json has the method {method!r},"
        f" the speculators_model_type {kind!r} and the architectures {names!r}"
    )


def _made_for(described: Json) -> str:
    section = described.get(SECTION) or {}
    fingerprint = section.get("target_fingerprint", "")
    verifier = (described.get("speculators_config") or {}).get("verifier") or {}
    named = str(section.get("target") or verifier.get("name_or_path") or "")
    return f"{named} ({fingerprint[:12]})" if fingerprint else named
