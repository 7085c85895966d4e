"""The EAGLE-3 drafter: a tree by one layer that reads its own hidden states level by level.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3. A position's input is the token there and the hidden state of the
position before it: of the text the target's, outputs of a low, a middle and a high layer fused; of
a drafted token the layer's own output at its parent. A round feeds the text since the last round,
then its tree level by level. Scores include the verifier's noise, and trees grow as in
:mod:`paceline.drafter.growth.beam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.decoder import ModelSource, load_config
from paceline.decoder.weights import Linear
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
from paceline.drafter.methods.base import SECTION, Drafter, Fit, GenerationInfo, Resources
from paceline.drafter.methods.eagle3.config import Eagle3Config, is_eagle3, read_eagle3
from paceline.drafter.methods.eagle3.module import Eagle3Model
from paceline.drafter.methods.layers import LayerWeights, linear
from paceline.drafter.methods.options import TreeOptions
from paceline.drafter.methods.target_drafter import (
    FORMATS,
    DraftLayers,
    StateOptions,
    TargetOptions,
    TargetParts,
    TextStates,
    fill_cache,
    target_growth,
)
from paceline.kernels import Program, TreePlan, send
from paceline.kernels.draft import NativeDraft, StateText
from paceline.kernels.executor import NativeProgram
from paceline.kernels.structures import DraftText

NO_OUTPUTS = torch.empty(0, 0)

MAX_FED_TOKENS = 16
"""Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt, all
but the newest get keys and values alone."""


class Eagle3Layer(DraftLayers):
    """The layer. Slot p of a cache is of the token at position p + 1, which is read with the state
    of position p."""

    config: Eagle3Config

    def record(self, tensors: LayerWeights) -> list[Program]:
        """Returns what writes keys and values, what reads a text, and what drafts.

        The second reads :meth:`states`, the last reads outputs of the layer at the positions
        before; tap 0 of both are these outputs.
        """
        self._norms = _state_norms(self.config, tensors.tensors)
        qkv = [tensors.tensors[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
        halves = torch.cat(qkv).chunk(2, dim=1)
        products = [linear([half.contiguous()], self.bits) for half in halves]
        record = partial(_record, self, tensors, products)
        return [record(fused=True, outputs=False), record(fused=True), record(fused=False)]

    def states(self, states: Tensor) -> Tensor:
        """The target's states ``[n, states]`` as inputs: normalised where the layer does that."""
        if self._norms is None:
            return super().states(states)
        wide = send(states, self.device).float().unflatten(1, (len(self._norms), -1))
        scale = (wide.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        normed: Tensor = wide * scale * self._norms
        return normed.flatten(1).to(self.dtype)


def _state_norms(config: Eagle3Config, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Weights of the norms of the target's states, float32 ``[norms, width]``."""
    names = [f"fc_norm.{index}.weight" for index in range(len(config.taps) * config.fc_norm)]
    names += ["input_norm.weight"] * config.norm_before_fc
    return torch.stack([weights[name].float() for name in names]) if names else None


def _record(
    layer: Eagle3Layer,
    tensors: LayerWeights,
    qkv: Sequence[Linear],
    *,
    fused: bool,
    outputs: bool = True,
) -> Program:
    """Tokens and hidden states to logits.

    ``qkv`` are the products of both halves of the layer's input, embedding and hidden state. The
    hidden states are the target's if ``fused``, else own outputs. Without ``outputs``, the program
    ends with keys and values.
    """
    config, embedding, base = layer.config, layer.embedding, "layers.0."
    program = tensors.recorder(layer.dtype)
    embedded = program.embed(embedding.embedding)
    x = program.input(config.states if fused else config.hidden)
    if fused:
        x = program.multiply(x, tensors.matrix("fc"))
    inputs = program.add_norm(embedded, 0, tensors.norm(f"{base}input_layernorm"))
    hidden = program.add_norm(x, 0, tensors.norm(f"{base}hidden_norm"))
    heads = program.multiply(hidden, qkv[1])
    program.add(heads, program.multiply(inputs, qkv[0]))
    q = program.rotate(heads, tensors.head_norms(base) if config.qk_norm else None, 0)
    if not outputs:
        return program.finish()
    x = program.keep_all(hidden if config.norm_before_residual else x)
    attended = program.attend(q, 0, config.window or None)
    delta = program.multiply(attended, tensors.matrix(f"{base}self_attn.o_proj"))
    program.add(x, tensors.feed_forward(program, x, delta, base))
    x = program.select(x)
    final = program.add_norm(x, 0, tensors.norm("norm"))
    program.tap(final if config.norm_output else x, 0)
    program.multiply(final, embedding.head)
    return program.finish()


class Eagle3Passes(TextPasses):
    """Passes of ``eagle3`` for one generation."""

    def __init__(self, drafter: Eagle3Drafter, generation: GenerationInfo) -> None:
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
        """Returns what to feed for the next level; ``index`` is that of its cache in the pass."""
        end = self.text.length - 1 - self.cache.base
        if self.text.tree.level:
            return self.text.tree_part(index, end)
        count = self.fresh.count
        return self.text.text_part(index, self.text.length - count, self.text.length, end - count)

    def inputs(self) -> Tensor:
        """Returns the hidden states that :meth:`part` reads."""
        beam = self.text.tree
        if not beam.level:
            return self._drafter.layers.states(self.fresh.read())
        parents = torch.tensor(beam.parents[beam.trunk : beam.frontier.stop])
        return self._outputs[send(parents + 1, self._outputs.device)]

    def add_level(self, logits: Tensor, outputs: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`part`, ``[frontier, V]``, and the
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
class Eagle3Options(TreeOptions, TargetOptions, StateOptions):
    """Options of ``eagle3``."""

    widths: tuple[int, ...] = (4, 8, 8, 8)
    max_nodes: int = 16
    formats: ClassVar[tuple[str, ...]] = FORMATS

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        self.check(self.widths)
        self.check_drafted()


class Eagle3Drafter(Drafter):
    """The method ``eagle3``."""

    method: ClassVar[str] = "eagle3"
    label: ClassVar[str] = "EAGLE-3"
    recipe: ClassVar[str] = "paceline.train.recipes.eagle3:Eagle3Recipe"
    cpu_tree: ClassVar[Mapping[str, str]] = {"widths": "3,3,3", "max_nodes": "5"}
    cpu_weights: ClassVar[str] = "int8"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    growth: TreeGrowth
    captured = True
    gathered_slots = 0

    def __init__(self, layers: Eagle3Layer, options: Eagle3Options, fit: Fit, size: int) -> None:
        """Builds a drafter of layers and options; ``size`` is the bytes of its own weights."""
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
    ) -> Eagle3Drafter:
        return PARTS.load(cls, folder, options, resources)

    @classmethod
    def layout(cls, described: Mapping[str, Any]) -> str | None:
        if SECTION in described or not is_eagle3(described):
            return super().layout(described)
        return "speculators" if "speculators_model_type" in described else "EAGLE"

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        return PARTS.inspect(folder, target)

    def start(self, generation: GenerationInfo) -> GrownSequence[Eagle3Passes]:
        return GrownSequence(self.growth, Eagle3Passes(self, generation))

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft:
        text = StateText(programs[1], self.layers.config.states)
        return NativeDraft(programs[2], self.layers.dtype, ids, text=text)

    def grow_level(self, growing: Sequence[Eagle3Passes]) -> None:
        caches = [each.cache for each in growing]
        inputs = torch.cat([each.inputs() for each in growing])
        number = 2 if growing[0].text.tree.level else 1  # all have as many levels
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

    def draft_passes(self, growing: Sequence[Eagle3Passes], shape: TreeShape) -> HostDraft:
        parts = [each.part(index) for index, each in enumerate(growing)]
        lengths = [each.text.length for each in growing]
        starts = [each.text.length - 1 - each.cache.base for each in growing]
        fresh = [each.fresh for each in growing]
        text = text_pass(parts, StateRows(fresh, self.layers.states))
        caches = [each.cache for each in growing]
        return HostDraft([text, *level_passes(starts, lengths, shape)], caches)

    def drafted(self, growing: Sequence[Eagle3Passes]) -> None:
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
            number = 2 if trees.level else 1
            result = self.layers.run(
                number, tokens, plan, passes.caches, rows, taps=(0,), inputs=inputs
            )
            outputs.append(result.taps[0].unflatten(0, (len(trees.tokens), -1)))
            trees.add_level(result.logits)


def _read_config(folder: Path, target: ModelSource | None) -> tuple[Eagle3Config, torch.dtype]:
    known = load_config(target) if target else None
    config, dtype = read_eagle3(folder, known.layers if known else 0)
    longrope = config.rope_parameters.get("rope_type") == "longrope"  # depends on the length
    if known is not None and not longrope:  # published ones have the length of their training
        config = replace(config, max_position=max(config.max_position, known.max_position))
    return config, dtype


PARTS = TargetParts("eagle3", Eagle3Options, Eagle3Layer, Eagle3Model, _read_config)
