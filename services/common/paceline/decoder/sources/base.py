"""The interface of a model on disk."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig
from paceline.decoder.quantised import Weight, WeightsOf


class ModelSource(ABC):
    """A model on disk. Tensors have their Hugging Face names."""

    path: Path
    """The folder or file."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the model, for display."""

    @property
    @abstractmethod
    def hf_config(self) -> Any:
        """The transformers config.

        Raises:
            UnsupportedModelError: It cannot be read.
        """

    @abstractmethod
    def config(self, weights: torch.dtype | str = "auto") -> DecoderConfig:
        """The decoder's configuration.

        Args:
            weights: float32, bfloat16, int8, int4, or auto for the stored format (bfloat16 for
                float16).

        Raises:
            UnsupportedModelError: Architecture, feature or format that is not supported.
        """

    @abstractmethod
    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> Mapping[str, Weight]:
        """Tensors as they are stored: blocks, or torch tensors as ``dtype`` on ``device``."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """One tensor as a plain one, mapped from the file if type and device allow it.

        Raises:
            UnsupportedModelError: There is none of this name.
        """

    def vocabulary(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Embedding and LM head, each ``[V, hidden]``, on the CPU."""
        embedding = self.tensor("model.embed_tokens.weight", dtype, "cpu")
        tied = self.config().tied
        return embedding, embedding if tied else self.tensor("lm_head.weight", dtype, "cpu")

    @property
    @abstractmethod
    def tokenizer(self) -> bytes:
        """The content of a tokenizer.json; empty if the model has no tokenizer."""

    @property
    @abstractmethod
    def chat_template(self) -> str:
        """The chat template (Jinja); empty if the model has none."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files with the weights."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the model; reads all its weights. See :func:`weights_fingerprint`."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model's classes in transformers."""
        return tuple(self.hf_config.architectures or ())

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 (hex) of the tokenizer; empty if there is none."""
        return hashlib.sha256(self.tokenizer).hexdigest() if self.tokenizer else ""

    @property
    def weight_bytes(self) -> int:
        """Size of the files with the weights. Unit: bytes."""
        return sum(path.stat().st_size for path in self.files())

    def weights(
        self, config: DecoderConfig, device: torch.device | str = "cpu"
    ) -> Mapping[str, Weight]:
        """Tensors in the format of a configuration; off the CPU, nothing is quantised."""
        if config.weights in ("float32", "bfloat16"):
            stored = self.tensors(config.dtype, device)
        else:
            stored = self.tensors(torch.float32, "cpu")
        return WeightsOf(stored, config, torch.device(device))
