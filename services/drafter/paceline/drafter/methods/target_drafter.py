"""Drafters with layers of their own that share a target's embedding and LM head."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.convert import ModelSource, open_model
from paceline.convert.weights import Checkpoint
from paceline.decoder.config import Rope
from paceline.drafter.growth.device import DeviceGrowth
from paceline.drafter.growth.graphs import DraftGraphs, GraphModel
from paceline.drafter.growth.host import HostGrowth, LevelModel
from paceline.drafter.growth.native import NativeGrowth
from paceline.drafter.growth.sequence import TreeGrowth
from paceline.drafter.growth.text import GrownText, Growth, PassPart, TreeSettings, required
from paceline.drafter.kv import TRANSPORTS
from paceline.drafter.methods.base import (
    Fit,
    GenerationInfo,
    Needs,
    Resources,
    check_choice,
    parse_options,
)
from paceline.drafter.methods.checkpoint import (
    TargetEmbedding,
    check_own_tensors,
    check_shape,
    check_target,
    check_tensors,
    load_model,
    load_weights,
    read_fit,
    required_folder,
)
from paceline.drafter.methods.layers import (
    DraftModel,
    LayerWeights,
    TappedShape,
    drafted_tokens,
)
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

logger = logging.getLogger("paceline.drafter")

FORMATS = (*TreeOptions.formats, "int8", "int4")
"""Known values of the option ``weights`` where matrices can be quantised."""

_GROWTH = 512
Options = TypeVar("Options", bound=TreeOptions)
Made = TypeVar("Made")


@dataclass(frozen=True)
class TargetOptions:
    """Options of every method whose drafters share a target's embedding and LM head."""

    target: str = ""
    """Folder of the target, for its embedding and LM head; empty: the drafter's folder has them."""

    lora: str = ""  # folder of the target's LoRA adapter; empty: it has none


@dataclass(frozen=True)
class StateOptions:
    """Options of methods that read the target's hidden states."""

    states: str = "auto"
    """Transport of hidden states: map (the verifier's memory), follow (copies over gRPC), or auto:
    map where the drafter service can open the verifier's Unix socket, else follow."""

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


def weight_bits(weights: str, folder: Path, device: str) -> int:
    """Return the bits of matrices, 8 or 4, see :func:`linear`; 0: as they come.

    For ``auto`` they are the most that blocks of the folder have, on a CPU.
    """
    if weights == "auto":
        on_cpu = torch.device(device).type == "cpu"
        return Checkpoint(folder, torch.float32).bits if on_cpu else 0
    return {"int8": 8, "int4": 4}.get(weights, 0)


class DraftLayers(ABC):
    """Weights and forward passes of a drafter's layers. Used on one thread.

    In bfloat16 models the residual stream, norms and rotations are float32, as in the decoder.
    """

    config: Any  # shape, a :class:`~paceline.drafter.methods.layers.LayerShape`
    cached_layers: int = 1  # layers with keys and values of a text
    context_layers: int = 0  # layers that attend to contexts

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
        self.programs = [Executor(each) for each in self.record(parts)]

    @abstractmethod
    def record(self, tensors: LayerWeights) -> list[Program]:
        """Return the programs. The first writes keys and values of a text, and computes nothing
        else; the last drafts."""

    @property
    def native(self) -> list[NativeProgram] | None:
        """The programs for compiled kernels; None if they do not run all of them."""
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
        computes nothing else."""
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


def fill_cache(text: DraftText, cache: WindowCache, anchor: int) -> None:
    """Set the anchor of a text for native drafts, and where its keys and values lie."""
    assert cache.table is not None
    text.context, text.base, text.anchor = cache.table.address, cache.base, anchor


class TextStates:
    """The target's hidden states of a text, and the cache of what was made of them."""

    def __init__(
        self, layers: DraftLayers, method: str, text: GrownText, generation: GenerationInfo,
        extra: int,
    ) -> None:  # fmt: skip
        """Begin without any; ``extra`` as of :class:`WindowCache`.

        Raises:
            ValueError: The generation comes without hidden states.
        """
        self.reader = required(generation.states, method, "hidden states")
        self.cache = WindowCache(layers, extra)
        self._text = text

    @property
    def backlog(self) -> int:
        """Positions whose states can be read and are not in the cache."""
        return max(0, self.readable - self.cache.next_position(self.readable))

    @property
    def readable(self) -> int:
        """Positions below this are read: committed ones, and none beyond this text's anchor."""
        return min(self.reader.committed, self._text.length - 1)

    def prepare(self) -> bool:
        """Return whether the hidden states of all positions before the anchor are there.

        Raises:
            KvGone: The cache that they are of is gone.
        """
        self.reader.check()
        return self.readable >= self._text.length - 1 > 0


