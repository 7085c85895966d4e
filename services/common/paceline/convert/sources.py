"""Models on disk: Hugging Face folders and GGUF files behind one interface."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from paceline.convert.config import decoder_config
from paceline.convert.experts import ExpertTensors
from paceline.convert.families import FAMILIES, refusal
from paceline.convert.folder_files import (
    check_fields,
    one_line,
    part_paths,
    read_file,
    read_object,
    read_text,
    token_ids,
)
from paceline.convert.folder_tokenizer import FolderTokenizer, folder_tokenizer
from paceline.convert.lora import LoraModel
from paceline.convert.model_source import ModelSource, file_facts
from paceline.convert.weights import Checkpoint, fingerprint_files, plain, weight_files
from paceline.decoder.config import DecoderConfig, UnsupportedModelError

_log = logging.getLogger(__name__)
_VALUES = 64
_MIN_COSINE = 0.9  # 4 bits leave 0.99, unrelated weights are near 0


class ModelFolder(ModelSource):
    """A Hugging Face folder with safetensors weights."""

    def __init__(self, path: Path) -> None:
        """Raises ``FileNotFoundError`` if there is no config.json."""
        self.path = path
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path} has no config.json; expected a Hugging Face folder or a GGUF file"
            )

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def _config(self) -> dict[str, Any]:
        """The content of config.json, its numbers checked."""
        path = self.path / "config.json"
        config = read_object(path)
        check_fields(path, config)
        return config

    @cached_property
    def hf_config(self) -> Any:
        model_type = self._config.get("model_type")
        text = self._config.get("text_config") or self._config
        named = text.get("model_type") if isinstance(text, dict) else None
        if isinstance(named, str) and named not in FAMILIES:
            raise UnsupportedModelError(
                f"{self.path}/config.json: {refusal('model type', named, FAMILIES, text)}"
            )
        family = FAMILIES.get(str(model_type))
        try:
            from transformers import AutoConfig

            if family is not None and family.reads_as:
                known: Any = AutoConfig.for_model(family.reads_as, **_without_type(self._config))
                known.model_type = model_type
                return known
            config = AutoConfig.from_pretrained(
                str(self.path), trust_remote_code=False, local_files_only=True
            )
            # Models for texts and images have a configuration of each.
            return getattr(config, "text_config", None) or config
        except Exception as error:  # its strict classes raise errors that are no ValueError
            raise UnsupportedModelError(
                f"cannot read {self.path}/config.json: {one_line(error)}"
            ) from error

    @property
    def architectures(self) -> tuple[str, ...]:
        names = self._config.get("architectures")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def config_facts(self) -> tuple[object, ...]:
        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        files = [self.path / name for name in names]
        facts = tuple(file_facts(file) for file in files if file.is_file())
        return self._read("config.json"), self._read("generation_config.json"), facts

    def read_config(self, weights: torch.dtype | str) -> DecoderConfig:
        try:
            config = decoder_config(self.hf_config, (), weights)
        except UnsupportedModelError:
            raise
        except Exception as error:  # transformers checks some fields when they are used
            raise UnsupportedModelError(
                f"{self.path}/config.json is invalid: {type(error).__name__}: {one_line(error)}"
            ) from error
        known = self._tokenizer
        bos = config.bos_token_id if known is None else next(iter(known.added), None)
        if known is not None and bos != known.ids.get(self.special_tokens.get("bos_token", "")):
            bos = None  # what it adds is no BOS
        if bos is not None and not 0 <= bos < config.vocab_size:
            bos = None  # some files name -1 for none
        return replace(config, eos_token_ids=self._eos(config.vocab_size), bos_token_id=bos)

    def _eos(self, vocab_size: int) -> tuple[int, ...]:
        """Return the tokenizer's tokens, then generation_config.json's, or else config.json's."""
        path = self.path / "generation_config.json"
        value = read_object(path).get("eos_token_id")
        if value is None:
            path, value = self.path / "config.json", self.hf_config.eos_token_id
        named = token_ids(path, "eos_token_id", value, vocab_size)
        end = None
        if self._tokenizer is not None:
            end = self._tokenizer.ids.get(self.special_tokens.get("eos_token", ""))
        first = () if end is None or end >= vocab_size else (end,)
        return tuple(dict.fromkeys((*first, *named)))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        weights = self.tensors(dtype, device)
        if name not in weights:
            raise UnsupportedModelError(f"{self.path} lacks the tensor {name!r}")
        return plain(weights.mapped(name), dtype).to(device)

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> ExpertTensors:
        family = FAMILIES.get(str(self._config.get("model_type")))
        interleaved = family is not None and family.interleaved
        return ExpertTensors(Checkpoint(self.path, dtype, device), interleaved=interleaved)

    @cached_property
    def _tokenizer(self) -> FolderTokenizer | None:
        vocab_size = self._config.get("vocab_size")
        size = vocab_size if isinstance(vocab_size, int) else None
        return folder_tokenizer(self.path, self.special_tokens, size)

    @cached_property
    def tokenizer(self) -> bytes:
        """As transformers builds it of the folder's files. Raises ``UnsupportedModelError`` if one
        is missing or damaged."""
        known = self._tokenizer
        if known is None:
            return b""
        return known.content.encode() or self._read("tokenizer.json")

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """As transformers finds them: in files of their own, or in tokenizer_config.json. Models
        for texts and images may have one in chat_template.json."""
        further = (self.path / "additional_chat_templates").glob("*.jinja")
        templates = {file.stem: read_text(file) for file in sorted(further)}
        if usual := read_text(self.path / "chat_template.jinja"):
            templates["default"] = usual
        if templates:
            return templates
        for name in ("tokenizer_config.json", "chat_template.json"):
            template = read_object(self.path / name).get("chat_template")
            if isinstance(template, list):  # several named ones
                pairs = [
                    (entry.get("name"), entry.get("template"))
                    for entry in template
                    if isinstance(entry, dict)
                ]
                return {str(key): text for key, text in pairs if isinstance(text, str)}
            if template:
                return {"default": str(template)}
        return {}

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        config = read_object(self.path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # of an older transformers
            config |= read_object(self.path / "special_tokens_map.json")
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        if isinstance(further := config.get("extra_special_tokens"), dict):
            named |= further
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in named.items()
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def files(self) -> list[Path]:
        return weight_files(self.path)

    def read_fingerprint(self) -> str:
        config = dict(self._config)
        for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
            config.pop(volatile, None)
        return fingerprint_files(json.dumps(config, sort_keys=True).encode(), self.files())

    def _read(self, name: str) -> bytes:
        return read_file(self.path / name)


def _without_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's fields but its type, and the code that its folder has for it."""
    return {name: value for name, value in config.items() if name not in ("model_type", "auto_map")}


@dataclass(frozen=True)
class Origin:
    """Tells whether two models are formats of one: folder, GGUF file, any number of bits.

    It does not tell a model from one that was trained a little further. Use it where a mistake
    costs time and nothing else.
    """

    tokens: str  # SHA-256 (hex) of the tokens by id; of nothing if the model has no tokenizer
    weights: tuple[float, ...]  # values spread over a matrix of the last layer

    @classmethod
    def of(cls, source: ModelSource) -> Self:
        """Read a model's tokenizer and one of its matrices."""
        known = json.loads(source.tokenizer or b"{}")
        tokens = dict(known.get("model", {}).get("vocab", {}))
        tokens |= {token["content"]: token["id"] for token in known.get("added_tokens", ())}
        config = source.config()
        experts, _ = config.feed_forward(config.layers - 1)
        part = "mlp.experts.0.down_proj" if experts else "mlp.down_proj"
        name = f"model.layers.{config.layers - 1}.{part}.weight"
        matrix = source.tensor(name, torch.float32, "cpu").flatten()
        places = torch.linspace(0, len(matrix) - 1, _VALUES, dtype=torch.float64).long()
        return cls(
            hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest(),
            tuple(round(value, 5) for value in matrix[places].tolist()),
        )

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``; an invalid description fits no model."""
        weights = described.get("weights")
        if not isinstance(weights, list | tuple) or not all(isinstance(w, float) for w in weights):
            weights = []
        return cls(str(described.get("tokens", "")), tuple(weights))

    def fits(self, other: Origin) -> bool:
        """Return whether both are formats of one model."""
        if self.tokens != other.tokens or len(self.weights) != len(other.weights):
            return False
        pairs = list(zip(self.weights, other.weights, strict=True))
        norms = math.hypot(*self.weights) * math.hypot(*other.weights)
        return sum(a * b for a, b in pairs) > _MIN_COSINE * norms


def open_model(path: str | Path | ModelSource, lora: str | Path | None = None) -> ModelSource:
    """Return a model folder, or a GGUF file, whose structure is checked, or what this returned for
    it; ``lora`` is the folder of an adapter that is merged into it, see :class:`LoraModel`.

    Raises ``UnsupportedModelError`` if the file is damaged or of a kind that is not supported, or
    the adapter is, and ``FileNotFoundError`` if there is no such file, or the folder has no
    config.json.
    """
    if lora:
        return LoraModel(open_model(path), Path(lora))
    if isinstance(path, ModelSource):
        return path
    source = Path(path)
    if source.is_file() or source.suffix == ".gguf":
        files = (file for file in part_paths(source) if file.is_file())
        return _gguf_model(source, tuple(map(file_facts, files)))
    return ModelFolder(source)


@lru_cache(maxsize=4)
def _gguf_model(path: Path, facts: tuple[object, ...]) -> ModelSource:
    """Open a GGUF file, whose metadata take longer to read than a folder's."""
    from paceline.convert.gguf import GgufModel

    return GgufModel(path)


def load_config(
    path: str | Path | ModelSource, weights: torch.dtype | str = "auto"
) -> DecoderConfig:
    """Return a model's configuration; see :func:`open_model` and :meth:`ModelSource.config`."""
    return open_model(path).config(weights)


def weights_fingerprint(path: str | Path | ModelSource) -> str:
    """Return the SHA-256 (hex) of a model.

    Of a folder: its config.json and the bytes of its weight files, in order. The config is hashed
    as canonical JSON without fields that tools rewrite. So copying or reformatting a folder does
    not change the fingerprint; any change of a weight does. Of a GGUF file: all its bytes. Of a
    model with an adapter: the model's fingerprint, and the bytes of the adapter's files.
    """
    return open_model(path).fingerprint()
