"""Names of :mod:`paceline.tree` under which the methods import it."""

from paceline.tree import EMPTY
from paceline.tree import TokenTree as Tree

__all__ = ["EMPTY", "Tree", "chain"]

chain = Tree.chain
