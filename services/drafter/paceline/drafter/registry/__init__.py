"""Named drafters and their versions: loaded, checked, tried, promoted, unloaded, remembered."""

from paceline.drafter.registry.registry import Registry
from paceline.drafter.registry.state import StateFile
from paceline.drafter.registry.trial import Sample
from paceline.drafter.registry.version import Version

__all__ = ["Registry", "Sample", "StateFile", "Version"]
