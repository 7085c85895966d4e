"""Named drafters and their versions: load, check, canary, activate, unload, restore."""

from paceline.drafter.registry.registry import Registry
from paceline.drafter.registry.state import StateFile
from paceline.drafter.registry.table import Version

__all__ = ["Registry", "StateFile", "Version"]
