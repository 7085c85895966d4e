"""LoRA adapters (Hu et al. 2021) in PEFT folders, merged into the weights of a model at load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.convert.experts import shared_name
from paceline.convert.folder_files import one_line, read_object
from paceline.convert.model_source import ModelSource, file_facts
from paceline.convert.weights import Tensors, Weight, fingerprint_files
from paceline.decoder.config import DecoderConfig, UnsupportedModelError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# The model's own matrix below a change of it: PEFT stores the embedding's and the LM head's.
_BASE = ".base_layer.weight"
# Matrices that PEFT stores whole where the vocabulary was extended, or when it is told to.
_WHOLE = ("embed_tokens.weight", "lm_head.weight")
# Fields of a configuration that change what an adapter is; they must be absent, false or empty.
_REFUSED = (
    "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "layer_replication",
)  # fmt: skip
# Ways to begin a training that change the weights of the model too.
_OTHER_BASES = ("pissa", "olora", "corda", "loftq")

# Parts of an expression that take time: repetitions, repeated groups, and how many may be.
_REPEATS, _GROUPS, _MAX_REPEATS = re.compile(r"[*+{]"), re.compile(r"\)[*+{]"), 3


# What other tensors are, by a part of the names that PEFT gives them.
_OTHERS = {
    "lora_embedding_": "LoRA on the embedding",
    "lora_magnitude_vector": "DoRA",
    "trainable_tokens": "trained tokens",
    ".bias": "a bias",
    "modules_to_save": "a module that was trained as a whole",
    ".weight": "a module that was trained as a whole",
}

_WAY_OUT = (
    "merge it with PEFT, PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload()"
    ".save_pretrained(DIR), and give DIR without the adapter"
)


@dataclass(frozen=True)
class _Change:
    """What a matrix becomes: its own value, or ``base``'s, and ``scale * b @ a``."""

    pair: tuple[str, str] | None  # names of a and b; None: nothing is added
    base: str  # name of the value that replaces the model's own; empty: none does
    rank: int
    scale: float


def _of_base(name: str) -> Any:
    return property(lambda model: getattr(model._base, name))


