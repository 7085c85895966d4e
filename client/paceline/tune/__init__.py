"""Finds the best settings of a drafter for given prompts and this machine."""

from paceline.tune.services import TuningServices
from paceline.tune.steps import METHODS, Step, TuneError, TuningRun, to_table, to_toml, tune

__all__ = [
    "METHODS",
    "Step",
    "TuneError",
    "TuningRun",
    "TuningServices",
    "to_table",
    "to_toml",
    "tune",
]
