"""The method ``bigram``, in a module outside of the package: a table of logits after each token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.convert import ModelSource
from paceline.convert.weights import Checkpoint
from paceline.decoder import UnsupportedModelError
from paceline.drafter.growth.levels import (
    HostDraft,
    HostPass,
    LevelGrowth,
    LevelTrees,
    Passes,
    TreeShape,
)
from paceline.drafter.growth.sequence import GrownSequence, TreeGrowth, TreeSettings
from paceline.drafter.methods.base import (
    SECTION,
    Drafter,
    Fit,
    GenerationInfo,
    Resources,
    parse_options,
)
from paceline.drafter.methods.checkpoint import read_fit, required_folder
from paceline.drafter.methods.options import TreeOptions

TABLE = "table.weight"


@dataclass(frozen=True)
class BigramOptions(TreeOptions):
    """Options of ``bigram``."""

    widths: tuple[int, ...] = (3, 2, 2)


class BigramSequence(GrownSequence):
    """It reads nothing but the text."""

    def prepare(self) -> bool:
        return True


class Bigrams:
    """The model: a table."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def draft_passes(self, batch: Sequence[BigramSequence], shape: TreeShape) -> HostDraft:
        """One pass, whose rows are the newest tokens."""
        return HostDraft([HostPass(tokens=[sequence.tokens[-1] for sequence in batch])], [])

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        """Look up the newest token of each path."""
        trees.add_level(self.table[passes.tokens(0)])
        while trees.grows:
            trees.add_level(self.table[trees.tokens[:, trees.frontier].flatten()])


class BigramDrafter(Drafter):
    """A table, and trees that grow level by level."""

    method: ClassVar[str] = "bigram"
    label: ClassVar[str] = "bigram table"
    recipe: ClassVar[str] = "bigram_recipe:BigramRecipe"
    growth: TreeGrowth

    def __init__(self, table: Tensor, options: BigramOptions, fit: Fit) -> None:
        self.fit = fit
        self.vocab_size, self.max_position = len(table), 1 << 20
        self.settings = TreeSettings.of(self, options)
        self.max_nodes, self.max_depth = self.settings.max_nodes, self.settings.max_depth
        self.growth = TreeGrowth(LevelGrowth(Bigrams(table), self.settings))

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> BigramDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(BigramOptions, options)
        return cls(Checkpoint(folder, torch.float32)[TABLE], parsed, read_fit(folder))

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        if TABLE not in Checkpoint(folder, torch.float32):
            raise UnsupportedModelError(f"{folder} has no tensor {TABLE!r}")
        return {"vocabulary": f"{read_fit(folder).vocab_size} tokens"}

    def start(self, generation: GenerationInfo) -> BigramSequence:
        return BigramSequence(self, generation)


def write_bigram(
    folder: Path, vocab_size: int, table: Tensor | None = None, **section: str
) -> Path:
    """Writes a folder with a table, by default a random one."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"vocab_size": vocab_size, SECTION: {"method": "bigram", **section}}
    (folder / "config.json").write_text(json.dumps(described))
    if table is None:
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    save_file({TABLE: table}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
