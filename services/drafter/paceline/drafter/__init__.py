"""Drafts token trees: methods, a registry of loaded versions, and the service around them.

Imports no torch until a method that needs it is loaded. What a drafter drafts can change the speed
of a generation, never its tokens.
"""

from paceline.drafter.kv import KvGone, KvNotShared, VerifierAccess
from paceline.drafter.methods import method_names, register_method
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    Generation,
    LoadError,
    Needs,
    Resources,
    Update,
)
from paceline.drafter.service import DrafterService, build_service
from paceline.drafter.spec import DrafterSpec
from paceline.tree import TokenTree

__all__ = [
    "Budget",
    "DraftSequence",
    "Drafter",
    "DrafterService",
    "DrafterSpec",
    "Fit",
    "Generation",
    "KvGone",
    "KvNotShared",
    "LoadError",
    "Needs",
    "Resources",
    "TokenTree",
    "Update",
    "VerifierAccess",
    "build_service",
    "method_names",
    "register_method",
]
