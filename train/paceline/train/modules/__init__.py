"""Drafters in plain dense PyTorch: for training, and as references of the fast ones."""

from paceline.train.modules.dspark import DSparkModel
from paceline.train.modules.eagle3 import Eagle3Model
from paceline.train.modules.longspec import LongSpecModel
from paceline.train.modules.mtp import MtpModel

__all__ = ["DSparkModel", "Eagle3Model", "LongSpecModel", "MtpModel"]
