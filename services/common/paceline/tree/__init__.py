"""Token trees: what drafters return and the verifier checks. Imports no torch."""

from paceline.tree.growth import accepted_tokens, grow, merge
from paceline.tree.tree import DEFAULT_CONFIDENCE, EMPTY, MAX_NODES, TokenTree, TreeError

__all__ = [
    "DEFAULT_CONFIDENCE", "EMPTY", "MAX_NODES", "TokenTree", "TreeError", "accepted_tokens", "grow",
    "merge",
]  # fmt: skip
