"""The drafters that can be trained under KV budgets, each with its folder's format."""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.drafter import Drafter, Resources
from paceline.drafter.checkpoint import check_target, read_fit
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import LoadError
from paceline.longspec import LongSpecModel, TargetRef, read_longspec, save_longspec
from paceline.longspec.folder import METHOD as LONGSPEC
from paceline.train.batches import Batches
from paceline.train.budget.lm import ContinuedLm, LmLoss
from paceline.train.budget.longspec import ContinuedLayer, LayerLoss
from paceline.train.budget.observed import ObservedTarget
from paceline.train.budget.preset import BudgetPreset
from paceline.train.loop import Loss

_CONFIG = "config.json"


class Student(ABC):
    """A drafter that was trained already.

    Attributes:
        method: Of the drafter that its folder makes.
        tree: Options of the drafter it is measured as.
        module: What is trained, fp32.
        target: Folder of its target.
    """

    method: ClassVar[str]
    tree: ClassVar[Mapping[str, str]]
    module: nn.Module

    def __init__(self, target: Path) -> None:
        self.target = target

    @abstractmethod
    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        """What it learns from a row; loads the target.

        Raises ValueError where the preset does not fit the drafter.
        """

    @abstractmethod
    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        """Write its folder, in the type that the one it came from has."""

    def drafter(self, folder: Path, budget: int, **options: str) -> Drafter:
        """A drafter from such a folder, under a KV budget in tokens; 0: all."""
        given = {**self.tree, "context": str(budget), **options}
        return method_class(self.method).load(folder, given, Resources())


class LayerStudent(Student):
    """A LongSpec layer."""

    method = LONGSPEC
    tree: ClassVar[Mapping[str, str]] = {"widths": "4,8,8,8", "max_nodes": "16"}

    def __init__(self, folder: Path, target: Path, device: str) -> None:
        """Read it from `folder`. Raises LoadError where it was made for another target."""
        super().__init__(target)
        check_target(folder, target, read_fit(folder))
        self.config, self._dtype = read_longspec(folder)
        self._model = LongSpecModel(self.config)
        self._model.load_state_dict(load_file(folder / "model.safetensors"))
        self.module = ContinuedLayer(self._model.float().to(device))
        proposal = json.loads((folder / _CONFIG).read_text())["speculators_config"]
        self._levels = int(proposal["proposal_methods"][0]["speculative_tokens"])

    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        target = ObservedTarget(self.target, device, self.config.target_layer)
        return LayerLoss(target, self.config.window, batches, preset)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        save_longspec(
            folder,
            self.config,
            self._model.state_dict(),
            TargetRef.of(self.target),
            levels=self._levels,
            dtype=self._dtype,
            notes=notes,
        )

    def drafter(self, folder: Path, budget: int, **options: str) -> Drafter:
        return super().drafter(folder, budget, target=str(self.target), **options)


class LmStudent(Student):
    """A small language model with the target's tokenizer."""

    method = "lm"
    tree: ClassVar[Mapping[str, str]] = {}

    def __init__(self, folder: Path, target: Path, device: str) -> None:
        """Read it from `folder`. Raises LoadError where its tokenizer is not the target's."""
        super().__init__(target)
        check_target(folder, target, read_fit(folder))
        self._folder = folder
        self._dtype = getattr(torch, json.loads((folder / _CONFIG).read_text())["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = ContinuedLm(model.to(device))
        self.module = self._model

    def loss(self, batches: Batches, preset: BudgetPreset, device: str) -> Loss:
        target: Any = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.bfloat16)
        return LmLoss(target.to(device).eval(), self._model, batches, preset)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        copy.deepcopy(self._model.model).to(self._dtype).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (self._folder / name).is_file() and folder != self._folder:
                shutil.copyfile(self._folder / name, folder / name)
        if notes:
            config = json.loads((folder / _CONFIG).read_text())
            config["paceline"] = {"method": self.method, "training": dict(notes)}
            (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_student(folder: Path, target: Path, device: str) -> Student:
    """The drafter in `folder`, whatever it is.

    Raises ValueError where it was not made for the target, or has no KV to be budgeted.
    """
    section = json.loads((folder / _CONFIG).read_text()).get("paceline", {})
    method = section.get("method", LmStudent.method)
    for kind in (LayerStudent, LmStudent):
        if kind.method == method:
            try:
                return kind(folder, target, device)
            except LoadError as error:
                raise ValueError(str(error)) from error
    raise ValueError(f"{folder} is a drafter of method {method!r}, expected longspec or lm")
