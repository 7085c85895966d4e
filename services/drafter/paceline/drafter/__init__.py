"""Drafts token trees: methods, a registry of loaded versions, and the service around them.

Imports neither gRPC nor torch until they are needed, so that training can import the modules of a
method. What a drafter drafts can change the speed of a generation, never its tokens.
"""

from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.methods import method_names
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    GenerationInfo,
    LoadError,
    Needs,
    Resources,
    Update,
)
from paceline.drafter.spec import DrafterSpec
from paceline.tree import TokenTree

__all__ = [
    "Budget",
    "DraftSequence",
    "Drafter",
    "DrafterSpec",
    "Fit",
    "GenerationInfo",
    "KvGone",
    "KvNotShared",
    "LoadError",
    "Needs",
    "Resources",
    "TokenTree",
    "Update",
    "method_names",
]
