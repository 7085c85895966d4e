"""The method ``dspark``: a block of tokens in one pass over the target's hidden states.

See DSpark, section 3: a parallel backbone drafts a block, a small sequential head makes each token
of the block depend on the previous one, and a confidence head estimates whether each is accepted.
Without the two heads it is DFlash. Training imports
:mod:`~paceline.drafter.methods.dspark.module`, the drafter in dense PyTorch. The backbone that
drafts (:mod:`~paceline.drafter.methods.dspark.drafter`) is tested against it.
"""

from paceline.drafter.methods.dspark.config import (
    MARKOV_HEADS,
    DSparkConfig,
    Layout,
    read_dspark,
    save_dspark,
)
from paceline.drafter.methods.dspark.heads import ConfidenceHead, MarkovHead
from paceline.drafter.methods.dspark.module import DSparkModel

__all__ = [
    "MARKOV_HEADS",
    "ConfidenceHead",
    "DSparkConfig",
    "DSparkModel",
    "Layout",
    "MarkovHead",
    "read_dspark",
    "save_dspark",
]
