"""Drafters in training: weights, and the folders that they are read from and written to."""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from paceline.decoder import store_int8
from paceline.decoder.weights import Checkpoint
from paceline.drafter import Drafter, Resources
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import LoadError
from paceline.drafter.methods.checkpoint import check_target, read_fit
from paceline.drafter.methods.dspark import (
    DSparkConfig,
    DSparkModel,
    load_weights,
    read_dspark,
    save_dspark,
)
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    read_longspec,
    save_longspec,
)
from paceline.train.model import load_model

_CONFIG = "config.json"


@dataclass
class DrafterModel(ABC):
    """The weights of a drafter, and how its folder is read and written.

    Attributes:
        method: Drafting method of the folder.
        target: Model folder of its target.
        model: Its weights, fp32.
    """

    method: ClassVar[str]
    target: Path
    model: nn.Module

    @classmethod
    @abstractmethod
    def read(cls, folder: Path, target: Path, device: str) -> Self:
        """Load the drafter in `folder`, made for the model in `target`, onto `device`."""

    @abstractmethod
    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        """Write a drafter folder, with weights in 8-bit blocks.

        `notes` go into its config.json as `training`.
        """

    @property
    def hidden_state_layers(self) -> Sequence[int]:
        """Target layers whose outputs the drafter reads."""
        return ()

    def load_drafter(self, folder: Path, options: Mapping[str, str]) -> Drafter:
        """Load a folder written by `save` as a drafter, with options of its method."""
        given = {"target": str(self.target), **options}
        return method_class(self.method).load(folder, given, Resources())

    @cached_property
    def _reference(self) -> TargetRef:
        return TargetRef.of(self.target)


@dataclass
class LongSpecDrafter(DrafterModel):
    """A LongSpec layer; `levels` is the depth it drafts to, in tokens."""

    method = "longspec"
    model: LongSpecModel
    levels: int

    @property
    def config(self) -> LongSpecConfig:
        """Shape of the layer."""
        return self.model.config

    @classmethod
    def read(cls, folder: Path, target: Path, device: str) -> Self:
        config, _ = read_longspec(folder)
        model = LongSpecModel(config)
        model.load_state_dict(dict(Checkpoint(folder, torch.float32)))
        proposal = json.loads((folder / _CONFIG).read_text())["speculators_config"]
        levels = int(proposal["proposal_methods"][0]["speculative_tokens"])
        return cls(target, model.to(device), levels)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        weights, levels = self.model.state_dict(), self.levels
        save_longspec(folder, self.config, weights, self._reference, levels=levels, notes=notes)
        store_int8(folder)


@dataclass
class DSparkDrafter(DrafterModel):
    """A DSpark drafter."""

    method = "dspark"
    model: DSparkModel

    @property
    def config(self) -> DSparkConfig:
        """Shape of the drafter."""
        return self.model.config

    @property
    def hidden_state_layers(self) -> Sequence[int]:
        return self.config.taps

    @classmethod
    def read(cls, folder: Path, target: Path, device: str) -> Self:
        config, _ = read_dspark(folder)
        model = DSparkModel(config)
        model.load_state_dict(load_weights(folder, config, torch.float32))
        return cls(target, model.to(device))

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        weights = self.model.state_dict()
        save_dspark(folder, self.config, weights, self._reference, notes=notes)
        store_int8(folder)


@dataclass
class LmDrafter(DrafterModel):
    """A small language model with the target's tokenizer, read from `folder`."""

    method = "lm"
    folder: Path

    @classmethod
    def read(cls, folder: Path, target: Path, device: str) -> Self:
        return cls(target, load_model(folder, torch.float32).to(device), folder)

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written: Any = copy.deepcopy(self.model).to(torch.bfloat16)
        written.save_pretrained(folder)
        store_int8(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (self.folder / name).is_file() and folder != self.folder:
                shutil.copyfile(self.folder / name, folder / name)
        if notes:
            config = json.loads((folder / _CONFIG).read_text())
            config["paceline"] = {"method": self.method, "training": dict(notes)}
            (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def load_drafter(self, folder: Path, options: Mapping[str, str]) -> Drafter:
        return method_class(self.method).load(folder, options, Resources())


def read_drafter(
    folder: Path, target: Path, device: str, kinds: Sequence[type[DrafterModel]]
) -> DrafterModel:
    """Read the drafter in `folder` as the one of `kinds` that has its method.

    Raises ValueError if none of `kinds` has its method, or if it was made for another target.
    """
    section = json.loads((folder / _CONFIG).read_text()).get("paceline", {})
    method = section.get("method", LmDrafter.method)
    kind = next((kind for kind in kinds if kind.method == method), None)
    if kind is None:
        known = " or ".join(kind.method for kind in kinds)
        raise ValueError(f"{folder} is a drafter of method {method!r}, expected {known}")
    try:
        check_target(folder, target, read_fit(folder))
        return kind.read(folder, target, device)
    except LoadError as error:
        raise ValueError(str(error)) from error
