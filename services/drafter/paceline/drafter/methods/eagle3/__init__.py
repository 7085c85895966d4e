"""The method ``eagle3``: one layer over fused hidden states of the target and over its own.

See EAGLE-3 (Li et al., arXiv 2503.01840).
"""

from paceline.drafter.methods.eagle3.config import Eagle3Config

__all__ = ["Eagle3Config"]
