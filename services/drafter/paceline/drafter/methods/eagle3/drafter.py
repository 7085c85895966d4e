"""The EAGLE-3 drafter: a tree by one layer that reads its own hidden states level by level.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3. A position's input is the token there and the hidden state of the
position before it: of the text the target's, outputs of a low, a middle and a high layer fused; of
a drafted token the layer's own output at its parent. A round feeds the text since the last round,
then its tree level by level. Scores include the verifier's noise, and trees grow as in
:mod:`paceline.drafter.methods.beam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.decoder import load_config
from paceline.decoder.config import Rope
from paceline.decoder.weights import Linear
from paceline.drafter.kv.reader import StateReader
from paceline.drafter.methods.base import (
    Fit,
    GenerationInfo,
    Needs,
    Resources,
    parse_options,
)
from paceline.drafter.methods.beam_drafter import (
    BeamDrafter,
    BeamSequence,
    Block,
    forward_blocks,
    required,
    text_pass,
)
from paceline.drafter.methods.checkpoint import (
    StateOptions,
    TargetEmbedding,
    load_model,
    load_weights,
    read_fit,
    required_folder,
)
from paceline.drafter.methods.draft_graphs import (
    GraphModel,
    PassShape,
    graphs_work_on,
    text_and_levels,
)
from paceline.drafter.methods.eagle3.config import Eagle3Config, read_eagle3
from paceline.drafter.methods.eagle3.module import Eagle3Model
from paceline.drafter.methods.layers import LayerWeights, linear
from paceline.drafter.methods.slots import WindowCache
from paceline.drafter.methods.trees_there import (
    HostDraft,
    Passes,
    TreeShape,
    TreesThere,
    level_passes,
)
from paceline.kernels import (
    Executor,
    KVCacheView,
    Pass,
    Program,
    Recorder,
    TreePlan,
    plan_trees,
    send,
)
from paceline.kernels.draft import DraftText, NativeDraft, StateText
from paceline.kernels.program import PassResult


class Eagle3Layer:
    """Weights and forward pass. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Mapping[str, Tensor],
        embedding: TargetEmbedding,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int = 0,
    ) -> None:
        """Builds the layer from its tensors by name, and the embedding and LM head it uses.

        Its matrices get ``bits``, 8 or 4, in blocks of 32, or stay as they came.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.rope = Rope(config, device)
        self._norms = _state_norms(config, weights)
        tensors = LayerWeights(config, weights, bits)
        whole = torch.cat([weights[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
        qkv = [linear([half.contiguous()], bits) for half in whole.chunk(2, dim=1)]
        record = partial(_record, config, tensors, qkv, embedding, dtype)
        self._writing = Executor(record(fused=True, outputs=False))
        self._reading = Executor(record(fused=True))
        self._drafting = Executor(record(fused=False))

    @property
    def native(self) -> tuple[Executor, Executor] | None:
        """What reads a text and what drafts, if both run in native calls."""
        both = self._reading, self._drafting
        cpu = self.device.type == "cpu" and all(each.native is not None for each in both)
        return both if cpu else None

    def new_cache(self, nodes: int) -> WindowCache:
        """Returns a cache for one generation whose trees have at most ``nodes`` nodes.

        Slot p is of the token at position p + 1, which is read with the state of position p.
        """
        return WindowCache(self.config, 1, self.config.window, nodes, self.dtype, self.device)

    def states(self, states: Tensor) -> Tensor:
        """The target's states ``[n, states]`` as inputs: normalised where the layer does that."""
        states = send(states, self.device)
        if self._norms is None:
            return states.to(self.dtype)
        wide = states.float().unflatten(1, (len(self._norms), -1))
        scale = (wide.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        normed: Tensor = wide * scale * self._norms
        return normed.flatten(1).to(self.dtype)

    @torch.inference_mode()
    def write_kv(self, tokens: Tensor, plan: TreePlan, cache: WindowCache, states: Tensor) -> None:
        """Writes keys and values of tokens of a text, and computes nothing else.

        Arguments as of :meth:`forward`.
        """
        self._writing.run(Pass(tokens, plan, [cache], self.rope.table(plan.longest), inputs=states))

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        inputs: Tensor,
        rows: Tensor,
        *,
        drafted: bool,
    ) -> PassResult:
        """Runs tokens of several generations.

        Args:
            tokens: Token ids, int64 ``[M]``.
            plan: Their blocks.
            caches: Keys and values of each generation.
            inputs: Hidden states of the positions before: of texts :meth:`states` of the target,
                ``[M, states]``, of drafted tokens outputs of the layer, ``[M, hidden]``.
            rows: Rows that need logits, int64 ``[R]``.
            drafted: Whether the tokens are drafted ones.

        Returns:
            Logits ``[R, V]``, or of drafted tokens alone, and as tap 0 the outputs that are inputs
            again.
        """
        table = self.rope.table(plan.longest)
        call = Pass(tokens, plan, caches, table, rows, taps=(0,), inputs=inputs)
        return (self._drafting if drafted else self._reading).run(call)


