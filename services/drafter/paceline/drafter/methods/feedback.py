"""Trees of drafters whose levels read states: of the target's text, then their own outputs.

A position's input is the token there and the hidden state of the position before it: of the text
the target's, of a drafted token the layer's own output at its parent. A round feeds the text since
the last round, then its tree level by level. `eagle3` and `mtp` draft like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.growth.levels import (
    HostDraft,
    LevelTrees,
    Passes,
    PassShape,
    TreeShape,
    level_passes,
    text_and_levels,
    text_pass,
)
from paceline.drafter.growth.sequence import PassPart
from paceline.drafter.growth.target_data import StateRows
from paceline.drafter.kv.reader import StateSlice
from paceline.drafter.methods.base import GenerationInfo
from paceline.drafter.methods.options import TreeOptions
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    StateOptions,
    StateSequence,
    TargetDrafter,
    TargetOptions,
    fill_cache,
)
from paceline.kernels.draft import NativeDraft, StateText
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText

# Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt, all
# but the newest get keys and values alone.
MAX_FED_TOKENS = 16


class FeedbackLayers(DraftLayers):
    """Layers of such a drafter. Program 0 writes keys and values, 1 reads a text, those from 2 on
    draft; tap 0 of all but the first are the outputs that the next level reads. Slot p of a cache
    is of the token at position p + 1, which is read with the state of position p."""

    def level_program(self, level: int) -> int:
        """Return the number of the program that reads a text (level 0), or the nodes of a
        level."""
        return min(level, 1) + 1

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        text = StateText(programs[1], self.config.states)
        return NativeDraft(programs[2], self.dtype, ids, text=text)

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        config = self.config
        level = PassShape(0, 1, (config.window or None,))
        text = replace(level, rows=fed, blocks=2, inputs=config.states, taps=len(config.taps))
        return text_and_levels(text, level, shape)

    def draft_passes(self, batch: Sequence[FeedbackSequence], shape: TreeShape) -> HostDraft:
        parts = [sequence.part(index) for index, sequence in enumerate(batch)]
        lengths = [sequence.length for sequence in batch]
        starts = [sequence.length - 1 - sequence.cache.base for sequence in batch]
        text = text_pass(parts, StateRows([sequence.fresh for sequence in batch], self.states))
        caches = [sequence.cache for sequence in batch]
        return HostDraft([text, *level_passes(starts, lengths, shape)], caches)

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        count, nodes = trees.tokens.shape
        outputs = torch.empty(0)  # at the anchors and the nodes, `[S, 1 + N, hidden]`
        inputs, first = passes.inputs(0), 0
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            if trees.level:
                parents = trees.parents[:, : trees.frontier.stop, None] + 1
                index = parents.expand(-1, -1, outputs.shape[2])
                inputs = outputs.gather(1, index).flatten(0, 1)
                first = trees.frontier.start + 1
            number = self.level_program(trees.level)
            result = self.run(number, tokens, plan, passes.caches, rows, taps=(0,), inputs=inputs)
            hidden = result.taps[0].unflatten(0, (count, -1))
            if not trees.level:
                outputs = hidden.new_zeros(count, 1 + nodes, hidden.shape[2])
            outputs[:, first : first + hidden.shape[1]] = hidden
            trees.add_level(result.logits)


class FeedbackSequence(StateSequence):
    """A generation that such a drafter drafts for."""

    def __init__(self, drafter: FeedbackDrafter, generation: GenerationInfo) -> None:
        super().__init__(drafter, generation, drafter.options.drafted)
        self._layers: FeedbackLayers = drafter.layers
        self._fresh: StateSlice | None = None

    def warm(self, limit: int) -> None:
        cache, readable = self.cache, self.readable
        begin = cache.next_position(readable)
        begin, states = self.states.read(begin, max(begin, min(readable, begin + limit)))
        if len(states):
            end = begin + len(states)
            cache.reserve(end)
            part = self.text_part(0, begin + 1, end + 1, begin - cache.base)
            self._layers.write_kv(part, cache, self._layers.states(states))
            cache.length = end
            self.states.settle()

    def prepare(self) -> bool:
        if not super().prepare():
            return False
        end = self.length - 1
        if self.backlog > MAX_FED_TOKENS:
            self.warm(self.backlog - 1)
        self.cache.reserve(end)
        self._fresh = self.states.slice(min(self.cache.next_position(end), end - 1), end)
        return self._fresh.count > 0

    @property
    def fresh(self) -> StateSlice:
        """States of the newest positions before the anchor, of the round."""
        assert self._fresh is not None
        return self._fresh

    def part(self, index: int) -> PassPart:
        """Return the text to be fed; ``index`` is its cache's index in the pass."""
        count, slot = self.fresh.count, self.length - 1 - self.cache.base
        return self.text_part(index, self.length - count, self.length, slot - count)

    def fill(self, text: DraftText) -> None:
        fill_cache(text, self.cache, self.tokens[-1])
        count = self.fresh.count
        text.length = self.length - 2  # the slot of the anchor
        text.first = text.length + 1 - count
        self._inputs = self._layers.states(self.fresh.read()).contiguous()
        self._fed = torch.tensor(self.newest(self.length - count, self.length))
        text.fresh, text.tokens = self._inputs.data_ptr(), self._fed.data_ptr()

    def keep(self) -> None:
        self.cache.length = self.length - 1

    def finish(self) -> None:
        self._fresh = None
        super().finish()

    def close(self) -> None:
        self._fresh = None


@dataclass(frozen=True)
class FeedbackOptions(TreeOptions, TargetOptions, StateOptions):
    """Options of such a drafter."""

    widths: tuple[int, ...] = (4, 8, 8, 8)
    max_nodes: int = 16
    formats: ClassVar[tuple[str, ...]] = FORMATS

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        self.check(self.widths)
        self.check_drafted()


class FeedbackDrafter(TargetDrafter):
    """A drafter whose levels read states."""

    cpu_tree: ClassVar[Mapping[str, str]] = {"widths": "3,3,3", "max_nodes": "5"}
    cpu_weights: ClassVar[str] = "int8"
    option_type = FeedbackOptions
    sequence_type = FeedbackSequence
