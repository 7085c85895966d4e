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

from paceline.drafter.growth.device import (
    DeviceTrees,
    HostDraft,
    Passes,
    TreeShape,
    level_passes,
    text_pass,
)
from paceline.drafter.growth.graphs import PassShape, text_and_levels
from paceline.drafter.growth.host import forward_parts
from paceline.drafter.growth.sequence import GrownSequence, TreeGrowth
from paceline.drafter.growth.target_data import StateRows
from paceline.drafter.growth.text import GrownText, PassPart, TextPasses, TreeSettings
from paceline.drafter.kv.reader import StateSlice
from paceline.drafter.methods.base import Drafter, Fit, GenerationInfo
from paceline.drafter.methods.options import TreeOptions
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    StateOptions,
    TargetOptions,
    TextStates,
    fill_cache,
    target_growth,
)
from paceline.kernels import TreePlan, send
from paceline.kernels.draft import NativeDraft, StateText
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText

NO_OUTPUTS = torch.empty(0, 0)

MAX_FED_TOKENS = 16
"""Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt, all
but the newest get keys and values alone."""


class FeedbackLayers(DraftLayers):
    """Layers of such a drafter. Program 0 writes keys and values, 1 reads a text, those from 2 on
    draft; tap 0 of all but the first are the outputs that the next level reads. Slot p of a cache
    is of the token at position p + 1, which is read with the state of position p."""

    def level_program(self, level: int) -> int:
        """Return the number of the program that reads a text (level 0), or the nodes of a
        level."""
        return min(level, 1) + 1


class FeedbackPasses(TextPasses):
    """Passes of such a drafter for one generation."""

    def __init__(self, drafter: FeedbackDrafter, generation: GenerationInfo) -> None:
        drafted = drafter.options.drafted
        self._drafter = drafter
        self.text = GrownText(drafter.settings, generation)
        self.states = TextStates(drafter.layers, drafter.method, self.text, generation, drafted)
        self.cache = self.states.cache
        self._fresh: StateSlice | None = None
        """States of the newest positions before the anchor, of the round; None outside of one."""
        self._outputs = NO_OUTPUTS
        """Outputs at the anchor and at the nodes of the tree that were fed."""

    @property
    def backlog(self) -> int:
        return self.states.backlog

    def warm(self, limit: int) -> None:
        cache, readable = self.cache, self.states.readable
        begin = cache.next_position(readable)
        begin, states = self.states.reader.read(begin, max(begin, min(readable, begin + limit)))
        if len(states):
            end, layers = begin + len(states), self._drafter.layers
            cache.reserve(end)
            part = self.text.text_part(0, begin + 1, end + 1, begin - cache.base)
            layers.write_kv(part, cache, layers.states(states))
            cache.length = end
            self.states.reader.settle()

    def prepare(self) -> bool:
        if not self.states.prepare():
            return False
        end = self.text.length - 1
        if self.backlog > MAX_FED_TOKENS:
            self.warm(self.backlog - 1)
        self.cache.reserve(end)
        self._fresh = self.states.reader.slice(min(self.cache.next_position(end), end - 1), end)
        return self._fresh.count > 0

    @property
    def fresh(self) -> StateSlice:
        """States of the newest positions before the anchor, of the round."""
        assert self._fresh is not None
        return self._fresh

    def part(self, index: int) -> PassPart:
        """Return what to feed for the next level; ``index`` is that of its cache in the pass."""
        end = self.text.length - 1 - self.cache.base
        if self.text.tree.level:
            return self.text.tree_part(index, end)
        count = self.fresh.count
        return self.text.text_part(index, self.text.length - count, self.text.length, end - count)

    def inputs(self) -> Tensor:
        """Return the hidden states that :meth:`part` reads."""
        beam = self.text.tree
        if not beam.level:
            return self._drafter.layers.states(self.fresh.read())
        parents = torch.tensor(beam.parents[beam.trunk : beam.frontier.stop])
        return self._outputs[send(parents + 1, self._outputs.device)]

    def add_level(self, logits: Tensor, outputs: Tensor) -> None:
        """Add a level to the tree from the logits of :meth:`part`, ``[frontier, V]``, and the
        outputs of the same rows."""
        beam = self.text.tree
        if not beam.level:
            self.cache.length = self.text.length - 1
            self._outputs = outputs.new_zeros(1 + self._drafter.options.drafted, outputs.shape[1])
        self._outputs[beam.frontier.start + 1 : beam.frontier.stop + 1] = outputs
        self.text.grow(logits)

    def fill(self, text: DraftText) -> None:
        fill_cache(text, self.cache, self.text.tokens[-1])
        count = self.fresh.count
        text.length = self.text.length - 2  # the slot of the anchor
        text.first = text.length + 1 - count
        self._inputs = self._drafter.layers.states(self.fresh.read()).contiguous()
        self._fed = torch.tensor(self.text.newest(self.text.length - count, self.text.length))
        text.fresh, text.tokens = self._inputs.data_ptr(), self._fed.data_ptr()
        self.cache.length = self.text.length - 1

    def finish(self) -> None:
        self._clear()
        self.states.reader.check()

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._fresh, self._outputs = None, NO_OUTPUTS


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


