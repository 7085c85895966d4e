"""The interface of a model on disk, and what is kept of its files between starts.

To import transformers takes longer than to load a small model. Its answers depend on the files, its
version and the code here alone, so they are kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline.decoder
import paceline.kernels
from paceline.convert.sandbox import Progress, run_in_child
from paceline.convert.weights import Weight, WeightsOf
from paceline.decoder.config import DecoderConfig, UnsupportedModelError, about
from paceline.decoder.linear import is_rotated
from paceline.decoder.remembered import digest_of_sources, remembered
from paceline.formats import FLOATS

_CHILD_SECONDS, _CHILD_MEMORY = 60.0, 8 << 30


def remembered_by_transformers(facts: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """Return the same, where ``make`` imports transformers, which takes 130 MiB: a child process
    makes the value and ends, unless this is one, or transformers is imported anyway. ``make`` can
    be pickled."""
    if "transformers" in sys.modules or parent_process() is not None:
        return remembered(facts, make)
    what = "to read a configuration"
    return remembered(
        facts,
        lambda: run_in_child(
            partial(_make, make), what, seconds=_CHILD_SECONDS, memory=_CHILD_MEMORY
        ),
    )


def _make(make: Callable[[], Any], _: Progress) -> Any:
    return make()


@cache
def code_digest() -> str:
    """Return a digest of the code that reads models and packs them."""
    files = (__file__, paceline.decoder.__file__, paceline.kernels.__file__)
    return " ".join(digest_of_sources(Path(str(file)).parent) for file in files)


def file_facts(path: Path) -> tuple[object, ...]:
    """Return what tells a file from a changed one without reading it."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _read_config(source: ModelSource, weights: torch.dtype | str) -> Any:
    config = source.read_config(weights).to_json()
    with suppress(UnsupportedModelError):
        _ = source.tokenizer  # a file's is made by transformers too
    return config


class ModelSource(ABC):
    """A model on disk. Tensors have their Hugging Face names."""

    path: Path  # the folder or file

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself."""
        return type(self), (self.path,)

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the model, for display."""

    @property
    @abstractmethod
    def hf_config(self) -> Any:
        """The transformers config. Raises ``UnsupportedModelError`` if it cannot be read."""

    def config(self, weights: torch.dtype | str = "auto") -> DecoderConfig:
        """Return the decoder's configuration, kept between starts until its reader's code changes.

        ``weights`` are float32, bfloat16, int8, int4, or auto for the stored format (bfloat16
        for float16). Raises ``UnsupportedModelError`` if an architecture, feature or format is not
        supported.
        """
        facts = ("config", code_digest(), str(weights), *self.config_facts())
        with about(self.path):
            return DecoderConfig.from_json(
                remembered_by_transformers(facts, partial(_read_config, self, weights))
            )

    @abstractmethod
    def read_config(self, weights: torch.dtype | str) -> DecoderConfig:
        """Return the same, read from the files by transformers."""

    @abstractmethod
    def config_facts(self) -> tuple[object, ...]:
        """Return what the configuration depends on, besides ``weights``; see :func:`remembered`."""

    @abstractmethod
    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> Mapping[str, Weight]:
        """Return tensors as stored: blocks, or torch tensors as ``dtype`` on ``device``."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return one tensor as a plain one, mapped from the file if type and device allow it.
        Raises ``UnsupportedModelError`` if there is none of this name."""

    def vocabulary(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the embedding and LM head, each ``[V, hidden]``, on the CPU."""
        embedding = self.tensor("model.embed_tokens.weight", dtype, "cpu")
        tied = self.config().tied
        return embedding, embedding if tied else self.tensor("lm_head.weight", dtype, "cpu")

    @property
    @abstractmethod
    def tokenizer(self) -> bytes:
        """The content of a tokenizer.json; empty if the model has no tokenizer."""

    @property
    @abstractmethod
    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates (Jinja) by name; the usual one is "default"."""

    @property
    def chat_template(self) -> str:
        """The usual chat template (Jinja); empty if the model has none."""
        return self.chat_templates.get("default", "")

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the tokenizer's special tokens by name, such as "eos_token", as in the
        `special_tokens_map` of transformers."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files with the weights."""

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of the model; see :func:`weights_fingerprint`.

        It is kept between starts, and computed again where a file has changed.
        """
        files = tuple(file_facts(file) for file in self.files())
        facts = ("fingerprint", *files, *self.config_facts())
        return str(remembered(facts, self.read_fingerprint))

    @abstractmethod
    def read_fingerprint(self) -> str:
        """Return the same, by reading all weights."""

    @property
    @abstractmethod
    def architectures(self) -> tuple[str, ...]:
        """Names of the model's classes in transformers."""

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
        """Return tensors in the format of a configuration; off the CPU, nothing is quantised."""
        plain = config.weights in FLOATS
        if plain or is_rotated(config.weights, torch.device(device)):
            stored = self.tensors(config.dtype, device)
        else:
            stored = self.tensors(torch.float32, "cpu")
        return WeightsOf(stored, config, torch.device(device))
