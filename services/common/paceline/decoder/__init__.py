"""The decoder-only transformer of verifier and drafter, from Hugging Face folders or GGUF files."""

from paceline.decoder.cache import LocalCache
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.device import (
    ACCELERATORS,
    DeviceLost,
    device_lost,
    find_device,
    receive,
    use_device,
    wait_for,
)
from paceline.decoder.graphs import Capturing, GraphRunner
from paceline.decoder.invariance import BatchInvariance, check_batch_invariance, check_served
from paceline.decoder.model import Decoder, ForwardResult
from paceline.decoder.model_source import ModelSource
from paceline.decoder.pack import Packer
from paceline.decoder.packed import PackedWeights
from paceline.decoder.sources import load_config, open_model, weights_fingerprint
from paceline.decoder.store import (
    PackedModel,
    convert,
    is_converted,
    prepare,
    read_converted,
)
from paceline.kernels import KVCacheView

__all__ = [
    "ACCELERATORS",
    "BatchInvariance",
    "Capturing",
    "Decoder",
    "DecoderConfig",
    "DeviceLost",
    "ForwardResult",
    "GraphRunner",
    "KVCacheView",
    "LocalCache",
    "ModelSource",
    "PackedModel",
    "PackedWeights",
    "Packer",
    "UnsupportedModelError",
    "check_batch_invariance",
    "check_served",
    "convert",
    "device_lost",
    "find_device",
    "is_converted",
    "load_config",
    "open_model",
    "prepare",
    "read_converted",
    "receive",
    "use_device",
    "wait_for",
    "weights_fingerprint",
]
