"""The LongSpec drafter: one layer over the target's own KV, in constant memory.

After Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", section 3.1 and appendix D. Self-attention of a token covers the last ``window``
positions on its path, including its own. Cross-attention covers the committed positions before the
anchor, the same ones for every level: all of them, or the first and the newest within a KV budget
(:func:`paceline.kernels.streaming`). Training expresses this as lags. Scores include the verifier's
noise, and trees grow as in :mod:`paceline.drafter.growth.beam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.convert import ModelSource
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
from paceline.drafter.growth.target_data import TargetKv
from paceline.drafter.growth.text import GrownText, PassPart, TextPasses, TreeSettings, required
from paceline.drafter.kv import KvOptions
from paceline.drafter.kv.reader import StreamingReader
from paceline.drafter.methods.base import Drafter, Fit, GenerationInfo, Needs, Resources
from paceline.drafter.methods.layers import LayerWeights
from paceline.drafter.methods.longspec.config import LongSpecConfig, read_longspec
from paceline.drafter.methods.longspec.module import LongSpecModel
from paceline.drafter.methods.options import TreeOptions, check_context
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    TargetOptions,
    TargetParts,
    WindowCache,
    fill_cache,
    target_growth,
)
from paceline.kernels import CHUNK, Context, Program, TreePlan
from paceline.kernels.draft import NativeDraft
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText

MAX_FED_TOKENS = 16
"""Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt,
all but the newest get keys and values alone."""

GPU_TREE = {"widths": "4,16,16,16,16"}  # the paper's (LongSpec, appendix D)
CPU_TREE = {"widths": "8,8", "max_nodes": "10"}
"""The fastest shape with the demo pair, see docs/drafter-design.md. For a target whose step takes
more of a round's time a deeper tree is better, such as 4,8,8,8 with 16 nodes."""

DEFAULT_CONTEXT = 512  # target positions that a round reads of a cache that it copies, in tokens


class LongSpecLayer(DraftLayers):
    """The layer.

    A tree's nodes follow the text's slots (LongSpec, appendix D). Keys and values of self-attention
    depend on token and position alone, because the layer begins with it. So a text is prefilled
    with one small product per token.
    """

    config: LongSpecConfig
    context_layers = 1

    def record(self, tensors: LayerWeights) -> list[Program]:
        return [_record(self, tensors, outputs=outputs) for outputs in (False, True)]


def _record(layer: LongSpecLayer, tensors: LayerWeights, *, outputs: bool) -> Program:
    """Tokens to logits; without ``outputs`` to keys and values alone."""
    config, embedding, base = layer.config, layer.embedding, "layers.0."
    program = tensors.recorder(layer.dtype)
    x = program.embed(embedding.embedding)
    inputs = program.add_norm(x, 0, tensors.norm(f"{base}input_layernorm"))
    qkv = tensors.matrix(*(f"{base}self_attn.{name}_proj" for name in "qkv"))
    q = program.rotate(program.multiply(inputs, qkv), None, 0)
    if not outputs:
        return program.finish()
    attended = program.attend(q, 0, config.window)
    delta = program.multiply(attended, tensors.matrix(f"{base}self_attn.o_proj"))
    inputs = program.add_norm(x, delta, tensors.norm(f"{base}cross_layernorm"))
    q = program.multiply(inputs, tensors.matrix(f"{base}cross_attn.q_proj"))
    attended = program.attend_context(program.rotate_queries(q), 0, None)
    delta = program.multiply(attended, tensors.matrix(f"{base}cross_attn.o_proj"))
    program.add(x, tensors.feed_forward(program, x, delta, base))
    x = program.select(x)
    program.multiply(program.add_norm(x, 0, tensors.norm("norm")), embedding.head)
    return program.finish()


class LongSpecPasses(TextPasses):
    """Passes of ``longspec`` for one generation.

    Its memory does not depend on the context: keys, values and tokens of a window. (Only the
    history of a generation with penalties grows, with its distinct tokens.) A round feeds the
    tokens since the last round, then its tree level by level.
    """

    def __init__(self, drafter: LongSpecDrafter, generation: GenerationInfo) -> None:
        layer = drafter.layers
        self._drafter = drafter
        self.text = GrownText(drafter.settings, generation, layer.config.window)
        self.kv = required(generation.kv, "longspec", "KV")
        in_place = isinstance(self.kv, StreamingReader) and layer.device.type == "cpu"
        self._default_context = 0 if in_place else DEFAULT_CONTEXT
        self.cache = WindowCache(layer, drafter.options.drafted)
        self.context: Context | None = None
        """The target's KV that the round reads; None outside of a round."""

    @property
    def backlog(self) -> int:
        return max(0, self.text.length - 1 - self.cache.next_position(self.text.length))

    def warm(self, limit: int) -> None:
        cache = self.cache
        begin = cache.next_position(self.text.length)
        end = begin + min(limit, self.backlog)
        if begin < end:
            cache.reserve(end)
            part = self.text.text_part(0, begin, end, begin - cache.base)
            self._drafter.layers.write_kv(part, cache)
            cache.length = end

    def prepare(self) -> bool:
        self.kv.check()
        while self.backlog > MAX_FED_TOKENS:
            self.warm(CHUNK)
        self.cache.reserve(self.text.length)
        below = self.text.length - 1  # the verifier may have committed more than this text
        context = self._drafter.options.context
        self.kv.refresh(below, self._default_context if context is None else context)
        layer = self._drafter.layers
        number = layer.config.target_layer
        target = TargetKv(self.kv, number, layer, deferred=self.text.on_device)
        self.context = Context(target, target.length)
        return True

    def part(self, index: int) -> PassPart:
        """Return what to feed for the next level; ``index`` is that of its cache in the pass."""
        if self.text.tree.level:
            return self.text.tree_part(index, self.text.length - self.cache.base)
        begin = min(self.cache.next_position(self.text.length), self.text.length - 1)
        return self.text.text_part(index, begin, self.text.length, begin - self.cache.base)

    def add_level(self, logits: Tensor) -> None:
        """Add a level to the tree from the logits of :meth:`part`, ``[frontier, V]``."""
        if not self.text.tree.level:
            self.cache.length = self.text.length
        self.text.grow(logits)

    def fill(self, text: DraftText) -> None:
        cache, target = self.cache, self.context
        fill_cache(text, cache, self.text.tokens[-1])
        text.length = self.text.length - 1
        text.first = min(cache.next_position(self.text.length), text.length)
        self._fed = torch.tensor(self.text.newest(text.first, self.text.length))
        text.tokens = self._fed.data_ptr()
        cache.length = self.text.length
        assert target is not None
        assert target.cache.table is not None
        text.target, text.slots = target.cache.table.address, target.length

    def finish(self) -> None:
        if self.context is not None:
            self.context = None
            self.kv.check()

    def close(self) -> None:
        self.context = None


