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

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.decoder.weights import Checkpoint
from paceline.drafter.kv.options import KvOptions
from paceline.drafter.kv.reader import KvReader
from paceline.drafter.methods.base import Fit, Generation, LoadError, Needs, Resources, Update
from paceline.drafter.methods.beam import check_context
from paceline.drafter.methods.beam_drafter import BeamDrafter, BeamSequence, required
from paceline.drafter.methods.checkpoint import load_model, read_fit, required_folder, weight_bytes
from paceline.drafter.methods.longspec.checkpoint import read_longspec
from paceline.drafter.methods.longspec.layer import Context, LongSpecLayer, StepInput, ring_mask
from paceline.drafter.methods.options import parse_options
from paceline.drafter.methods.target import TargetEmbedding, TargetOptions


class LongSpecSequence(BeamSequence):
    """One generation of ``longspec``.

    Its memory does not depend on the context: a ring of keys and values and as many tokens. (Only
    the history of a generation with penalties grows, with its distinct tokens.) A round feeds the
    tokens since the last round, then its tree level by level.
    """

    _drafter: LongSpecDrafter

    def __init__(self, drafter: LongSpecDrafter, generation: Generation, kv: KvReader) -> None:
        super().__init__(drafter, generation)
        self.kv = kv
        self.ring = drafter.layer.new_ring(drafter.options.drafted)
        self._tail = deque(generation.tokens, maxlen=self.ring.window)
        self._context: Context | None = None

    @property
    def backlog(self) -> int:
        return max(0, self.length - 1 - self.ring.next_position(self.length))

    def extend(self, update: Update) -> None:
        self._tail.extend(update.tokens)
        super().extend(update)

    def warm(self, limit: int) -> None:
        begin = self.ring.next_position(self.length)
        end = begin + min(limit, self.backlog)
        if begin < end:
            self._drafter.layer.write_kv(self._text_input(begin, end, torch.empty(0, 0), None))
            self.ring.length = end

    def prepare(self) -> bool:
        self.kv.check()
        below = self.length - 1  # the verifier may have committed more than this text
        layer = self._drafter.layer
        self.kv.refresh(below, self._drafter.options.context)
        parts = self.kv.parts(layer.config.target_layer)
        self._context = Context.of(parts, layer.device)
        return True

    def step(self) -> StepInput:
        """Returns what to feed for the next level."""
        beam, ring = self.tree, self.ring
        if beam.level == 0:
            begin = min(ring.next_position(self.length), self.length - 1)
            mask = ring_mask(ring.window, self.length - 1, self.length, [()])
            return self._text_input(begin, self.length, mask, self._context)
        position = self.length - 1 + beam.level
        nodes = beam.frontier
        return StepInput(
            tokens=beam.tokens[nodes.start : nodes.stop],
            positions=[position] * len(nodes),
            slots=[(ring.window + nodes.start, len(nodes))],  # after those of the text
            ring=ring,
            mask=ring_mask(ring.window, position, self.length, [beam.path(n) for n in nodes]),
            context=self._context,
        )

    def add_level(self, logits: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`step`, ``[frontier, V]``."""
        if self.tree.level == 0:
            self.ring.length = self.length
        self.tree.add_level(self.rank(logits))

    def finish(self) -> None:
        if self._context is not None:
            self._context = None
            self.kv.check()

    def close(self) -> None:
        super().close()
        self._context = None

    def _text_input(self, begin: int, end: int, mask: Tensor, context: Context | None) -> StepInput:
        first = begin - (self.length - len(self._tail))
        return StepInput(
            tokens=list(islice(self._tail, first, first + end - begin)),
            positions=range(begin, end),
            slots=self.ring.slots(begin, end),
            ring=self.ring,
            mask=mask,
            context=context,
        )


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
