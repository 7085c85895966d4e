"""Drafters with layers of their own that share a target's embedding and LM head."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.convert import ModelSource, open_model, prepare
from paceline.convert.weights import Checkpoint
from paceline.decoder import DecoderConfig, PackedModel
from paceline.decoder.config import Rope
from paceline.device import Device, device_of
from paceline.drafter.growth.levels import (
    HostDraft,
    LevelGrowth,
    LevelTrees,
    Passes,
    PassShape,
    TreeShape,
)
from paceline.drafter.growth.native import NativeGrowth
from paceline.drafter.growth.sequence import (
    GrownSequence,
    Growth,
    PassPart,
    TreeGrowth,
    TreeSettings,
    required,
)
from paceline.drafter.kv import TRANSPORTS
from paceline.drafter.methods.base import (
    Drafter,
    Fit,
    GenerationInfo,
    Needs,
    Resources,
    check_choice,
    parse_options,
)
from paceline.drafter.methods.checkpoint import (
    TargetEmbedding,
    TargetRef,
    check_own_tensors,
    check_shape,
    check_target,
    check_tensors,
    load_model,
    load_weights,
    read_fit,
    read_shape,
    required_folder,
)
from paceline.drafter.methods.layers import LayerShape, LayerWeights, TappedShape, drafted_tokens
from paceline.drafter.methods.options import TreeOptions
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
from paceline.service.phases import packing

logger = logging.getLogger("paceline.drafter")

# Known values of the option `weights` where matrices can be quantised.
FORMATS = (*TreeOptions.formats, "int8", "int4")

_GROWTH = 512


@dataclass(frozen=True)
class TargetOptions:
    """Options of every method whose drafters share a target's embedding and LM head."""

    # Folder of the target, for its embedding and LM head; empty: the drafter's folder has them.
    target: str = ""
    lora: str = ""  # folder of the target's LoRA adapter; empty: it has none

    def read_target(self, device: torch.device) -> PackedModel | None:
        """Return the target in its stored format, as a verifier reads it; None: there is none."""
        if not self.target:
            return None
        return prepare(self.target, "auto", self.lora, device, packing)


@dataclass(frozen=True)
class StateOptions:
    """Options of methods that read the target's hidden states."""

    # Transport of hidden states: map (the verifier's memory), follow (copies over gRPC), or auto:
    # map where the drafter service can open the verifier's Unix socket, else follow.
    states: str = "auto"

    def check(self, widths: tuple[int, ...]) -> None:
        """Raises ``ValueError`` if the transport is unknown, or no widths are given."""
        if not widths:
            raise ValueError("option widths is empty, expected at least one number")
        check_choice("states", self.states, TRANSPORTS)

    def needs(self, config: TappedShape) -> Needs:
        return Needs(
            hidden_state_layers=config.taps,
            hidden_state_window=config.window,
            hidden_state_transport=self.states,
        )


def weight_bits(weights: str, folder: Path, device: Device) -> int:
    """Return the bits of matrices, 8 or 4, see :func:`linear`; 0: as they come.

    For ``auto`` they are the most that blocks of the folder have, on a CPU.
    """
    if weights == "auto":
        return Checkpoint(folder, torch.float32).bits if device.packs else 0
    return {"int8": 8, "int4": 4}.get(weights, 0)


