"""Models in Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig, decoder_config
from paceline.decoder.errors import UnsupportedModelError
from paceline.decoder.quantised import Weight
from paceline.decoder.sources.base import ModelSource
from paceline.decoder.weights import Checkpoint, fingerprint_files, weight_files


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
    def hf_config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(self.path), trust_remote_code=False)
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(f"cannot read {self.path}/config.json: {error}") from error

    def config(self, weights: torch.dtype | str = "auto") -> DecoderConfig:
        return decoder_config(self.hf_config, self._eos(), weights)

    def _eos(self) -> tuple[int, ...]:
        from transformers import GenerationConfig

        found = self.hf_config.eos_token_id
        if (self.path / "generation_config.json").is_file():
            own = GenerationConfig.from_pretrained(str(self.path)).eos_token_id
            found = found if own is None else own
        if found is None:
            return ()
        return (found,) if isinstance(found, int) else tuple(found)

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> Mapping[str, Weight]:
        return Checkpoint(self.path, dtype, device)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        weights = Checkpoint(self.path, dtype, device)
        if name not in weights:
            raise UnsupportedModelError(f"{self.path} lacks the tensor {name!r}")
        return weights.mapped(name)

    @cached_property
    def tokenizer(self) -> bytes:
        return self._read("tokenizer.json")

    @property
    def chat_template(self) -> str:
        own = self._read("chat_template.jinja")
        if own:
            return own.decode()
        config = json.loads(self._read("tokenizer_config.json") or b"{}")
        template = config.get("chat_template") or ""
        if isinstance(template, list):  # several named ones
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", "")
        return str(template)

    def files(self) -> list[Path]:
        return weight_files(self.path)

    def fingerprint(self) -> str:
        config = json.loads(self._read("config.json"))
        for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
            config.pop(volatile, None)
        return fingerprint_files(json.dumps(config, sort_keys=True).encode(), self.files())

    def _read(self, name: str) -> bytes:
        file = self.path / name
        return file.read_bytes() if file.is_file() else b""
