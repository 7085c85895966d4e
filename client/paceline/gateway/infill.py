"""Texts in the middle: `/infill` as of llama.cpp's server, and `suffix` of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from paceline.client import Model

from .bodies import Body
from .errors import bad_request
from .requests import GenerationRequest, Items

_NEEDED = ("fim_prefix_token", "fim_suffix_token", "fim_middle_token")
# What stands before another text where the model has no token for a file, as of llama.cpp.
_SNIPPET = "\n\n--- snippet ---\n\n"


class OtherText(Body):
    """A text to know beside the one that is completed."""

    text: str = ""
    filename: str = "tmp"


class InfillRequest(GenerationRequest):
    """`POST /infill`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Items[OtherText] = Field(default=[])
    prompt: str = ""  # what the prefix goes on with
    n_predict: int = Field(default=-1, ge=-1)
    """Maximum number of new tokens. -1: the text may fill the context. 0: only the prompt is
    read, so that the next request finds it."""
    temperature: float = Field(default=0.0, le=100)  # llama.cpp's sampler for it picks a likely one
    response_fields: Items[str] = Field(default=[])
    """Names of the fields of the answer, "a/b" for field b of a; empty: all."""

    n: int = Field(default=1, ge=1, le=1)
    receipt: bool = Field(default=False, le=False)

    # Accepted and unused: KV is kept where there is memory.
    cache_prompt: bool = True
    id_slot: int = -1


def fim_tokens(model: Model) -> dict[str, str]:
    """Return the texts of the model's tokens for texts in the middle, by name. Raises ApiError if
    one that is needed is missing."""
    tokens = {
        name: text
        for name, text in model.facts.special_tokens.items()
        if name.startswith("fim_") and model.codec and model.codec.added_id(text) is not None
    }
    if not tokens.keys() >= set(_NEEDED):
        raise bad_request(
            f"{model.facts.name} has no tokens for texts in the middle: send the text before it, "
            "as a prompt alone, or serve a model for code",
            "suffix",
            "no_fim_tokens",
        )
    return tokens


def prompt_in_middle(
    tokens: dict[str, str], prefix: str, suffix: str, others: Sequence[OtherText] = ()
) -> str:
    """Return the prompt for the text between prefix and suffix, behind other texts if any."""
    before, file = "", tokens.get("fim_file_token")
    for other in others:
        before += (f"{file}{other.filename}\n" if file else _SNIPPET) + other.text
    if others and "fim_repo_token" in tokens:
        before = f"{tokens['fim_repo_token']}project\n{before}"
    if others and file:
        before += f"{file}file\n"
    begin, end, middle = (tokens[name] for name in _NEEDED)
    return f"{before}{begin}{prefix}{end}{suffix}{middle}"


def selected(fields: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an answer at these paths, by path; all if there is none."""
    if not paths:
        return fields
    by_path = {}
    for path in paths:
        value: Any = fields
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            by_path[path] = value
    return by_path
