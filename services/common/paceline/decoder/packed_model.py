"""A packed model: what a service runs, read from a folder that :mod:`paceline.convert` has made.

The folder has ``weights.bin`` (:mod:`paceline.decoder.packed`), ``tokenizer.json``, and
``model.json`` with all else that a service asks of a model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from paceline.decoder.config import DecoderConfig, UnsupportedModelError, about
from paceline.decoder.model import Decoder, config_for
from paceline.decoder.packed import PackedWeights, Part, Parts, read_header

MODEL, WEIGHTS, TOKENIZER = "model.json", "weights.bin", "tokenizer.json"


@dataclass(frozen=True)
class Description:
    """What a packed model says of itself."""

    name: str  # for display
    source: str  # folder or file that it was made of
    lora: str  # adapter that is merged into it; empty: none
    requested: str  # format of weights that was asked for
    config: DecoderConfig
    architectures: tuple[str, ...]  # names of the model's classes in transformers
    fingerprint: str  # SHA-256 of the model, see `weights_fingerprint`
    origin: Mapping[str, Any]  # by which other formats of it are recognised, see `Origin`
    tokenizer_digest: str  # SHA-256; empty: it has no tokenizer
    special_tokens: Mapping[str, str]  # texts by name
    chat_templates: Mapping[str, str]  # Jinja, by name; the usual one is "default"
    source_bytes: int  # size of the files with the weights
    code: str  # digest of the code that has packed it

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        config = DecoderConfig.from_json(fields["config"])
        return cls(**{**fields, "config": config, "architectures": tuple(fields["architectures"])})


@dataclass(frozen=True)
class PackedModel:
    """A model that a service runs."""

    description: Description
    tokenizer: bytes  # the content of a tokenizer.json; empty: it has none
    file: BinaryIO | None  # its packed weights; None: `pack` makes them on their device
    pack: Callable[[DecoderConfig, torch.device | str], Parts] | None = None

    @property
    def path(self) -> Path:
        """The folder or file that it was made of."""
        return Path(self.description.source)

    def decoder(
        self,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
        max_context: int | None = None,
        numerics: str = "portable",
        *,
        share: bool = False,
    ) -> Decoder:
        """Build the decoder; see :func:`config_for`, :func:`numerics_for`, and
        :class:`PackedWeights` for ``share``. Raises ``UnsupportedModelError`` if it cannot run on
        the device."""
        with about(self.path), torch.inference_mode():
            config = config_for(self.description.config, device, kv_cache_dtype, max_context)
            if self.file is None:
                assert self.pack is not None
                return Decoder(config, self.pack(config, device), device, numerics)
            parts = PackedWeights(self.file.fileno(), share=share)
            decoder = Decoder(config, parts, device, numerics)
            decoder.mapped_bytes = parts.mapped_bytes
            return decoder

    def outer(self, device: torch.device | str = "cpu") -> Mapping[str, Part]:
        """Return the parts beside the layers, see :meth:`Packer.outer`; a file's are mapped."""
        with about(self.path), torch.inference_mode():
            if self.file is None:
                assert self.pack is not None
                return self.pack(self.description.config, device).outer()
            return PackedWeights(self.file.fileno(), share=True, whole=False).outer()


def is_converted(path: Path) -> bool:
    """Return whether a folder looks like one that :func:`convert` has written."""
    return (path / MODEL).is_file()


def read_converted(
    path: Path, weights: str = "auto", lora: str | Path | None = None
) -> PackedModel:
    """Read a folder that :func:`convert` has written.

    Its content is trusted, so it must not be named by callers of a service. Raises
    ``UnsupportedModelError`` if it is damaged, older than this version, or of other ``weights`` or
    another adapter.
    """
    try:
        model = read_entry(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} cannot be used: {error}; make it again with `paceline convert`"
        ) from error
    has = model.description.config.weights
    if lora or weights not in ("auto", has):
        asked = f"with the adapter {lora}" if lora else f"as {weights!r}"
        raise UnsupportedModelError(
            f"{path} was packed as {has!r}, and is asked for {asked}: give what it was made of, "
            f"{model.description.source}"
        )
    return model


def read_entry(entry: Path) -> PackedModel:
    """Read an entry. Raises ``OSError`` if there is none, ``ValueError`` if it is damaged or older
    than this version."""
    description = describe(entry)
    tokenizer = (entry / TOKENIZER).read_bytes()
    if description.tokenizer_digest != (hashlib.sha256(tokenizer).hexdigest() if tokenizer else ""):
        raise ValueError("its tokenizer.json is damaged")
    file = (entry / WEIGHTS).open("rb")
    try:
        read_header(file.fileno())
    except BaseException:
        file.close()
        raise
    with suppress(OSError):  # of a folder that is only read
        os.utime(entry / MODEL)
    return PackedModel(description, tokenizer, file)


def describe(entry: Path) -> Description:
    """Read the description of an entry. Raises ``ValueError`` if it is damaged."""
    try:
        stored = json.loads((entry / MODEL).read_text(encoding="utf-8"))
        if stored["digest"] != digest_of(stored["model"]):
            raise ValueError("model.json is damaged")
        return Description.from_json(stored["model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"model.json is damaged, or of another version: {error}") from error


def digest_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
