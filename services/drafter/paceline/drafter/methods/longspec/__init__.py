"""The method ``longspec``: one transformer layer that reads the target's own KV.

See LongSpec, section 3.1: sliding-window self-attention over the layer's own keys, cross-attention
to the keys and values of one target layer, a gated feed-forward block, the target's frozen
embedding and LM head.
"""

from paceline.drafter.methods.longspec.config import LongSpecConfig

__all__ = ["LongSpecConfig"]
