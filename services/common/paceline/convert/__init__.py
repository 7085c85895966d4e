"""Turns what people bring into a packed model: Hugging Face folders, GGUF files, LoRA adapters."""

from paceline.convert.model_source import ModelSource
from paceline.convert.pack import Packer
from paceline.convert.sources import Origin, load_config, open_model, weights_fingerprint
from paceline.convert.store import convert, load_decoder, prepare

__all__ = [
    "ModelSource", "Origin", "Packer", "convert", "load_config", "load_decoder", "open_model",
    "prepare", "weights_fingerprint",
]  # fmt: skip
