"""Drafters with layers of their own that share a target's embedding and LM head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from paceline.decoder import ModelSource, open_model
from paceline.decoder.config import Rope
from paceline.decoder.weights import Checkpoint
from paceline.drafter.kv import TRANSPORTS
from paceline.drafter.methods.base import (
    Fit,
    GenerationInfo,
    Needs,
    Resources,
    check_choice,
    parse_options,
)
from paceline.drafter.methods.beam import BeamOptions
from paceline.drafter.methods.beam_drafter import BeamDrafter, BeamSequence, Block, required
from paceline.drafter.methods.checkpoint import (
    TargetEmbedding,
    check_shape,
    check_target,
    load_model,
    load_weights,
    read_fit,
    required_folder,
)
from paceline.drafter.methods.device_trees import TreeShape
from paceline.drafter.methods.draft_graphs import DraftGraphs, PassShape, graphs_work_on
from paceline.drafter.methods.layers import DraftModel, LayerWeights, TappedShape, rotates
from paceline.kernels import (
    CHUNK,
    Executor,
    KVCacheView,
    LayerTable,
    Pass,
    Program,
    TreePlan,
    choose_numerics,
    plan_trees,
    send,
)
from paceline.kernels.draft import NativeDraft
from paceline.kernels.executor import NativeProgram
from paceline.kernels.program import PassResult
from paceline.kernels.structures import DraftText


@dataclass(frozen=True)
class TargetOptions(BeamOptions):
    """Options of every method whose drafters share a target's embedding and LM head."""

    formats: ClassVar[tuple[str, ...]] = (*BeamOptions.formats, "int8", "int4")

    target: str = ""
    """Folder of the target, for its embedding and LM head; empty: the drafter's folder has them."""
    lora: str = ""
    """Folder of the target's LoRA adapter; empty: it has none."""

    def bits(self, folder: Path, dtype: torch.dtype, device: str) -> int:
        """Bits of the matrices, 8 or 4, see :func:`linear`; by default 8 where the folder stores
        them so, and in bfloat16 on a GPU, which reads half as much then; 0: as they come."""
        if self.weights == "auto":
            stored = Checkpoint(folder, torch.float32).int8
            return 8 if stored or rotates(dtype, torch.device(device)) else 0
        return {"int8": 8, "int4": 4}.get(self.weights, 0)

    def torch_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the type of the model: that of ``weights`` or, if it has none, ``stored``."""
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        return known.get(self.weights, stored)

    def needs(self, config: Any) -> Needs:
        """Returns the target's data that a drafter of this shape reads."""
        raise NotImplementedError


@dataclass(frozen=True)
class StateOptions(TargetOptions):
    """Options of methods that read the target's hidden states."""

    states: str = "auto"
    """Transport of hidden states: map (the verifier's memory), follow (copies over gRPC), or auto:
    map where the drafter service can open the verifier's Unix socket, else follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths:
            raise ValueError("option widths is empty, expected at least one number")
        check_choice("states", self.states, TRANSPORTS)

    def needs(self, config: TappedShape) -> Needs:
        return Needs(
            hidden_state_layers=config.taps,
            hidden_state_window=config.window,
            hidden_state_transport=self.states,
        )


class DraftLayers(ABC):
    """Weights and forward passes of a drafter's layers. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    config: Any
    """Shape, a :class:`~paceline.drafter.methods.layers.LayerShape`."""

    cached_layers: int = 1
    """Layers with keys and values of a text."""

    context_layers: int = 0
    """Layers that attend to contexts."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        embedding: TargetEmbedding,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int = 0,
        numerics: str = "portable",
    ) -> None:
        """Builds the layers from their tensors by name, and the embedding and LM head they use.

        Their matrices get ``bits``, 8 or 4, in blocks of 32, or stay as they came. ``numerics`` are
        as of :func:`paceline.kernels.choose_numerics`.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embedding, self.bits = embedding, bits
        self.rope = Rope(config, device)
        parts = LayerWeights(config, weights, bits, choose_numerics(numerics))
        self.programs = [Executor(each) for each in self.record(parts)]

    @abstractmethod
    def record(self, tensors: LayerWeights) -> list[Program]:
        """Returns the programs. The first writes keys and values of a text, and computes nothing
        else; the last drafts."""

    @property
    def native(self) -> list[NativeProgram] | None:
        """The programs for compiled kernels; None: they do not run all of them."""
        found = [each.native for each in self.programs if each.native is not None]
        return found if self.device.type == "cpu" and len(found) == len(self.programs) else None

    @torch.inference_mode()
    def run(
        self,
        number: int,
        tokens: Tensor | None,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        rows: Tensor | None = None,
        **more: Any,
    ) -> PassResult:
        """Runs a program by its number; arguments as of :class:`~paceline.kernels.Pass`.

        Logits are of all tokens, or of the drafted ones alone.
        """
        table = self.rope.table(plan.longest)
        return self.programs[number].run(Pass(tokens, plan, caches, table, rows, **more))

    def states(self, states: Tensor) -> Tensor:
        """Returns the target's hidden states ``[n, taps * hidden]`` as inputs of the programs."""
        return send(states, self.device).to(self.dtype)

    def write_kv(self, block: Block, cache: WindowCache, states: Tensor | None = None) -> None:
        """Writes keys and values of a text's tokens, which read ``states`` if the layer does, and
        computes nothing else."""
        plan = plan_trees(block.segments, positions=block.positions, device=self.device)
        tokens = send(torch.tensor(block.tokens), self.device)
        self.run(0, tokens, plan, [cache], inputs=states)


