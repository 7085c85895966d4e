"""The LongSpec drafter: one layer over the target's own KV, in constant memory.

After Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification", section 3.1 and appendix D. Self-attention of a token covers the last ``window``
positions on its path, including its own. Cross-attention covers the committed positions before the
anchor, the same ones for every level: all of them, or the first and the newest within a KV budget
(:func:`paceline.kernels.streaming`). Training expresses this as lags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.device import device_of
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
from paceline.drafter.growth.sequence import GrownSequence, PassPart, required
from paceline.drafter.growth.target_data import TargetKv
from paceline.drafter.kv import KvOptions
from paceline.drafter.kv.reader import StreamingReader
from paceline.drafter.methods.base import GenerationInfo, Needs, Resources
from paceline.drafter.methods.layers import LayerWeights
from paceline.drafter.methods.longspec.config import LongSpecConfig
from paceline.drafter.methods.options import TreeOptions, check_context
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    TargetDrafter,
    TargetOptions,
    WindowCache,
    fill_cache,
)
from paceline.kernels import CHUNK, Context, Program
from paceline.kernels.draft import NativeDraft
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText

# Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt, all
# but the newest get keys and values alone.
MAX_FED_TOKENS = 16

GPU_TREE = {"widths": "4,16,16,16,16"}  # the paper's (LongSpec, appendix D)
# The fastest shape with the demo pair, see docs/drafter-design.md. For a target whose step takes
# more of a round's time a deeper tree is better, such as 4,8,8,8 with 16 nodes.
CPU_TREE = {"widths": "8,8", "max_nodes": "10"}

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

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft:
        return NativeDraft(programs[-1], self.dtype, ids)

    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        level = PassShape(0, 1, (self.config.window,), (None,))
        return text_and_levels(replace(level, rows=fed, blocks=2), level, shape)

    def draft_passes(self, batch: Sequence[LongSpecSequence], shape: TreeShape) -> HostDraft:
        parts = [sequence.part(index) for index, sequence in enumerate(batch)]
        lengths = [sequence.length for sequence in batch]
        starts = [sequence.length - sequence.cache.base for sequence in batch]
        return HostDraft(
            [text_pass(parts), *level_passes(starts, lengths, shape)],
            [sequence.cache for sequence in batch],
            [sequence.context for sequence in batch if sequence.context is not None],
        )

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            caches, contexts = passes.caches, passes.contexts
            trees.add_level(self.run(-1, tokens, plan, caches, rows, contexts=contexts).logits)


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


class LongSpecSequence(GrownSequence):
    """A generation that ``longspec`` drafts for.

    Its memory does not depend on the context: keys, values and tokens of a window. (Only the
    history of a generation with penalties grows, with its distinct tokens.) A round feeds the
    tokens since the last round, then its tree level by level.
    """

    def __init__(self, drafter: LongSpecDrafter, generation: GenerationInfo) -> None:
        layer = drafter.layers
        super().__init__(drafter, generation, layer.config.window)
        self._drafter = drafter
        self.kv = required(generation.kv, "longspec", "KV")
        in_place = isinstance(self.kv, StreamingReader) and device_of(layer.device).packs
        self._default_context = 0 if in_place else DEFAULT_CONTEXT
        self.cache = WindowCache(layer, drafter.options.drafted)
        self.context: Context | None = None  # the target's KV that a round reads

    @property
    def backlog(self) -> int:
        return max(0, self.length - 1 - self.cache.next_position(self.length))

    def warm(self, limit: int) -> None:
        cache = self.cache
        begin = cache.next_position(self.length)
        end = begin + min(limit, self.backlog)
        if begin < end:
            cache.reserve(end)
            part = self.text_part(0, begin, end, begin - cache.base)
            self._drafter.layers.write_kv(part, cache)
            cache.length = end

    def prepare(self) -> bool:
        self.kv.check()
        while self.backlog > MAX_FED_TOKENS:
            self.warm(CHUNK)
        self.cache.reserve(self.length)
        below = self.length - 1  # the verifier may have committed more than this text
        context = self._drafter.options.context
        self.kv.refresh(below, self._default_context if context is None else context)
        layer = self._drafter.layers
        target = TargetKv(self.kv, layer.config.target_layer, layer)
        self.context = Context(target, target.length)
        return True

    def part(self, index: int) -> PassPart:
        """Return the text to be fed; ``index`` is its cache's index in the pass."""
        begin = min(self.cache.next_position(self.length), self.length - 1)
        return self.text_part(index, begin, self.length, begin - self.cache.base)

    def fill(self, text: DraftText) -> None:
        assert self.context is not None
        target = self.context.cache
        fill_cache(text, self.cache, self.tokens[-1])
        text.length = self.length - 1
        text.first = min(self.cache.next_position(self.length), text.length)
        self._fed = torch.tensor(self.newest(text.first, self.length))
        text.tokens = self._fed.data_ptr()
        assert target.table is not None
        text.target, text.slots = target.table.address, self.context.length

    def keep(self) -> None:
        self.cache.length = self.length

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

    # KV budget: maximum number of target positions that a round reads, the first 4 and the newest;
    # 0: all. None: all where a mapped cache is read in place, as on a CPU, and 512 of a cache that
    # is copied. With a budget, a draft takes as long at 128k tokens as at 1k. Unit: tokens.
    context: int | None = None

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        KvOptions.__post_init__(self)
        self.check_drafted()
        check_context(self.context or 0)

    def needs(self, config: LongSpecConfig) -> Needs:
        budget = DEFAULT_CONTEXT if self.context is None else self.context
        return Needs((config.target_layer,), self, budget)


class LongSpecDrafter(TargetDrafter):
    method: ClassVar[str] = "longspec"
    label: ClassVar[str] = "LongSpec"
    recipe: ClassVar[str] = "paceline.train.recipes.longspec:LongSpecRecipe"
    cpu_tree: ClassVar[Mapping[str, str]] = CPU_TREE
    gpu_tree: ClassVar[Mapping[str, str]] = GPU_TREE
    cpu_weights: ClassVar[str] = "int8"
    option_type = LongSpecOptions
    shape_type = LongSpecConfig
    layer_type = LongSpecLayer
    sequence_type = LongSpecSequence
    layers: LongSpecLayer

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> TargetDrafter:
        if "widths" not in options:
            options = {**(cls.gpu_tree if resources.device.graphs else cls.cpu_tree), **options}
        return super().load(folder, options, resources)
