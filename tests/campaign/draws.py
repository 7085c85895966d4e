"""What a campaign draws: each axis, its values and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from decoder_cases import FAMILIES
from test_gguf import NAMES as GGUF_NAMES
from trees import T, weighted

from paceline.kernels import SamplingRules

WINDOWS = {"own": 2, 64: 0.5, 128: 2, 255: 0.5, 256: 0.5, 257: 0.5, 512: 3, 1024: 2, 4096: 1}
HEADS = {"own": 2, "4/1": 2, "8/4": 1, "4/4": 1, "16/1": 0.5}
WEIGHTS = {"float32": 3, "bfloat16": 3, "int8": 2, "int4": 1}
BLOCKS = {"Q8_0": 1, "Q4_0": 0.5}  # formats of a GGUF file, whose inputs are multiples of 32
FIXED = ("qwen3-5", "phi3", "qwen2", "qwen2-window", "granite")
"""Families whose number of heads stays, as the width of heads or other fields follow from it."""

FILTERS = ("none", "top_k", "top_p", "min_p", "all")
CONSTRAINTS = {"none": 12, "json_schema": 1, "regex": 1, "grammar": 1}


class Draws(Random):
    """Draws from a key, and what was drawn by axis."""

    def __init__(self, key: str, drawn: Mapping[str, Any] | None = None) -> None:
        super().__init__(key)
        self.drawn = dict(drawn or {})

    def pick(self, axis: str, values: Mapping[T, float] | Iterable[T]) -> T:
        """One value of an axis, by its weight where it has one."""
        choices = values if isinstance(values, Mapping) else dict.fromkeys(values, 1)
        self.drawn[axis] = found = weighted(self, choices)
        return found


def draw_model(draws: Draws) -> tuple[str, dict[str, Any]]:
    """A family and changes of its configuration; ``drawn`` says how it is loaded and served."""
    windows = {name: own.get("sliding_window") for name, (_, own) in FAMILIES.items()}
    name = draws.pick("family", {name: 3 if window else 1 for name, window in windows.items()})
    own = FAMILIES[name][1]
    changes: dict[str, Any] = {"max_position_embeddings": 6144, "eos_token_id": None}
    window = draws.pick("window", WINDOWS if windows[name] else ["own"])
    if window != "own":
        changes["sliding_window"] = window
    heads = draws.pick("heads", ["own"] if name in FIXED else HEADS)
    if heads != "own":
        changes["num_attention_heads"], changes["num_key_value_heads"] = map(int, heads.split("/"))
    files = name in GGUF_NAMES and heads != "own" and not own.get("tie_word_embeddings")
    draws.pick("weights", WEIGHTS | BLOCKS if files else WEIGHTS)
    draws.pick("kv", {"auto": 3, "float32": 1, "bfloat16": 2, "int8": 2})
    draws.pick("numerics", ["portable", "auto"])
    draws.pick("longest", {1400: 6, 5000: 1} if window != 4096 else [5000])
    draws.pick("step_tokens", {2048: 3, 300: 1, 64: 1})
    draws.pick("prefill_tokens", {512: 3, 100: 1})
    draws.pick("prefixes", {0: 3, 4: 1})
    return name, changes


def draw_sampling(draws: Draws, vocab_size: int) -> SamplingRules:
    temperature = draws.pick("temperature", {0.0: 2, 0.7: 2, 1.2: 1})
    chosen = draws.pick("filter", FILTERS if temperature else ["none"])
    options: dict[str, Any] = {}
    if chosen in ("top_k", "all"):
        options["top_k"] = draws.choice((1, 5, 40))
    if chosen in ("top_p", "all"):
        options["top_p"] = draws.choice((0.5, 0.95))
    if chosen in ("min_p", "all"):
        options["min_p"] = draws.choice((0.02, 0.2))
    if draws.pick("penalties", {"none": 5, "some": 1}) == "some":
        options["repetition_penalty"] = draws.choice((1.0, 1.3))
        options["presence_penalty"] = draws.choice((0.0, 0.6))
        options["frequency_penalty"] = draws.choice((0.0, 0.4, -0.2))
    if draws.pick("logit_bias", {"none": 4, "some": 1}) == "some":
        biases = (-5.0, 2.0, float("-inf"))
        options["logit_bias"] = tuple(
            (token, draws.choice(biases)) for token in draws.sample(range(vocab_size), 5)
        )
    return SamplingRules(temperature=temperature, seed=draws.getrandbits(64), **options)


def draw_border(draws: Draws, window: int | None, longest: int) -> int:
    """A position: a border of chunks and of memory (256), of a window and of chunks behind it, of
    the prefix cache (64), or any other."""
    kind = draws.pick("border", {"256": 3, "64": 1, "any": 1} | ({"window": 8} if window else {}))
    if kind == "any":
        return draws.randint(2, longest)
    first = (window or 0) if kind == "window" else 0
    size = 64 if kind == "64" else 256
    return max(2, min(longest, first + size * draws.randint(0, max(0, longest - first) // size)))
