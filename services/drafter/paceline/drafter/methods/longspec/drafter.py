"""The LongSpec drafter: one layer over the target's own KV, in constant memory.

After Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", section 3.1 and appendix D. Self-attention of a token covers the last ``window``
positions on its path, including its own. Cross-attention covers the committed positions before the
anchor, the same ones for every level: all of them, or the first and the newest within a KV budget
(:func:`paceline.kernels.streaming`). Training expresses this as lags
(:func:`paceline.drafter.methods.longspec.lag_mask`). Scores include the verifier's noise, and trees
grow as in :mod:`paceline.drafter.methods.beam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from paceline.decoder.weights import Checkpoint
from paceline.drafter.kv.options import KvOptions
from paceline.drafter.methods.base import Fit, Generation, LoadError, Needs, Resources
from paceline.drafter.methods.beam import check_context
from paceline.drafter.methods.beam_drafter import BeamDrafter, required
from paceline.drafter.methods.checkpoint import load_model, read_fit, required_folder, weight_bytes
from paceline.drafter.methods.longspec.checkpoint import read_longspec
from paceline.drafter.methods.longspec.layer import LongSpecLayer
from paceline.drafter.methods.longspec.sequence import LongSpecSequence
from paceline.drafter.methods.options import parse_options
from paceline.drafter.methods.target import TargetEmbedding, TargetOptions

GPU_WIDTHS = (4, 16, 16, 16, 16)
"""The paper's (LongSpec, appendix D)."""

CPU_WIDTHS, CPU_NODES = (8, 8), 10
"""Most tokens per second with the demo pair, see docs/longspec.md. For a target whose step takes
more of a round's time a deeper tree is better, such as 4,8,8,8 with 16 nodes."""


@dataclass(frozen=True)
class LongSpecOptions(TargetOptions, KvOptions):
    """Options of ``longspec``.

    By default ``widths`` is 8,8 on a CPU and 4,16,16,16,16 on other devices, and ``max_nodes`` is
    10 on a CPU if no widths are given.
    """

    context: int = 512
    """KV budget: most target positions that a round reads, the first 4 and the newest; 0: all.
    With a budget, a draft takes as long at 128k tokens as at 1k. Unit: tokens."""

    def for_device(self, device: str) -> LongSpecOptions:
        """Returns the options with the defaults of a device, by its torch name.

        Raises:
            ValueError: The default widths at this depth draft too many nodes.
        """
        if self.widths:
            return self
        cpu = device.startswith("cpu")
        filled = replace(self, widths=CPU_WIDTHS if cpu else GPU_WIDTHS)
        return replace(filled, max_nodes=self.max_nodes or (CPU_NODES if cpu else 0))

    def __post_init__(self) -> None:
        TargetOptions.__post_init__(self)
        KvOptions.__post_init__(self)
        self.check_drafted()
        check_context(self.context)


class LongSpecDrafter(BeamDrafter[LongSpecSequence]):
    """The method ``longspec``."""

    method: ClassVar[str] = "longspec"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    options: LongSpecOptions

    def __init__(self, layer: LongSpecLayer, options: LongSpecOptions, fit: Fit, size: int) -> None:
        """Builds a drafter; ``options`` must be those :meth:`~LongSpecOptions.for_device`."""
        super().__init__(layer.config, options, fit, size)
        self.layer = layer
        self.needs = Needs((layer.config.target_layer,), options, options.context)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LongSpecDrafter:
        folder = required_folder(cls.method, folder)
        try:
            parsed = parse_options(LongSpecOptions, options).for_device(resources.device)
        except ValueError as error:
            raise LoadError("INVALID_OPTION", str(error)) from error
        fit = read_fit(folder)
        layer, shared = load_model(folder, resources, _read, folder, fit, parsed, resources.device)
        return cls(layer, parsed, fit, weight_bytes(folder) + shared.private_bytes)

    def start(self, generation: Generation) -> LongSpecSequence:
        return LongSpecSequence(self, generation, required(generation.kv, "longspec", "KV"))

    def grow_level(self, growing: Sequence[LongSpecSequence]) -> None:
        batch = [sequence.step() for sequence in growing]
        logits = self.layer.forward(batch).split([len(step.mask) for step in batch])
        for sequence, part in zip(growing, logits, strict=True):
            sequence.add_level(part)


def _read(
    folder: Path, fit: Fit, options: LongSpecOptions, device: str
) -> tuple[LongSpecLayer, TargetEmbedding]:
    config, dtype = read_longspec(folder)
    dtype = options.torch_dtype(dtype)
    embedding = options.read_embedding(folder, fit, config, dtype, device)
    weights = Checkpoint(folder, dtype, device)
    with torch.inference_mode():
        return LongSpecLayer(config, weights, embedding, dtype, device), embedding
