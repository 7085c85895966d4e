"""The recipe of `lm`."""

from __future__ import annotations

from paceline.train.presets import LM_PRESETS, Preset
from paceline.train.recipes.base import Recipe


class LmRecipe(Recipe[Preset]):
    """How a small language model is distilled from a target."""

    method = "lm"
    help = "distil a target into a small drafter LM"
    presets = LM_PRESETS
    preset = "lm"
    trainer = "paceline.train.lm:LmTrainer"