class DraftLayers(ABC):
    """Weights and forward passes of a drafter's layers. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    config: Any  # shape, a :class:`~paceline.drafter.methods.layers.LayerShape`
    cached_layers: int = 1  # layers with keys and values of a text
    context_layers: int = 0  # layers that attend to contexts
    captured = True  # whether drafts can be captured as CUDA graphs

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
        """Build the layers from their tensors by name, and the embedding and LM head they use.

        Their matrices get ``bits``, 8 or 4, or stay as they came. ``numerics`` are
        as of :func:`paceline.kernels.choose_numerics`.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embedding, self.bits = embedding, bits
        self.rope = Rope(config, device)
        parts = LayerWeights(config, weights, bits, choose_numerics(numerics))
        self.programs = [Executor(program) for program in self.record(parts)]

    @abstractmethod
    def record(self, tensors: LayerWeights) -> list[Program]:
        """Return the programs. The first writes keys and values of a text, and computes nothing
        else; the last drafts."""

    @abstractmethod
    def draft_passes(self, batch: Sequence[Any], shape: TreeShape) -> HostDraft:
        """Return the passes of a draft for generations whose trees have this shape."""

    @abstractmethod
    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        """Grow trees by these passes, without waiting for a GPU."""

    @abstractmethod
    def pass_shapes(self, fed: int, shape: TreeShape) -> list[PassShape]:
        """Return the shapes of a draft's passes for texts with ``fed`` new positions."""

    @abstractmethod
    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        """Return what drafts in one native call by :attr:`native`, None if nothing can; ``ids``
        are the target's ids of the logits, int64 ``[R]``."""

    @property
    def native(self) -> list[NativeProgram] | None:
        """The programs for compiled kernels; None if they do not run all of them."""
        native = [program.native for program in self.programs if program.native is not None]
        return native if len(native) == len(self.programs) else None

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
        """Run a program by its number; arguments as of :class:`~paceline.kernels.Pass`.

        Logits are of all tokens, or of the drafted ones alone.
        """
        table = self.rope.table(plan.longest)
        return self.programs[number].run(Pass(tokens, plan, caches, table, rows, **more))

    def states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states ``[n, taps * hidden]`` as inputs of the programs."""
        return send(states, self.device).to(self.dtype)

    def write_kv(self, part: PassPart, cache: WindowCache, states: Tensor | None = None) -> None:
        """Write keys and values of a text's tokens, which read ``states`` if the layer does, and
        compute nothing else."""
        plan = plan_trees(part.blocks, positions=part.positions, device=self.device)
        tokens = send(torch.tensor(part.tokens), self.device)
        self.run(0, tokens, plan, [cache], inputs=states)


class WindowCache:
    """KV of one generation's text, followed by slots for a tree or a part; a ``KVCacheView``.

    Position p of the text has slot ``p - base``. With a window, the newest positions are moved to
    the front when the slots are used up, so memory is constant. ``base`` is a multiple of
    ``CHUNK``: attention has the same bits after any number of moves.
    """

    def __init__(self, layers: DraftLayers, extra: int) -> None:
        """Create an empty cache, with this many slots behind the text.

        They are for a tree or a block. What was accepted is not kept: it is fed again as text.
        """
        self.length = 0  # positions of the text below this were written
        self.base = 0  # position in the first slot
        self.window: int = layers.config.window  # positions of the text that are kept; 0: all
        self._extra, self._layers = extra, layers
        slots = self.window + CHUNK + extra if self.window else _GROWTH
        self._keep(self._allocate(slots))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, ``[Hkv, slots, D]``; invalid after reserve."""
        return self._views[index]

    def next_position(self, end: int) -> int:
        """Return the first position below ``end`` that is to be written, in the newest window."""
        return max(self.length, end - self.window) if self.window else self.length

    def reserve(self, end: int) -> None:
        """Make room for the positions below ``end`` and the extra slots."""
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
        # Where keys and values lie, `[layers, 2, Hkv, slots, D]`, dense.
        self.address, self.slots = store.data_ptr(), store.shape[3]
        self._views = [(both[0], both[1]) for both in store]
        self.table = LayerTable.of(self._views)

    def _allocate(self, slots: int) -> Tensor:
        layers, config = self._layers, self._layers.config
        shape = layers.cached_layers, 2, config.kv_heads, slots, config.head_dim
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            return torch.zeros(shape, dtype=layers.dtype, device=layers.device)


def fill_cache(text: DraftText, cache: WindowCache, anchor: int) -> None:
    """Set the anchor of a text for native drafts, and where its keys and values lie."""
    assert cache.table is not None
    text.context, text.base, text.anchor = cache.table.address, cache.base, anchor