@dataclass(frozen=True)
class LongSpecOptions(TreeOptions, TargetOptions, KvOptions):
    """Options of ``longspec``.

    By default ``widths`` is 8,8 on a CPU and 4,16,16,16,16 on other devices, and ``max_nodes`` is
    10 on a CPU if no widths are given.
    """

    formats: ClassVar[tuple[str, ...]] = FORMATS

    context: int | None = None
    """KV budget: most target positions that a round reads, the first 4 and the newest; 0: all.
    None: all where a mapped cache is read in place, as on a CPU, and 512 of a cache that is copied.
    With a budget, a draft takes as long at 128k tokens as at 1k. Unit: tokens."""

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        KvOptions.__post_init__(self)
        self.check_drafted()
        check_context(self.context or 0)

    def needs(self, config: LongSpecConfig) -> Needs:
        budget = DEFAULT_CONTEXT if self.context is None else self.context
        return Needs((config.target_layer,), self, budget)


class LongSpecDrafter(Drafter):
    """The method ``longspec``."""

    method: ClassVar[str] = "longspec"
    label: ClassVar[str] = "LongSpec"
    recipe: ClassVar[str] = "paceline.train.recipes.longspec:LongSpecRecipe"
    cpu_tree: ClassVar[Mapping[str, str]] = CPU_TREE
    gpu_tree: ClassVar[Mapping[str, str]] = GPU_TREE
    cpu_weights: ClassVar[str] = "int8"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    growth: TreeGrowth
    captured = True

    def __init__(
        self, layers: LongSpecLayer, options: LongSpecOptions, fit: Fit, size: int
    ) -> None:
        """Build a drafter of layers and options; ``size`` is the bytes of its own weights."""
        self.layers, self.options = layers, options
        self.shape, self.device = layers.config, layers.device
        self.fit, self.needs, self.weight_bytes = fit, options.needs(layers.config), size
        self.drafted_tokens = layers.embedding.tokens
        self.settings = TreeSettings.of(layers.config, options, layers.device, self.drafted_tokens)
        self.max_nodes, self.max_depth = self.settings.max_nodes, self.settings.max_depth
        self.growth = target_growth(self, self.settings)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LongSpecDrafter:
        if "widths" not in options:
            options = {**(cls.cpu_tree if resources.device == "cpu" else cls.gpu_tree), **options}
        return PARTS.load(cls, folder, options, resources)

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        return PARTS.inspect(folder, target)

    def start(self, generation: GenerationInfo) -> GrownSequence[LongSpecPasses]:
        return GrownSequence(self.growth, LongSpecPasses(self, generation))

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft:
        return NativeDraft(programs[-1], self.layers.dtype, ids)

    def grow_level(self, growing: Sequence[LongSpecPasses]) -> None:
        caches = [each.cache for each in growing]
        contexts = [each.context for each in growing if each.context is not None]

        def run(tokens: Tensor, plan: TreePlan, rows: Tensor) -> Tensor:
            return self.layers.run(-1, tokens, plan, caches, rows, contexts=contexts).logits

        parts = [each.part(index) for index, each in enumerate(growing)]
        logits = forward_parts(run, parts, self.layers.device)
        for each, its in zip(growing, logits, strict=True):
            each.add_level(its)

    @property
    def gathered_slots(self) -> int:
        return DEFAULT_CONTEXT if self.options.context is None else self.options.context

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        level = PassShape(0, 1, (self.layers.config.window,), (None,))
        return text_and_levels(replace(level, rows=fed, blocks=2), level, shape)

    def draft_passes(self, growing: Sequence[LongSpecPasses], shape: TreeShape) -> HostDraft:
        parts = [each.part(index) for index, each in enumerate(growing)]
        lengths = [each.text.length for each in growing]
        starts = [each.text.length - each.cache.base for each in growing]
        return HostDraft(
            [text_pass(parts), *level_passes(starts, lengths, shape)],
            [each.cache for each in growing],
            [each.context for each in growing if each.context is not None],
        )

    def drafted(self, growing: Sequence[LongSpecPasses]) -> None:
        for each in growing:
            each.cache.length = each.text.length

    def grow_on_device(self, passes: Passes, trees: DeviceTrees) -> None:
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            caches, contexts = passes.caches, passes.contexts
            result = self.layers.run(-1, tokens, plan, caches, rows, contexts=contexts)
            trees.add_level(result.logits)


def _read_config(folder: Path, target: ModelSource | None) -> tuple[LongSpecConfig, torch.dtype]:
    return read_longspec(folder)


PARTS = TargetParts("longspec", LongSpecOptions, LongSpecLayer, LongSpecModel, _read_config)
