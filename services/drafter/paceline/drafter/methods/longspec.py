"""The LongSpec drafter: one layer over the target's own KV, in constant memory.

After Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", section 3.1 and appendix D. A token of the text or of a tree sees, in its own keys,
the last ``window`` positions up to itself along its path; at the target, the committed positions
before the anchor, the same for every level: all of them, or so many of the first and the newest
that a round's cost is bounded (:func:`paceline.kernels.streaming`). Training has that as lags
(:func:`paceline.longspec.lag_mask`). Scores carry the verifier's noise, and trees grow as
in :mod:`paceline.drafter.methods.beam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch

from paceline.decoder.weights import Checkpoint
from paceline.drafter.checkpoint import check_target, read_fit
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Fit,
    Generation,
    LoadError,
    Needs,
    Resources,
)
from paceline.drafter.methods.growth import grow
from paceline.drafter.methods.loading import on_passing_thread
from paceline.drafter.methods.longspec_frozen import Frozen
from paceline.drafter.methods.longspec_layer import LongSpecLayer
from paceline.drafter.methods.longspec_options import LongSpecOptions
from paceline.drafter.methods.longspec_sequence import LongSpecSequence
from paceline.drafter.methods.options import parse_options
from paceline.drafter.tree import Tree
from paceline.longspec import read_longspec


class LongSpecDrafter(Drafter):
    """The method ``longspec``. All but :meth:`start` runs on one thread at a time."""

    method: ClassVar[str] = "longspec"

    def __init__(
        self, layer: LongSpecLayer, options: LongSpecOptions, fit: Fit, weight_bytes: int
    ) -> None:
        """Put together; ``options`` must be those for the layer's device."""
        self.layer = layer
        self.options = options
        self.fit = fit
        self.needs = Needs((layer.config.target_layer,), options, options.context)
        self.max_nodes = min(options.max_nodes, options.drafted)
        self.max_depth = options.levels
        self.weight_bytes = weight_bytes

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LongSpecDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "longspec needs its folder: longspec:DIR,target=DIR")
        try:
            parsed = parse_options(LongSpecOptions, options).for_device(resources.device)
        except ValueError as error:  # a depth that is too much for the widths of the device
            raise LoadError("INVALID_OPTION", str(error)) from error
        fit = read_fit(folder)
        target = Path(parsed.target) if parsed.target else None
        try:
            layer, frozen = on_passing_thread(
                resources, _read, folder, target, fit, parsed, resources
            )
        except LoadError:
            raise
        except Exception as error:  # damaged files make the libraries raise anything
            raise LoadError("UNSUPPORTED_MODEL", f"cannot load {folder}: {error}") from error
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return cls(layer, parsed, fit, weight_bytes + frozen.private_bytes)

    def start(self, generation: Generation) -> LongSpecSequence:
        """See :meth:`Drafter.start`.

        Raises:
            ValueError: The generation comes without the target's KV.
        """
        if generation.kv is None:
            raise ValueError(
                f"longspec reads K and V of target layer {self.layer.config.target_layer}, but the "
                "generation has no kv; attach with read_grant and verifier_address"
            )
        return LongSpecSequence(self, generation, generation.kv)

    def draft_many(self, rounds: Sequence[tuple[DraftSequence, Budget]]) -> list[Tree]:
        own = cast(Sequence[tuple[LongSpecSequence, Budget]], rounds)
        trees = grow(own, self._grow_level)
        for sequence, _ in own:
            sequence.end()
        return trees

    def _grow_level(self, growing: Sequence[LongSpecSequence]) -> None:
        feeds = [sequence.feed() for sequence in growing]
        logits = self.layer.forward(feeds).split([len(feed.mask) for feed in feeds])
        for sequence, part in zip(growing, logits, strict=True):
            sequence.add_level(part)


def _read(
    folder: Path, target: Path | None, fit: Fit, options: LongSpecOptions, resources: Resources
) -> tuple[LongSpecLayer, Frozen]:
    config, dtype = read_longspec(folder)
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    if target is not None:
        check_target(folder, target, fit)
    pack_bytes = int(options.pack_head_mib * (1 << 20))
    frozen = Frozen.read(folder, target, config, dtype, resources.device, pack_bytes)
    weights = Checkpoint(folder, dtype, resources.device)
    with torch.inference_mode():
        return LongSpecLayer(config, weights, frozen, dtype, resources.device), frozen