class StateSequence(GrownSequence):
    """A generation whose drafter reads the target's hidden states, with a cache of what was made of
    them."""

    def __init__(
        self,
        drafter: TargetDrafter,
        generation: GenerationInfo,
        extra: int,
        kept: int | None = None,
    ) -> None:
        """Begin without any; ``extra`` as of :class:`WindowCache`. Raises ``ValueError`` if the
        generation comes without hidden states."""
        super().__init__(drafter, generation, kept)
        self.states = required(generation.states, drafter.method, "hidden states")
        self.cache = WindowCache(drafter.layers, extra)
        self._drafter = drafter

    @property
    def readable(self) -> int:
        """End of the positions that may be read: all committed ones before the anchor."""
        return min(self.states.committed, self.length - 1)

    @property
    def backlog(self) -> int:
        return max(0, self.readable - self.cache.next_position(self.readable))

    def prepare(self) -> bool:
        """Return whether the hidden states of all positions before the anchor are there."""
        self.states.check()
        return self.readable >= self.length - 1 > 0

    def finish(self) -> None:
        self.states.check()


class TargetDrafter(Drafter):
    """A drafter whose layers share a target's embedding and LM head."""

    path_options: ClassVar[tuple[str, ...]] = ("target",)
    option_type: ClassVar[type[TreeOptions]]  # its options, which are :class:`TargetOptions` too
    shape_type: ClassVar[type[LayerShape]]  # the shape of its layers
    layer_type: ClassVar[type[DraftLayers]]  # its layers
    sequence_type: ClassVar[type[GrownSequence]]  # its generations
    growth: TreeGrowth

    def __init__(self, layers: Any, options: Any, fit: Fit, size: int) -> None:
        """Build a drafter of layers and options; ``size`` is the bytes of its own weights."""
        self.layers, self.options = layers, options
        self.shape, self.device = layers.config, layers.device
        self.fit, self.needs, self.weight_bytes = fit, options.needs(layers.config), size
        self.drafted_tokens = layers.embedding.tokens
        self.settings = TreeSettings.of(layers.config, options, layers.device, self.drafted_tokens)
        self.max_nodes, self.max_depth = self.settings.max_nodes, self.settings.max_depth
        self.growth = self._growth()

    @classmethod
    def read_config(cls, folder: Path, target: DecoderConfig | None) -> tuple[Any, torch.dtype]:
        """Read the shape of the layers from a folder, and the type of its tensors."""
        return read_shape(cls.shape_type, folder, target.layers if target else 0)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> TargetDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(cls.option_type, options)
        fit = read_fit(folder)
        return load_model(folder, resources, cls._read, folder, fit, parsed, resources)

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        config, _ = cls.read_config(folder, None if target is None else target.config())
        check_own_tensors(folder, config)
        check_tensors(folder, config)
        drafted_tokens(folder, config)
        if target is not None:
            check_shape(folder, config, target.path, target.config())
        return {}

    def start(self, generation: GenerationInfo) -> GrownSequence:
        return self.sequence_type(self, generation)

    @classmethod
    def _read(cls, folder: Path, fit: Fit, options: Any, resources: Resources) -> TargetDrafter:
        device = resources.device.torch
        target = options.read_target(device)
        about = None if target is None else target.description.config
        config, stored = cls.read_config(folder, about)
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        dtype = known.get(options.weights, stored)
        bits = weight_bits(options.weights, folder, resources.device)
        if target is not None and about is not None:
            fit = check_target(folder, TargetRef.packed(target), fit)
            check_shape(folder, config, target.path, about)
        embedding = TargetEmbedding.read(folder, target, config, dtype, device, bits)
        weights = load_weights(folder, config, dtype, device)
        with torch.inference_mode():
            layers = cls.layer_type(
                config, weights, embedding, dtype, device, bits, resources.numerics
            )
        return cls(layers, options, fit, open_model(folder).weight_bytes + embedding.private_bytes)

    def _growth(self) -> TreeGrowth:
        """Return how trees grow, with all CUDA graphs captured."""
        layers, settings, ways = self.layers, self.settings, list[Growth]()
        if (programs := layers.native) is not None:
            count = settings.vocab_size
            ids = torch.arange(count) if settings.drafted is None else settings.drafted
            if (draft := layers.native_draft(programs, ids)) is not None:
                ways.append(NativeGrowth(draft, layers.rope, settings))
        if not (device_of(settings.device).graphs and layers.captured):
            return TreeGrowth(*ways, LevelGrowth(layers, settings))
        from paceline.drafter.growth.graphs import GraphGrowth

        graphs = GraphGrowth(layers, settings, self.method, self.needs.kv_budget)
        graphs.warm_up()
        return TreeGrowth(*ways, graphs if graphs.replays else LevelGrowth(layers, settings))
