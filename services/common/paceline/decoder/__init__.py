"""The decoder-only transformer of verifier and drafter, which runs packed models."""

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
from paceline.decoder.linear import Linear
from paceline.decoder.model import Decoder, ForwardResult
from paceline.decoder.packed_model import PackedModel, is_converted, read_converted
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
    "Linear",
    "LocalCache",
    "PackedModel",
    "UnsupportedModelError",
    "check_batch_invariance",
    "check_served",
    "device_lost",
    "find_device",
    "is_converted",
    "read_converted",
    "receive",
    "use_device",
    "wait_for",
]
