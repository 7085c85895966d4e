"""The method ``dspark``: a block of tokens in one pass over the target's hidden states.

See DSpark, section 3: a parallel backbone drafts a block, a small sequential head makes each token
of the block depend on the previous one, and a confidence head estimates whether each is accepted.
Without the two heads it is DFlash.
"""

from paceline.drafter.methods.dspark.config import MARKOV_HEADS, DSparkConfig
from paceline.drafter.methods.dspark.heads import ConfidenceHead, MarkovHead

__all__ = ["MARKOV_HEADS", "ConfidenceHead", "DSparkConfig", "MarkovHead"]
