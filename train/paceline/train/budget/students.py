"""The drafters that can be trained under KV budgets, and what they learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.drafter import Drafter
from paceline.train.batches import Batches
from paceline.train.budget.lm import ContinuedLm, LmLoss
from paceline.train.budget.longspec import ContinuedLayer, LayerLoss
from paceline.train.budget.observed import ObservedTarget
from paceline.train.budget.preset import BudgetPreset
from paceline.train.loop import Loss
from paceline.train.trained import Trained, TrainedLayer, TrainedLm, read_trained


class Student(ABC):
    """A trained drafter with KV to be budgeted.

    Attributes:
        tree: Options of the drafter it is measured as.
        trained: The drafter.
        module: What is trained, fp32.
    """

    tree: ClassVar[Mapping[str, str]]
    trained: Trained
    module: nn.Module

    @abstractmethod
    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        """What it learns from a row; loads the target.

        Raises ValueError where the preset does not fit the drafter.
        """

    def drafter(self, folder: Path, budget: int) -> Drafter:
        """A drafter from such a folder, under a KV budget in tokens; 0: all."""
        return self.trained.drafter(folder, context=str(budget), **self.tree)


class LayerStudent(Student):
    """A LongSpec layer."""

    tree: ClassVar[Mapping[str, str]] = {"widths": "4,8,8,8", "max_nodes": "16"}

    def __init__(self, trained: TrainedLayer) -> None:
        self.trained = self._layer = trained
        self.module = ContinuedLayer(trained.model)

    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        config = self._layer.config
        target = ObservedTarget(self.trained.target, device, config.target_layer)
        return LayerLoss(target, config.window, batches, preset)


class LmStudent(Student):
    """A small language model with the target's tokenizer."""

    tree: ClassVar[Mapping[str, str]] = {}

    def __init__(self, trained: TrainedLm) -> None:
        self.trained = trained
        self.module = self._model = ContinuedLm(trained.model)

    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        target: Any = AutoModelForCausalLM.from_pretrained(
            self.trained.target, dtype=torch.bfloat16
        )
        return LmLoss(target.to(device).eval(), self._model, batches, preset)


def read_student(folder: Path, target: Path, device: str) -> Student:
    """The drafter in `folder`, whatever it is.

    Raises ValueError where it was not made for the target, or has no KV to be budgeted.
    """
    trained = read_trained(folder, target, device, (TrainedLayer, TrainedLm))
    if isinstance(trained, TrainedLayer):
        return LayerStudent(trained)
    assert isinstance(trained, TrainedLm), "one of the kinds asked for"
    return LmStudent(trained)