_GROWTH = 512


class WindowCache:
    """KV of one generation's text, followed by slots for a tree or a block; a ``KVCacheView``.

    Position p of the text has slot ``p - base``. With a window, the newest positions are moved to
    the front when the slots are used up, so memory is constant. ``base`` is a multiple of
    ``CHUNK``: attention has the same bits after any number of moves.
    """

    def __init__(self, layers: DraftLayers, extra: int) -> None:
        """Creates an empty cache, with this many slots behind the text.

        They are for a tree or a block. What was accepted is not kept: it is fed again as text.
        """
        self.length = 0
        """Positions of the text below this were written."""
        self.base = 0
        """Position in the first slot."""
        self.window: int = layers.config.window
        """Positions of the text that are kept; 0: all."""
        self._extra, self._layers = extra, layers
        slots = self.window + CHUNK + extra if self.window else _GROWTH
        self._keep(self._allocate(slots))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, ``[Hkv, slots, D]``; invalid after reserve."""
        return self._views[index]

    def next_position(self, end: int) -> int:
        """Returns the first position below ``end`` that is to be written, in the newest window."""
        return max(self.length, end - self.window) if self.window else self.length

    def reserve(self, end: int) -> None:
        """Makes room for the positions below ``end`` and the extra slots."""
        slots = self.slots
        if end - self.base + self._extra <= slots:
            return
        if not self.window:
            grown = self._allocate(max(end + self._extra, 2 * slots))
            grown[..., :slots, :] = self._store
            self._keep(grown)
            return
        base = (end - self.window) // CHUNK * CHUNK
        kept = self._store[..., base - self.base : max(base, self.length) - self.base, :].clone()
        self._store[..., : kept.shape[3], :] = kept
        self.base = base

    def _keep(self, store: Tensor) -> None:
        self._store = store
        self.address, self.slots = store.data_ptr(), store.shape[3]
        """Where keys and values lie, ``[layers, 2, Hkv, slots, D]``, dense."""
        self._views = [(both[0], both[1]) for both in store]
        self.table = LayerTable.of(self._views)

    def _allocate(self, slots: int) -> Tensor:
        layers, config = self._layers, self._layers.config
        shape = layers.cached_layers, 2, config.kv_heads, slots, config.head_dim
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            return torch.zeros(shape, dtype=layers.dtype, device=layers.device)


class TargetSequence(BeamSequence):
    """One generation of a :class:`TargetDrafter`."""

    cache: WindowCache

    def fill(self, text: DraftText) -> None:
        cache = self.cache
        assert cache.table is not None
        text.context, text.base, text.anchor = cache.table.address, cache.base, self.text[-1]


class StateSequence(TargetSequence):
    """One generation of a drafter that reads the target's hidden states."""

    def __init__(
        self,
        drafter: TargetDrafter[Any],
        generation: GenerationInfo,
        extra: int,
        kept: int | None = None,
    ) -> None:
        """See :class:`BeamSequence`; ``extra`` as of :class:`WindowCache`."""
        super().__init__(drafter, generation, kept)
        self.states = required(generation.states, drafter.method, "hidden states")
        self.cache = WindowCache(drafter.layers, extra)

    @property
    def backlog(self) -> int:
        return max(0, self.readable - self.cache.next_position(self.readable))

    @property
    def readable(self) -> int:
        """Positions below this are read: committed ones, and none beyond this text's anchor."""
        return min(self.states.committed, self.length - 1)

    def prepare(self) -> bool:
        """Returns False unless the hidden states of all positions before the anchor are there."""
        self.states.check()
        return self.readable >= self.length - 1 > 0

    def finish(self) -> None:
        self.clear()
        self.states.check()

    def close(self) -> None:
        super().close()
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Drops what belongs to the round."""


S = TypeVar("S", bound=TargetSequence)


class TargetDrafter(BeamDrafter[S]):
    """A drafter with layers of its own that shares a target's embedding and LM head.

    A subclass names the types of its parts.
    """

    path_options: ClassVar[tuple[str, ...]] = ("target",)
    options_type: ClassVar[type[TargetOptions]]
    layers_type: ClassVar[type[DraftLayers]]
    model_type: ClassVar[type[DraftModel]]
    """The drafter in training, whose tensors have the same names."""

    def __init__(self, layers: DraftLayers, options: TargetOptions, fit: Fit, size: int) -> None:
        """Builds a drafter; ``fit`` and ``size`` as in :class:`BeamDrafter`."""
        super().__init__(layers.config, options, fit, size)
        self.layers = layers
        self.needs = options.needs(layers.config)
        self.set_device(layers.device, layers.embedding.tokens)
        self.rope, tokens = layers.rope, self.drafted_tokens
        if (programs := layers.native) is not None:
            ids = torch.arange(self.shape.vocab_size) if tokens is None else tokens
            self.native = self.native_draft(programs, ids)
        if graphs_work_on(self.device):
            self.use_graphs()

    @classmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Self:
        folder = required_folder(cls.method, folder)
        given = {**cls.defaults(options, resources.device), **options}
        parsed = parse_options(cls.options_type, given)
        return load_model(folder, resources, cls._read, folder, read_fit(folder), parsed, resources)

    @classmethod
    def defaults(cls, given: Mapping[str, str], device: str) -> Mapping[str, str]:
        """Returns the values of options that depend on the device, by its torch name."""
        return {}

    @classmethod
    def _read(cls, folder: Path, fit: Fit, options: TargetOptions, resources: Resources) -> Self:
        device = resources.device
        target = open_model(options.target, options.lora) if options.target else None
        config, dtype = cls.read_config(folder, target)
        dtype = options.torch_dtype(dtype)
        bits = options.bits(folder, dtype, device)
        if target is not None:
            fit = check_target(folder, target, fit)
            check_shape(folder, config, target)
        embedding = TargetEmbedding.read(folder, target, config, dtype, device, bits)
        weights = load_weights(folder, config, cls.model_type, dtype, device)
        with torch.inference_mode():
            layers = cls.layers_type(
                config, weights, embedding, dtype, device, bits, resources.numerics
            )
        size = open_model(folder).weight_bytes + embedding.private_bytes
        drafter = cls(layers, options, fit, size)
        drafter.warm_up()
        return drafter

    @staticmethod
    @abstractmethod
    def read_config(folder: Path, target: ModelSource | None) -> tuple[Any, torch.dtype]:
        """Reads the shape of the layers from a folder, and the type of its tensors."""

    @abstractmethod
    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        """Returns what drafts in one native call by :attr:`DraftLayers.native`, if that is
        possible; ``ids`` are the target's ids of the logits, int64 ``[R]``."""

    def use_graphs(self) -> None:
        """Drafts by CUDA graphs, on a device that has them."""
        count = self.shape.vocab_size if self.drafted_tokens is None else len(self.drafted_tokens)
        self.graphs = DraftGraphs(self, TreeShape.of(self.options, self.max_depth, count))

    @property
    def gathered_slots(self) -> int:
        """Most positions of the target's KV that a draft reads; 0: it reads none, or all."""
        return 0

    @abstractmethod
    def pass_shapes(self, fed: int, shape: TreeShape) -> Sequence[PassShape]:
        """Returns the shapes of a draft's passes for texts with ``fed`` new positions."""
