"""Drafters that were trained already, to be trained further: their folders, read and written."""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
from paceline.drafter.methods.dspark import DSparkModel, load_weights, read_dspark, save_dspark
from paceline.drafter.methods.longspec import LongSpecModel, TargetRef, read_longspec, save_longspec
from paceline.drafter.methods.target import WEIGHTS_FILE

_CONFIG = "config.json"


class Trained(ABC):
    """A drafter and the folder it was read from.

    Attributes:
        method: Of the drafter that its folder makes.
        target: Folder of its target.
        model: Its weights, fp32.
    """

    method: ClassVar[str]
    model: nn.Module

    def __init__(self, folder: Path, target: Path, device: str) -> None:
        """Read it from `folder`. Raises LoadError where it was made for another target."""
        check_target(folder, target, read_fit(folder))
        self.target = target
        self._read(folder, device)

    @abstractmethod
    def _read(self, folder: Path, device: str) -> None:
        """Load the model."""

    @abstractmethod
    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        """Write its folder, in the type that the one it came from has; `notes` say how it was
        trained."""

    def drafter(self, folder: Path, **options: str) -> Drafter:
        """A drafter from such a folder."""
        given = {"target": str(self.target), **options}
        return method_class(self.method).load(folder, given, Resources())


class TrainedLayer(Trained):
    """A LongSpec layer."""

    method = "longspec"
    model: LongSpecModel

    def _read(self, folder: Path, device: str) -> None:
        self.config, self._dtype = read_longspec(folder)
        self.model = LongSpecModel(self.config)
        self.model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        self.model.float().to(device)
        proposal = json.loads((folder / _CONFIG).read_text())["speculators_config"]
        self.levels = int(proposal["proposal_methods"][0]["speculative_tokens"])
        """Depth it was trained to draft to. Unit: tokens."""

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        save_longspec(
            folder,
            self.config,
            self.model.state_dict(),
            TargetRef.of(self.target),
            levels=self.levels,
            dtype=self._dtype,
            notes=notes,
        )


class TrainedBlock(Trained):
    """A DSpark drafter."""

    method = "dspark"
    model: DSparkModel

    def _read(self, folder: Path, device: str) -> None:
        self.config, self._dtype = read_dspark(folder)
        self.model = DSparkModel(self.config)
        self.model.load_state_dict(load_weights(folder, self.config, torch.float32))
        self.model.to(device)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        save_dspark(
            folder,
            self.config,
            self.model.state_dict(),
            TargetRef.of(self.target),
            dtype=self._dtype,
            notes=notes,
        )


class TrainedLm(Trained):
    """A small language model with the target's tokenizer."""

    method = "lm"

    def _read(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._dtype = getattr(torch, json.loads((folder / _CONFIG).read_text())["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written: Any = copy.deepcopy(self.model).to(self._dtype)
        written.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (self._folder / name).is_file() and folder != self._folder:
                shutil.copyfile(self._folder / name, folder / name)
        if notes:
            config = json.loads((folder / _CONFIG).read_text())
            config["paceline"] = {"method": self.method, "training": dict(notes)}
            (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def drafter(self, folder: Path, **options: str) -> Drafter:
        return method_class(self.method).load(folder, options, Resources())


def read_trained(
    folder: Path, target: Path, device: str, kinds: Sequence[type[Trained]]
) -> Trained:
    """The drafter in `folder`, as the one of `kinds` that has its method.

    Raises ValueError where there is none of the method, or it was not made for the target.
    """
    section = json.loads((folder / _CONFIG).read_text()).get("paceline", {})
    method = section.get("method", TrainedLm.method)
    for kind in kinds:
        if kind.method == method:
            try:
                return kind(folder, target, device)
            except LoadError as error:
                raise ValueError(str(error)) from error
    known = " or ".join(kind.method for kind in kinds)
    raise ValueError(f"{folder} is a drafter of method {method!r}, expected {known}")
