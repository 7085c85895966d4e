"""The decoder-only transformer of verifier and drafter, which runs packed models."""

from paceline.decoder.cache import LocalCache
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.invariance import BatchInvariance, check_batch_invariance
from paceline.decoder.linear import Linear
from paceline.decoder.model import Decoder, ForwardResult
from paceline.decoder.packed_model import PackedModel, is_converted, read_converted
from paceline.kernels import KVCacheView

__all__ = [
    "BatchInvariance", "Decoder", "DecoderConfig", "ForwardResult", "KVCacheView", "Linear",
    "LocalCache", "PackedModel", "UnsupportedModelError", "check_batch_invariance", "is_converted",
    "read_converted",
]  # fmt: skip
