"""Files of model folders, whose content other people wrote: sizes, types and ranges are checked
before anything is made of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.decoder.config import UnsupportedModelError

_MAX_PARTS = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_MAX_BYTES = 256 << 20
_MAX_CONFIG = 16 << 20
# Fields that are counts, from 1, and the largest number of each.
_COUNTS = {
    "num_hidden_layers": 1 << 12,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 1 << 8,
    "conv_L_cache": 1 << 8,
    "block_multiple_of": 1 << 24,
    "block_ff_dim": 1 << 24,
    "global_head_dim": 1 << 16,
    "num_global_key_value_heads": 1 << 16,
}
# Counts that may be 0.
_FROM_NONE = {
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "sliding_window": 1 << 31,
}
# Fields that are numbers above 0, and the largest of each.
_REALS = {
    "rms_norm_eps": 1.0,
    "norm_eps": 1.0,
    "block_ffn_dim_multiplier": 1e6,
    "rope_theta": 1e15,
    "rope_local_base_freq": 1e15,
    "partial_rotary_factor": 1.0,
    "factor": 1e6,
    "attention_factor": 1e6,
    "low_freq_factor": 1e6,
    "high_freq_factor": 1e6,
    "beta_fast": 1e6,
    "beta_slow": 1e6,
}

_TYPES = ("float32", "float16", "bfloat16", "auto")  # types of a model, by their names in torch


def part_paths(path: Path) -> list[Path]:
    """Return a model's files by the first: itself, or all parts ``NAME-00001-of-0000N.gguf``."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, total = match.groups()
    count = min(int(total), _MAX_PARTS)
    return [path.with_name(f"{name}-{part:05}-of-{total}.gguf") for part in range(1, count + 1)]


def read_file(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """Return the content of a file; empty if there is none.

    Raises ``UnsupportedModelError`` if it is no file, cannot be read, or is larger than
    ``limit`` bytes.
    """
    try:
        if not path.is_file():
            if path.exists() or path.is_symlink():
                raise UnsupportedModelError(f"{path} is no file; expected one, or nothing")
            return b""
        if (size := path.stat().st_size) > limit:
            raise UnsupportedModelError(f"{path} has {size} bytes, expected up to {limit}")
        return path.read_bytes()
    except OSError as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error


def read_text(path: Path, limit: int = _MAX_CONFIG) -> str:
    """Read a file as text. Raises ``UnsupportedModelError`` as :func:`read_file`, or if it is not
    UTF-8."""
    try:
        return read_file(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UnsupportedModelError(f"{path} is not UTF-8: {error}") from error


def parse_object(path: Path, content: str | bytes) -> dict[str, Any]:
    """Return the JSON object in the content of a file.

    Raises ``UnsupportedModelError`` if it is no JSON object in UTF-8.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} is {type(value).__name__}, expected a JSON object")
    return value


def read_object(path: Path, limit: int = _MAX_CONFIG) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file. Raises ``UnsupportedModelError``
    if the file is no JSON object, or too large."""
    content = read_file(path, limit)
    return parse_object(path, content) if content else {}


def check_fields(path: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Check the numbers of a model's configuration: what takes memory or time by a number takes it
    as soon as the configuration is made.

    Fields that are null or missing are not checked. Raises ``UnsupportedModelError`` if a number is
    of another type or out of its range; the message has the file and the field.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            check_fields(path, value, f"{prefix}{name}.")
        elif value is not None:
            _check_field(path, prefix, name, value)


def _check_field(path: Path, prefix: str, name: str, value: Any) -> None:
    if name in ("dtype", "torch_dtype") and value not in _TYPES:
        raise UnsupportedModelError(
            f"{path}: {prefix}{name} is {_shown(value)}, expected one of {', '.join(_TYPES)}"
        )
    minimum, maximum = int(name in _COUNTS), _COUNTS.get(name, _FROM_NONE.get(name))
    if maximum is not None:
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number or not minimum <= value <= maximum:
            raise UnsupportedModelError(
                f"{path}: {prefix}{name} is {_shown(value)}, expected a number from {minimum} to "
                f"{maximum}"
            )
    elif name in _REALS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (math.isfinite(value) and 0 < value <= _REALS[name]):
            raise UnsupportedModelError(
                f"{path}: {prefix}{name} is {_shown(value)}, expected a number above 0, up to "
                f"{_REALS[name]:g}"
            )


def token_ids(path: Path, name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return token ids of a field: one, a list, or none if it is null; ids that the model lacks are
    left out: it never gives them. Raises ``UnsupportedModelError`` if it is something else."""
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    for token in tokens:
        number = isinstance(token, int) and not isinstance(token, bool)
        if not number or token < 0:
            raise UnsupportedModelError(
                f"{path}: {name} is {_shown(value)}, expected token ids from 0"
            )
    return tuple(dict.fromkeys(token for token in tokens if token < vocab_size))


def one_line(error: BaseException) -> str:
    """Return an error's message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