@dataclass(frozen=True)
class TargetParts(Generic[Options]):
    """What a method consists of whose layers share a target's embedding and LM head."""

    method: str  # name of the parameter
    options: type[Options]  # its options, which are :class:`TargetOptions` too
    layers: type[DraftLayers]  # its layers
    model: type[DraftModel]  # the drafter in training, whose tensors have the same names
    read_config: Callable[[Path, ModelSource | None], tuple[Any, torch.dtype]]
    """Reads the shape of the layers from a folder, and the type of its tensors."""

    def load(
        self,
        make: Callable[[Any, Options, Fit, int], Made],
        folder: Path | None,
        options: Mapping[str, str],
        resources: Resources,
    ) -> Made:
        """Load a folder.

        Args:
            make: Makes the drafter of layers, options, fit and the bytes of its own weights.
            folder: That of the drafter.
            options: Option name to value.
            resources: Hardware that it uses.

        Raises:
            LoadError: The folder or an option is invalid.
        """
        folder = required_folder(self.method, folder)
        parsed = parse_options(self.options, options)
        fit = read_fit(folder)
        return load_model(folder, resources, self._read, make, folder, fit, parsed, resources)

    def inspect(self, folder: Path, target: ModelSource | None) -> dict[str, str]:
        """See :meth:`~paceline.drafter.methods.base.Drafter.inspect`."""
        config, _ = self.read_config(folder, target)
        check_own_tensors(folder, config)
        check_tensors(folder, config, self.model)
        drafted_tokens(folder, config)
        if target is not None:
            check_shape(folder, config, target)
        return {}

    def _read(
        self,
        make: Callable[[Any, Options, Fit, int], Made],
        folder: Path,
        fit: Fit,
        options: Options,
        resources: Resources,
    ) -> Made:
        assert isinstance(options, TargetOptions)
        device = resources.device
        target = open_model(options.target, options.lora) if options.target else None
        config, stored = self.read_config(folder, target)
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        dtype = known.get(options.weights, stored)
        bits = weight_bits(options.weights, folder, device)
        if target is not None:
            fit = check_target(folder, target, fit)
            check_shape(folder, config, target)
        embedding = TargetEmbedding.read(folder, target, config, dtype, device, bits)
        weights = load_weights(folder, config, self.model, dtype, device)
        with torch.inference_mode():
            layers = self.layers(
                config, weights, embedding, dtype, device, bits, resources.numerics
            )
        return make(layers, options, fit, open_model(folder).weight_bytes + embedding.private_bytes)


class TargetModel(LevelModel, GraphModel, Protocol):
    """A model whose trees grow by levels, in one native call, or on its device."""

    @property
    def layers(self) -> DraftLayers:
        """Its layers."""

    @property
    def captured(self) -> bool:
        """Whether its drafts can be captured as CUDA graphs."""

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        """Return what drafts in one native call by :attr:`DraftLayers.native`, if that is
        possible; ``ids`` are the target's ids of the logits, int64 ``[R]``."""


def target_growth(model: TargetModel, settings: TreeSettings) -> TreeGrowth:
    """Return how the trees of a model grow, with all CUDA graphs captured."""
    layers, preferred = model.layers, list[Growth]()
    if (programs := layers.native) is not None:
        ids = torch.arange(settings.vocab_size) if settings.drafted is None else settings.drafted
        if (draft := model.native_draft(programs, ids)) is not None:
            preferred.append(NativeGrowth(draft, layers.rope, settings))
    if settings.device.type != "cpu":
        kernels = settings.device.type == "cuda"
        graphs = DraftGraphs(model, settings) if kernels and model.captured else None
        growth = DeviceGrowth(model, settings, kernels=kernels, graphs=graphs)
        growth.warm_up()
        preferred.append(growth)
    return TreeGrowth(HostGrowth(model), *preferred)
