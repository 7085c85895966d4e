"""The DSpark drafter: its shape, a plain dense form of it, and its folders.

A parallel backbone drafts a block in one pass over the target's hidden states; a small sequential
head lets each token of the block depend on the one before; a confidence head says how likely each
is to be accepted (DSpark, section 3). Training runs the dense form; the drafter's fast one
(``paceline.drafter.methods.dspark``) is tested against it. Without the two heads it is DFlash.
"""

from paceline.dspark.config import MARKOV_HEADS, DSparkConfig
from paceline.dspark.folder import Layout, read_dspark, save_dspark
from paceline.dspark.heads import ConfidenceHead, MarkovHead
from paceline.dspark.module import DSparkModel

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