class FeedbackDrafter(Drafter):
    """A drafter whose levels read states."""

    cpu_tree: ClassVar[Mapping[str, str]] = {"widths": "3,3,3", "max_nodes": "5"}
    cpu_weights: ClassVar[str] = "int8"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    growth: TreeGrowth
    captured = True
    gathered_slots = 0

    def __init__(
        self, layers: FeedbackLayers, options: FeedbackOptions, fit: Fit, size: int
    ) -> None:
        """Build a drafter of layers and options; ``size`` is the bytes of its own weights."""
        self.layers, self.options = layers, options
        self.shape, self.device = layers.config, layers.device
        self.fit, self.needs, self.weight_bytes = fit, options.needs(layers.config), size
        self.drafted_tokens = layers.embedding.tokens
        self.settings = TreeSettings.of(layers.config, options, layers.device, self.drafted_tokens)
        self.max_nodes, self.max_depth = self.settings.max_nodes, self.settings.max_depth
        self.growth = target_growth(self, self.settings)

    def start(self, generation: GenerationInfo) -> GrownSequence[FeedbackPasses]:
        return GrownSequence(self.growth, FeedbackPasses(self, generation))

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        text = StateText(programs[1], self.layers.config.states)
        return NativeDraft(programs[2], self.layers.dtype, ids, text=text)

    def grow_level(self, growing: Sequence[FeedbackPasses]) -> None:
        caches = [each.cache for each in growing]
        inputs = torch.cat([each.inputs() for each in growing])
        number = self.layers.level_program(growing[0].text.tree.level)  # all have as many levels
        outputs: list[Tensor] = []

        def run(tokens: Tensor, plan: TreePlan, rows: Tensor) -> Tensor:
            result = self.layers.run(number, tokens, plan, caches, rows, taps=(0,), inputs=inputs)
            outputs.append(result.taps[0])
            return result.logits

        parts = [each.part(index) for index, each in enumerate(growing)]
        logits = forward_parts(run, parts, self.layers.device)
        states = outputs[0].split([part.logit_rows for part in parts])
        for passes, each, state in zip(growing, logits, states, strict=True):
            passes.add_level(each, state)

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        config = self.layers.config
        level = PassShape(0, 1, (config.window or None,))
        text = replace(level, rows=fed, blocks=2, inputs=config.states, taps=len(config.taps))
        return text_and_levels(text, level, shape)

    def draft_passes(self, growing: Sequence[FeedbackPasses], shape: TreeShape) -> HostDraft:
        parts = [each.part(index) for index, each in enumerate(growing)]
        lengths = [each.text.length for each in growing]
        starts = [each.text.length - 1 - each.cache.base for each in growing]
        fresh = [each.fresh for each in growing]
        text = text_pass(parts, StateRows(fresh, self.layers.states))
        caches = [each.cache for each in growing]
        return HostDraft([text, *level_passes(starts, lengths, shape)], caches)

    def drafted(self, growing: Sequence[FeedbackPasses]) -> None:
        for each in growing:
            each.cache.length = each.text.length - 1

    def grow_on_device(self, passes: Passes, trees: DeviceTrees) -> None:
        outputs: list[Tensor] = []  # at the anchors, then at the nodes
        inputs = passes.inputs(0)
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            if outputs:
                parents = trees.parents[:, : trees.newest.stop, None] + 1
                own = torch.cat(outputs, 1)
                inputs = own.gather(1, parents.expand(-1, -1, own.shape[2])).flatten(0, 1)
            number = self.layers.level_program(trees.level)
            result = self.layers.run(
                number, tokens, plan, passes.caches, rows, taps=(0,), inputs=inputs
            )
            outputs.append(result.taps[0].unflatten(0, (len(trees.tokens), -1)))
            trees.add_level(result.logits)
