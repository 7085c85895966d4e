"""Finds the best settings of a drafter for given prompts and this machine."""

from paceline.tune.report import to_table, to_toml
from paceline.tune.services import TuningServices
from paceline.tune.steps import METHODS, Step, TuneError, TuningRun, run_count, tune

__all__ = [
    "METHODS",
    "Step",
    "TuneError",
    "TuningRun",
    "TuningServices",
    "run_count",
    "to_table",
    "to_toml",
    "tune",
]
