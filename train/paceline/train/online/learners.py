"""What each kind of drafter learns from recorded texts: the objective it was made with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.train.batches import Batches
from paceline.train.dspark.objective import BlockDrafter, BlockLoss
from paceline.train.dspark.preset import PRESETS as DSPARK_PRESETS
from paceline.train.dspark.target import TappedTarget
from paceline.train.longspec.lagged import LaggedLayer
from paceline.train.longspec.objective import LaggedLoss
from paceline.train.longspec.preset import PRESETS as LONGSPEC_PRESETS
from paceline.train.longspec.preset import Stage, StagePlan
from paceline.train.longspec.target import FrozenTarget
from paceline.train.loop import Loss
from paceline.train.schedule import ContinuedPlan
from paceline.train.trained import Trained, TrainedBlock, TrainedLayer, TrainedLm, read_trained


class Learner(ABC):
    """A trained drafter.

    Attributes:
        trained: The drafter.
        module: What is trained, fp32.
    """

    trained: Trained
    module: nn.Module

    @abstractmethod
    def loss(self, batches: Batches, plan: ContinuedPlan, separator: int, device: str) -> Loss:
        """What it learns from a batch; loads the target. `separator` stands between texts."""


class LayerLearner(Learner):
    """A LongSpec layer: anchor-offset indices, lags, and the target's distribution."""

    def __init__(self, trained: TrainedLayer) -> None:
        self.trained = self._layer = trained
        self.module = LaggedLayer(trained.model)

    def loss(self, batches: Batches, plan: ContinuedPlan, separator: int, device: str) -> Loss:
        stage = Stage("recorded", 1.0, plan.rows, plan.length, rate=1.0, offset=True)
        preset = replace(LONGSPEC_PRESETS["cpu"], stages=(stage,), levels=self._layer.levels)
        target = FrozenTarget(self.trained.target, device, self._layer.config.target_layer)
        return LaggedLoss(target, batches, preset, StagePlan(preset, plan.minutes, plan.steps, 0))


class BlockLearner(Learner):
    """A DSpark drafter: random blocks, and the three losses."""

    def __init__(self, trained: TrainedBlock) -> None:
        self.trained = self._block = trained
        self.module = BlockDrafter(trained.model)

    def loss(self, batches: Batches, plan: ContinuedPlan, separator: int, device: str) -> Loss:
        config = self._block.config
        target = TappedTarget(self.trained.target, device, config.taps)
        return BlockLoss(config, target, batches, DSPARK_PRESETS["cpu"], separator)


class LmLearner(Learner):
    """A small language model: the target's distribution of every next token."""

    def __init__(self, trained: TrainedLm) -> None:
        self.trained = trained
        self.module = trained.model

    def loss(self, batches: Batches, plan: ContinuedPlan, separator: int, device: str) -> Loss:
        target = FrozenTarget(self.trained.target, device, layer=0)

        def loss(forward: nn.Module, places: Tensor, done: float) -> Tensor:
            tokens = batches.stream[places[:, :-1]].to(device)
            positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
            hidden, _, _ = target.read(tokens, positions)
            wanted = F.linear(hidden, target.head).float().log_softmax(-1)
            found = forward(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
            divergence = F.kl_div(found, wanted, reduction="none", log_target=True)
            return divergence.sum(-1).mean()

        return loss


def read_learner(folder: Path, target: Path, device: str) -> Learner:
    """The drafter in `folder`, whatever it is.

    Raises ValueError where it was not made for the target, or is of a method without weights.
    """
    trained = read_trained(folder, target, device, (TrainedLayer, TrainedBlock, TrainedLm))
    if isinstance(trained, TrainedLayer):
        return LayerLearner(trained)
    if isinstance(trained, TrainedBlock):
        return BlockLearner(trained)
    assert isinstance(trained, TrainedLm), "one of the kinds asked for"
    return LmLearner(trained)
