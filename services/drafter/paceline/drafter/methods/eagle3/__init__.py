"""The method ``eagle3``: one layer over fused hidden states of the target and over its own.

See EAGLE-3 (Li et al., arXiv 2503.01840). Training imports
:mod:`~paceline.drafter.methods.eagle3.module`, the layer in dense PyTorch; the layer that drafts
(:mod:`~paceline.drafter.methods.eagle3.drafter`) is tested against it.
"""

from paceline.drafter.methods.eagle3.config import Eagle3Config, read_eagle3, save_eagle3
from paceline.drafter.methods.eagle3.module import Eagle3Model

__all__ = ["Eagle3Config", "Eagle3Model", "read_eagle3", "save_eagle3"]
