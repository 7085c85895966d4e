"""What layers made for a target have in common: their shape, and their parts in plain PyTorch."""

from paceline.layers.dense import Mlp, RmsNorm, turned
from paceline.layers.shape import LayerShape, target_shape

__all__ = ["LayerShape", "Mlp", "RmsNorm", "target_shape", "turned"]
