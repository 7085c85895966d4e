"""Finds a drafter's settings on the user's own prompts and machine, through real services."""

from paceline.tune.report import to_html, to_toml
from paceline.tune.steps import METHODS, Measure, Step, Trial, TuneError, tune

__all__ = ["METHODS", "Measure", "Step", "Trial", "TuneError", "to_html", "to_toml", "tune"]
