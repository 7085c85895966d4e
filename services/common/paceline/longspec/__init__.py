"""The LongSpec layer: its shape, a plain dense form of it, and its folder.

One transformer layer that drafts for a target (LongSpec, section 3.1): sliding-window
self-attention over its own keys, cross-attention to one target layer's keys and values, a gated
feed-forward block, the target's frozen embedding and LM head. Training runs the dense form; the
drafter's fast one (``paceline.drafter.methods.longspec``) is tested against it.
"""

from paceline.longspec.config import LongSpecConfig
from paceline.longspec.folder import TargetRef, read_longspec, save_longspec
from paceline.longspec.masks import lag_mask, window_mask
from paceline.longspec.module import LongSpecModel

__all__ = [
    "LongSpecConfig",
    "LongSpecModel",
    "TargetRef",
    "lag_mask",
    "read_longspec",
    "save_longspec",
    "window_mask",
]
