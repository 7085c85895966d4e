"""The transformer that verifier and drafter both run: Hugging Face weights in, logits out."""

from paceline.decoder.cache import KVCacheView, LocalCache
from paceline.decoder.config import DecoderConfig, load_config
from paceline.decoder.errors import UnsupportedModelError
from paceline.decoder.invariance import is_batch_invariant
from paceline.decoder.model import AttentionObserver, Decoder, ForwardResult
from paceline.decoder.weights import weights_fingerprint

__all__ = [
    "AttentionObserver",
    "Decoder",
    "DecoderConfig",
    "ForwardResult",
    "KVCacheView",
    "LocalCache",
    "UnsupportedModelError",
    "is_batch_invariant",
    "load_config",
    "weights_fingerprint",
]
