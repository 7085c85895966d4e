"""Drafts token trees: methods, a registry of loaded versions, and the service around them.

Imports neither gRPC nor torch until they are needed, so that training can import the modules of a
method. What a drafter drafts can change the speed of a generation, never its tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from paceline.drafter.kv.exchange import VerifierAccess
    from paceline.drafter.service import build_service, drafting_device

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
    "VerifierAccess",
    "build_service",
    "drafting_device",
    "method_names",
]

_IMPORTED_ON_USE = {
    "VerifierAccess": "paceline.drafter.kv.exchange",
    "build_service": "paceline.drafter.service",
    "drafting_device": "paceline.drafter.service",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_ON_USE[name]), name)