class LoraModel(ModelSource):
    """A model with an adapter: like the model but for its weights and fingerprint."""

    hf_config, architectures = _of_base("hf_config"), _of_base("architectures")
    tokenizer, special_tokens = _of_base("tokenizer"), _of_base("special_tokens")
    chat_templates = _of_base("chat_templates")

    def __init__(self, base: ModelSource, folder: Path) -> None:
        """Open a PEFT folder: ``adapter_config.json`` and ``adapter_model.safetensors``. Raises
        ``UnsupportedModelError`` if it has no such adapter, or one that does not fit the model."""
        from safetensors import safe_open

        self.path, self._base, self._folder = base.path, base, folder
        for name in (_CONFIG, _WEIGHTS):
            if not (folder / name).is_file():
                raise UnsupportedModelError(f"{folder} has no {name}; expected a PEFT folder")
        config = self._read_config()
        try:
            self._file: Any = safe_open(str(folder / _WEIGHTS), framework="pt")
        except Exception as error:  # of the library
            raise UnsupportedModelError(
                f"cannot read {folder / _WEIGHTS}: {one_line(error)}"
            ) from error
        self._changes = dict(self._read_changes(config))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._base, self._folder)

    def _error(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"adapter {self._folder}: {what}")

    def _read_config(self) -> dict[str, Any]:
        config = read_object(self._folder / _CONFIG)
        kind = config.get("peft_type")
        if kind != "LORA":
            raise self._error(f"peft_type is {kind!r}, expected 'LORA'")
        refused = [name for name in _REFUSED if config.get(name)]
        if config.get("bias", "none") != "none":
            refused.append("bias")
        if str(config.get("init_lora_weights")).startswith(_OTHER_BASES):
            refused.append("init_lora_weights")
        if refused:
            shown = ", ".join(f"{name} {config[name]!r}" for name in refused)
            raise self._error(f"{shown} is not supported; {_WAY_OUT}")
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(name) or {}
            if not isinstance(patterns, dict):
                raise self._error(f"{name} is {patterns!r}, expected an object")
            for pattern in patterns:
                if len(_REPEATS.findall(pattern)) > _MAX_REPEATS or _GROUPS.search(pattern):
                    raise self._error(
                        f"{name} has {pattern!r}, which may take for ever; expected at most "
                        f"{_MAX_REPEATS} repetitions, and none of a group"
                    )
        for name in ("r", "lora_alpha"):
            value: Any = config.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise self._error(f"{name} is {value!r}, expected a number above 0")
        return config

    def _read_changes(self, config: dict[str, Any]) -> Iterator[tuple[str, _Change]]:
        """Yield the changes by name of the tensor."""
        names = set(self._file.keys())
        modules = dict.fromkeys(map(self._module_of, sorted(names)))
        for module in modules:
            both = _PREFIX + module + _A, _PREFIX + module + _B
            pair = both if names.intersection(both) else None
            if pair and not names.issuperset(pair):
                raise self._error(f"of tensors {pair[0]!r} and {pair[1]!r} one is missing")
            bases = (f"{_PREFIX}{module}{end}" for end in (_BASE, ".weight"))
            base = next((name for name in bases if name in names), "")
            try:
                rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
                alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
                scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            except (re.error, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
                raise self._error(f"rank_pattern or alpha_pattern is invalid: {error}") from error
            yield shared_name(f"{module}.weight"), _Change(pair, base, rank, scale)

    def _module_of(self, name: str) -> str:
        """Return a tensor's module. Raises ``UnsupportedModelError`` if it cannot be merged."""
        module = name.removeprefix(_PREFIX)
        ends = (_A, _B, _BASE, *((".weight",) if module.endswith(_WHOLE) else ()))
        for end in ends:
            if name.startswith(_PREFIX) and module.endswith(end):
                return module.removesuffix(end)
        what = next((what for part, what in _OTHERS.items() if part in name), "nothing known")
        raise self._error(f"tensor {name!r}, {what}, is not supported; {_WAY_OUT}")

    @property
    def name(self) -> str:
        return f"{self._base.name}+{self._folder.resolve().name}"

    def read_config(self, weights: torch.dtype | str) -> DecoderConfig:
        return self._base.read_config(weights)

    def config_facts(self) -> tuple[object, ...]:
        adapter = (self._folder / _CONFIG).read_bytes(), file_facts(self._folder / _WEIGHTS)
        return *self._base.config_facts(), *adapter

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> Mapping[str, Weight]:
        base = self._base.tensors(dtype, device)
        for name in sorted(self._changes):
            if name not in base:
                raise self._error(
                    f"it changes {name!r}, which {self.path} does not have; {_WAY_OUT}"
                )
        return _Merged(base, self)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        weight = self._base.tensor(name, dtype, device)
        return self.merge(name, weight) if name in self._changes else weight

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight of a tensor with what the adapter adds, summed in float32. Raises
        ``UnsupportedModelError`` if shapes of the adapter do not fit."""
        change = self._changes[name]
        if change.base:
            given = self._file.get_tensor(change.base)
            if given.shape != weight.shape:
                raise self._error(
                    f"{change.base!r} has shape {tuple(given.shape)}, expected that of {name!r}, "
                    f"{tuple(weight.shape)}: if tokens were added, {_WAY_OUT}"
                )
            weight = given.to(weight.device, weight.dtype)
        if change.pair is None:
            return weight
        a, b = (self._file.get_tensor(part).float() for part in change.pair)
        if (
            weight.dim() != 2
            or a.shape != (change.rank, weight.shape[1])
            or (b.shape != (weight.shape[0], change.rank))
        ):
            raise self._error(
                f"{change.pair[0]!r} has shape {tuple(a.shape)} and lora_B {tuple(b.shape)}, "
                f"expected rank {change.rank} for {name!r} of shape {tuple(weight.shape)}"
            )
        merged: Tensor = weight.float() + (b @ a).mul_(change.scale).to(weight.device)
        return merged.to(weight.dtype)

    def files(self) -> list[Path]:
        return [*self._base.files(), self._folder / _WEIGHTS]

    def read_fingerprint(self) -> str:
        files = [self._folder / _CONFIG, self._folder / _WEIGHTS]
        return fingerprint_files(self._base.fingerprint().encode(), files)


class _Merged(Tensors[Weight]):
    """Tensors of a model, those that an adapter changes with its changes."""

    def __init__(self, base: Mapping[str, Weight], model: LoraModel) -> None:
        self._names, self._model = base, model

    def __getitem__(self, name: str) -> Weight:
        value: Weight = self._names[name]
        if name not in self._model._changes:
            return value
        return self._model.merge(name, value if isinstance(value, Tensor) else value.dequantise())


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
