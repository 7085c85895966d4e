"""Finds the best settings of a drafter for given prompts and this machine."""

from paceline.tune.services import TuningServices
from paceline.tune.steps import METHODS, TuneError, TuningRun, TuningStep, to_table, to_toml, tune

__all__ = [
    "METHODS",
    "TuneError",
    "TuningRun",
    "TuningServices",
    "TuningStep",
    "to_table",
    "to_toml",
    "tune",
]