def _state_norms(config: Eagle3Config, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Weights of the norms of the target's states, float32 ``[norms, width]``."""
    names = [f"fc_norm.{index}.weight" for index in range(len(config.taps) * config.fc_norm)]
    names += ["input_norm.weight"] * config.norm_before_fc
    return torch.stack([weights[name].float() for name in names]) if names else None


def _record(
    config: Eagle3Config,
    tensors: LayerWeights,
    qkv: Sequence[Linear],
    embedding: TargetEmbedding,
    dtype: torch.dtype,
    *,
    fused: bool,
    outputs: bool = True,
) -> Program:
    """Tokens and hidden states to logits.

    ``qkv`` are the products of both halves of the layer's input, embedding and hidden state. The
    hidden states are the target's if ``fused``, else own outputs. Without ``outputs``, the program
    ends with keys and values.
    """
    base = "layers.0."
    program = Recorder(tensors.heads, dtype)
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
    x = program.keep(hidden if config.norm_before_residual else x)
    attended = program.attend(q, 0, config.window or None)
    delta = program.multiply(attended, tensors.matrix(f"{base}self_attn.o_proj"))
    program.add(x, tensors.feed_forward(program, x, delta, base))
    x = program.select(x)
    final = program.add_norm(x, 0, tensors.norm("norm"))
    program.tap(final if config.norm_output else x, 0)
    program.multiply(final, embedding.head)
    return program.finish()


class Eagle3Sequence(BeamSequence):
    """One generation of ``eagle3``."""

    _drafter: Eagle3Drafter

    def __init__(
        self, drafter: Eagle3Drafter, generation: GenerationInfo, states: StateReader
    ) -> None:
        super().__init__(drafter, generation)
        self.states = states
        self.cache = drafter.layer.new_cache(drafter.options.drafted)
        self._fresh = torch.empty(0, 0)
        """States of the newest positions before the anchor, of the round."""
        self._outputs = torch.empty(0, 0)
        """Outputs at the anchor and at the nodes of the tree that were fed."""

    @property
    def backlog(self) -> int:
        return max(0, self._readable - self.cache.next_position(self._readable))

    def warm(self, limit: int) -> None:
        cache, layer = self.cache, self._drafter.layer
        begin = cache.next_position(self._readable)
        begin, states = self._read(begin, min(self._readable, begin + limit))
        if len(states):
            end = begin + len(states)
            cache.reserve(end)
            block = self.text_block(0, begin + 1, end + 1, begin - cache.base)
            plan = plan_trees(block.segments, positions=block.positions, device=layer.device)
            tokens = send(torch.tensor(block.tokens), layer.device)
            layer.write_kv(tokens, plan, cache, states)
            cache.length = end
            self.states.check()

    def prepare(self) -> bool:
        """Returns False unless the hidden states of all positions before the anchor are there."""
        self.states.check()
        end = self.length - 1
        if self._readable < end or end < 1:
            return False
        if self.backlog > MAX_FED_TOKENS:
            self.warm(self.backlog - 1)
        self.cache.reserve(end)
        _, self._fresh = self._read(min(self.cache.next_position(end), end - 1), end)
        return len(self._fresh) > 0

    def block(self, index: int) -> Block:
        """Returns what to feed for the next level; ``index`` is that of its cache in the pass."""
        end = self.length - 1 - self.cache.base
        if self.tree.level:
            return self.tree_block(index, end)
        count = len(self._fresh)
        return self.text_block(index, self.length - count, self.length, end - count)

    def inputs(self) -> Tensor:
        """Returns the hidden states that :meth:`block` reads."""
        beam = self.tree
        if not beam.level:
            return self._fresh
        parents = torch.tensor(beam.parents[beam.trunk : beam.frontier.stop])
        return self._outputs[send(parents + 1, self._outputs.device)]

    def add_level(self, logits: Tensor, outputs: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`block`, ``[frontier, V]``, and the
        outputs of the same rows."""
        beam = self.tree
        if not beam.level:
            self.cache.length = self.length - 1
            self._outputs = outputs.new_zeros(1 + self._drafter.options.drafted, outputs.shape[1])
        self._outputs[beam.frontier.start + 1 : beam.frontier.stop + 1] = outputs
        self.grow(logits)

    def fill(self, text: DraftText) -> None:
        cache, count = self.cache, len(self._fresh)
        text.length = self.length - 2  # the slot of the anchor
        text.first = text.length + 1 - count
        self._fresh = self._fresh.contiguous()
        self._fed = torch.tensor([self.text[at] for at in range(-count, 0)])
        text.fresh, text.tokens = self._fresh.data_ptr(), self._fed.data_ptr()
        cache.length = self.length - 1
        assert cache.table is not None
        text.context, text.base = cache.table.address, cache.base
        text.anchor = self.text[-1]

    def finish(self) -> None:
        self._clear()
        self.states.check()

    def close(self) -> None:
        super().close()
        self._clear()

    def _clear(self) -> None:
        self._fresh = self._outputs = torch.empty(0, 0)

    def _read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """The first position that is available, and the states from there on as inputs."""
        first, states = self.states.read(begin, max(begin, end))
        return first, self._drafter.layer.states(states)

    @property
    def _readable(self) -> int:
        """Positions below this are read: committed ones, and none beyond this text's anchor."""
        return min(self.states.committed, self.length - 1)


MAX_FED_TOKENS = 16
"""Maximum number of tokens that a round feeds through the whole layer. Of more, as of a prompt, all
but the newest get keys and values alone."""


@dataclass(frozen=True)
class Eagle3Options(StateOptions):
    """Options of ``eagle3``."""

    widths: tuple[int, ...] = (4, 8, 8, 8)
    max_nodes: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_drafted()


class Eagle3Drafter(BeamDrafter[Eagle3Sequence]):
    """The method ``eagle3``."""

    method: ClassVar[str] = "eagle3"
    path_options: ClassVar[tuple[str, ...]] = ("target",)
    options: Eagle3Options

    def __init__(
        self,
        layer: Eagle3Layer,
        options: Eagle3Options,
        fit: Fit,
        size: int,
        drafted_tokens: Tensor | None,
    ) -> None:
        config = layer.config
        super().__init__(config, options, fit, size)
        self.layer, self.rope = layer, layer.rope
        self.set_device(layer.device, drafted_tokens)
        self.needs = Needs(
            hidden_state_layers=config.taps,
            hidden_state_window=config.window,
            hidden_state_transport=options.states,
        )
        if layer.native is not None:
            reading, drafting = (each.native for each in layer.native)
            assert reading is not None
            assert drafting is not None
            ids = torch.arange(config.vocab_size) if drafted_tokens is None else drafted_tokens
            text = StateText(reading, config.states)
            self.native = NativeDraft(drafting, layer.dtype, ids, text=text)
        if graphs_work_on(self.device):
            self.use_graphs(self.graph_model())

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> Eagle3Drafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(Eagle3Options, options)
        fit = read_fit(folder)
        return load_model(folder, resources, _read, folder, fit, parsed, resources.device)

    def start(self, generation: GenerationInfo) -> Eagle3Sequence:
        states = required(generation.states, "eagle3", "hidden states")
        return Eagle3Sequence(self, generation, states)

    def grow_level(self, growing: Sequence[Eagle3Sequence]) -> None:
        caches = [sequence.cache for sequence in growing]
        inputs = torch.cat([sequence.inputs() for sequence in growing])
        drafted = growing[0].tree.level > 0  # all have as many levels
        outputs: list[Tensor] = []

        def run(tokens: Tensor, plan: TreePlan, rows: Tensor) -> Tensor:
            result = self.layer.forward(tokens, plan, caches, inputs, rows, drafted=drafted)
            outputs.append(result.taps[0])
            return result.logits

        blocks = [sequence.block(index) for index, sequence in enumerate(growing)]
        logits = forward_blocks(run, blocks, self.layer.device)
        parts = outputs[0].split([block.logit_rows for block in blocks])
        for sequence, each, part in zip(growing, logits, parts, strict=True):
            sequence.add_level(each, part)

    def graph_model(self) -> GraphModel:
        """Returns what graphs need."""
        config, levels = self.layer.config, self.max_depth

        def passes(fed: int, shape: TreeShape) -> list[PassShape]:
            level = PassShape(0, 1, (config.window or None,))
            text = replace(level, rows=fed, blocks=2, inputs=config.states)
            return text_and_levels(text, level, shape)

        return GraphModel(
            config, 1, 0, self.layer.dtype, config.max_position + levels, self.drafted_there,
            passes, self.grow_there,
        )  # fmt: skip

    def draft_passes(self, growing: Sequence[Eagle3Sequence], shape: TreeShape) -> HostDraft:
        blocks = [sequence.block(index) for index, sequence in enumerate(growing)]
        lengths = [sequence.length for sequence in growing]
        starts = [sequence.length - 1 - sequence.cache.base for sequence in growing]
        text = text_pass(blocks, torch.cat([sequence.inputs() for sequence in growing]))
        caches = [sequence.cache for sequence in growing]
        return HostDraft([text, *level_passes(starts, lengths, shape)], caches)

    def drafted(self, growing: Sequence[Eagle3Sequence]) -> None:
        for sequence in growing:
            sequence.cache.length = sequence.length - 1

    def grow_there(self, passes: Passes, trees: TreesThere) -> None:
        outputs: list[Tensor] = []  # at the anchors, then at the nodes
        inputs = passes.inputs(0)
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            if outputs:
                parents = trees.parents[:, : trees.newest.stop, None] + 1
                own = torch.cat(outputs, 1)
                inputs = own.gather(1, parents.expand(-1, -1, own.shape[2])).flatten(0, 1)
            assert inputs is not None
            result = self.layer.forward(
                tokens, plan, passes.caches, inputs, rows, drafted=trees.level > 0
            )
            outputs.append(result.taps[0].unflatten(0, (len(trees.tokens), -1)))
            trees.add_level(result.logits)


def _read(folder: Path, fit: Fit, options: Eagle3Options, device: str) -> Eagle3Drafter:
    source = options.open_target()
    target = load_config(source) if source else None
    config, dtype = read_eagle3(folder, target.layers if target else 0)
    longrope = config.rope_parameters.get("rope_type") == "longrope"  # depends on the length
    if target is not None and not longrope:  # published ones have the length of their training
        config = replace(config, max_position=max(config.max_position, target.max_position))
    dtype = options.torch_dtype(dtype)
    embedding, fit = options.read_embedding(folder, fit, config, dtype, device)
    weights = load_weights(folder, config, Eagle3Model, dtype, device)
    with torch.inference_mode():
        layer = Eagle3Layer(config, weights, embedding, dtype, device, options.bits(folder))
    size = sum(tensor.nbytes for tensor in weights.values()) + embedding.private_bytes
    drafter = Eagle3Drafter(layer, options, fit, size, embedding.tokens)
    drafter.warm_up()
    return drafter
