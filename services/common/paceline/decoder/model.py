"""The packed decoder: one forward pass over the query blocks of many sequences.

The pass is recorded once as a :class:`paceline.kernels.Program`. The residual stream, norms and
RoPE are float32 for bfloat16 weights too; the compiled kernels keep all activations in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig, Rope, UnsupportedModelError
from paceline.decoder.experts import Experts
from paceline.decoder.families import DELTA_TENSORS
from paceline.decoder.layer import (
    DecoderLayer,
    heads_of,
    layer_shapes,
    linears_of,
    load_layer,
    read_norm,
    record_entry,
    record_layer,
)
from paceline.decoder.model_source import ModelSource
from paceline.decoder.packed import PackedWeights
from paceline.decoder.products import FixedProducts, fix_products
from paceline.decoder.sources import open_model
from paceline.decoder.weights import (
    Linear,
    Weight,
    WeightsOf,
    in_int8,
    is_rotated,
    plain,
    take,
)
from paceline.kernels import (
    Executor,
    KVCacheView,
    Pass,
    Probe,
    Program,
    Recorder,
    TreePlan,
    choose_numerics,
)
from paceline.kernels.caches import MAX_GPU_WIDTH
from paceline.kernels.executor import NativeProgram
from paceline.kernels.linear import PackedMatrix
from paceline.kernels.rotated import RotatedMatrix, why_no_integers

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward pass."""

    logits: Tensor
    """``[R, V]`` for the requested rows; float32 from the compiled kernels, else in the model's
    type."""

    taps: tuple[Tensor, ...] = ()
    """Per tapped layer, its output ``[M, hidden]`` in the model's type."""


class AttentionObserver(Protocol):
    """Receives attention scores of a forward pass, without an effect on the pass."""

    def probes(self, layer: int) -> Sequence[Probe]:
        """Scores to record in a layer, 0 for the first."""
        ...

    def rows(self, layer: int) -> Sequence[int]:
        """Packed rows whose queries are wanted in a layer."""
        ...

    def attended(self, layer: int, q: Tensor) -> None:
        """Called after the pass for layers with wanted rows, with their queries after RoPE, float32
        ``[n, Hq, D]`` in the order of :meth:`rows`."""
        ...


class Decoder:
    """A language model of one of ``FAMILIES`` over packed query blocks.

    On the CPU, if :func:`check_batch_invariance` holds, the bits of a token's logits depend neither
    on the rest of the batch nor on whether its ancestors are committed or nodes of the tree. Safe
    to call from several threads that use different caches.
    """

    products: FixedProducts | None = None
    """How its products keep the bits of rows off the CPU; None: the library chooses by their
    number."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        device: torch.device | str,
        shared: PackedWeights | None = None,
        numerics: str = "portable",
    ) -> None:
        """Build from tensors by their Hugging Face names; see :meth:`load`."""
        self.config = config
        """Its configuration."""
        self.numerics = numerics_for(config, numerics)
        """How its compiled kernels multiply bfloat16, as :func:`numerics_for` returns it."""
        self.device = torch.device(device)
        """Device on which the model runs."""

        def large(name: str, key: str) -> Weight | PackedMatrix:
            if shared is not None:
                return shared.get(name)
            return take(weights, key, (config.vocab_size, config.hidden))

        norm = read_norm(config, weights, "model.norm", config.hidden)
        self.final_norm = replace(norm, weight=norm.weight * config.logit_scale)
        """The norm before the LM head, with the model's factor on logits."""
        head = large("head", _EMBEDDING if config.tied else "lm_head.weight")

        def quantised(matrix: Weight | PackedMatrix) -> Weight | PackedMatrix | RotatedMatrix:
            int8 = config.weights == "int8"
            return in_int8("head", matrix, None, self.device) if int8 else matrix

        self._head = Linear(quantised(head))
        self._embedding: Tensor | PackedMatrix
        if not config.tied:
            embedding = large("embedding", _EMBEDDING)
            assert not isinstance(embedding, PackedMatrix)
            self._embedding = plain(embedding, config.dtype).contiguous()
        elif is_rotated(config.weights, self.device):
            self._embedding = Linear(head).weight
        else:
            self._embedding = self._head.weight
        self._layers = self._load_layers(partial(load_layer, config, weights, shared, self.device))
        _check_names(config, weights)
        self.weights_kept = weights.kept if isinstance(weights, WeightsOf) else ""
        """In words, what is not in the format of weights that was asked for; empty: nothing."""
        self.rope = Rope(config, device)
        """Cosines and sines of positions."""
        try:
            self._executor = Executor(self._record())
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error

    def _load_layers(self, load: Callable[[int], DecoderLayer]) -> list[DecoderLayer]:
        """Load all layers: on a CPU one on each core, since most of it runs on one thread."""
        indices = range(self.config.layers)
        if self.device.type != "cpu":
            return list(map(load, indices))
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            layers = list(pool.map(load, indices))
        torch.set_num_threads(threads)  # later threads begin with the newest setting of any
        return layers

    @classmethod
    def load(
        cls,
        source: str | Path | ModelSource,
        weights: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        shared: PackedWeights | None = None,
        kv_cache_dtype: str = "auto",
        max_context: int | None = None,
        numerics: str = "portable",
    ) -> Self:
        """Load a Hugging Face folder with safetensors weights, or a GGUF file.

        Args:
            source: The folder or file.
            weights: float32, bfloat16, int8, int4, or "auto" for the stored format (bfloat16 for
                float16). int8 quantises with one scale an output over rotated inputs
                (:mod:`paceline.kernels.rotated`), int4 in blocks of 32.
            device: Where to run.
            shared: The ``large_tensors`` that a decoder of the same model and format has published,
                mapped instead of loaded. None: all tensors are loaded.
            kv_cache_dtype: Type of its caches: float32, bfloat16, int8, or "auto" for that of
                hidden states. Others than "auto" are supported on the CPU.
            max_context: Maximum length of texts; None: that of the model.
            numerics: How the CPU multiplies bfloat16 weights and caches; see
                :func:`numerics_for`.

        Raises:
            ValueError: ``numerics`` or ``kv_cache_dtype`` is none of these, or not supported on
                the device.
            UnsupportedModelError: The model needs a feature that the decoder does not support, or
                a file is damaged.
            FileNotFoundError: There is no such file, or the folder has no config.json.
        """
        found = open_model(source)
        if kv_cache_dtype != "auto" and torch.device(device).type != "cpu":
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, which is supported on the CPU; with device "
                f"{str(device)!r} use auto"
            )
        config = found.config(weights).with_kv(kv_cache_dtype).with_context(max_context)
        if config.experts and is_rotated(config.weights, torch.device(device)):
            raise UnsupportedModelError(
                f"{found.path}: weights are 'int8', and routed experts have no products in 8 bits "
                "on a GPU: use bfloat16"
            )
        if is_rotated(config.weights, torch.device(device)) and (why := why_no_integers(device)):
            raise UnsupportedModelError(
                f"{found.path}: weights are 'int8', and {device} refuses a product of 8-bit "
                f"integers, expected one that multiplies them: {why}; use bfloat16, or the CPU"
            )
        if config.delta_layers and torch.device(device).type != "cpu":
            raise UnsupportedModelError(
                f"{found.path}: layers of the gated delta rule are supported on the CPU; the "
                f"device is {str(device)!r}"
            )
        if config.attention_cap and torch.device(device).type == "cuda":
            raise UnsupportedModelError(
                f"{found.path}: its attention scores have a soft cap, which is supported on the "
                f"CPU; the device is {str(device)!r}"
            )
        if config.head_dim > MAX_GPU_WIDTH and torch.device(device).type == "cuda":
            raise UnsupportedModelError(
                f"{found.path}: its heads have {config.head_dim} elements, expected at most "
                f"{MAX_GPU_WIDTH} on a GPU, whose shared memory holds no more; the device is "
                f"{str(device)!r}: use the CPU"
            )
        try:
            with torch.inference_mode():
                return cls(config, found.weights(config, device), device, shared, numerics)
        except UnsupportedModelError as error:
            if str(found.path) in str(error):
                raise
            raise UnsupportedModelError(f"{found.path}: {error}") from error

    def large_tensors(self) -> dict[str, Tensor | PackedMatrix]:
        """Embedding and matrices by name, packed as in memory; no norms."""
        found = {"head": self._head.weight}
        if not self.config.tied:
            found["embedding"] = self._embedding
        for index, layer in enumerate(self._layers):
            found |= {f"layers.{index}.{name}": each.weight for name, each in linears_of(layer)}
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedded tokens, int64 ``[n]``: float32 ``[n, hidden]``, before the model's factor on
        them."""
        if isinstance(self._embedding, Tensor):
            return self._embedding[tokens].float()
        return self._embedding.rows(tokens)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        *,
        logit_rows: Tensor | None,
        taps: Sequence[int] = (),
        observer: AttentionObserver | None = None,
    ) -> ForwardResult:
        """Run packed query blocks and write their keys and values into the caches.

        Args:
            tokens: Token ids, int64 ``[M]``, packed as in the plan.
            plan: Query blocks; ``block.sequence`` indexes ``caches``.
            caches: One per sequence, with room up to ``block.stop``.
            logit_rows: Rows to compute logits for, int64 ``[R]``; None for all.
            taps: Layers whose outputs to return, 0 for the first.
            observer: Receives attention scores, if any.

        Returns:
            Logits and taps. The caller commits the caches.

        Raises:
            ValueError: Tokens and plan differ in length.
        """
        if tokens.shape != (plan.rows,):
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, plan has {plan.rows} rows")
        table = self.rope.table(plan.longest)
        call = Pass(tokens, plan, caches, table, logit_rows, taps)
        if observer is not None:
            layers = range(self.config.kv_layers)
            probes = {layer: found for layer in layers if (found := observer.probes(layer))}
            rows = {layer: wanted for layer in layers if (wanted := observer.rows(layer))}
            call = replace(call, probes=probes, queries=rows)
        done = self._executor.run(call)
        if observer is not None:
            for layer, q in done.queries.items():
                observer.attended(layer, q)
        return ForwardResult(done.logits, tuple(done.taps[i] for i in taps))

    def fix_products(self) -> FixedProducts:
        """Have all linear layers keep a row's bits, whatever rows are beside it; see
        :mod:`paceline.decoder.products`. Returns which rules they have. Experts have products of
        their own."""
        matrices = [
            each
            for layer in self._layers
            for each in (layer.qkv, layer.out, layer.router, layer.gate_up, layer.down)
        ]
        layers = [each for each in matrices if isinstance(each, Linear)]
        experts = [each for each in matrices if isinstance(each, Experts)]
        self.products = fix_products([*layers, self._head], experts)
        return self.products

    def linears(self) -> list[Linear]:
        """One linear layer of every shape, in the order of layers, and the LM head."""
        shapes: dict[tuple[int, int], Linear] = {}
        for layer in self._layers:
            for _, each in linears_of(layer):
                shapes.setdefault((each.in_features, each.out_features), each)
        return [*shapes.values(), self._head]

    def with_layers(self, indices: Sequence[int]) -> Self:
        """A decoder over some of the layers, with the same weights; its caches have as many."""
        config = self.config
        windows = tuple(config.windows[index] for index in indices)
        ropes = tuple(config.ropes[index] for index in indices) if config.ropes else ()
        part = copy(self)
        delta = tuple(at for at, index in enumerate(indices) if index in config.delta_layers)
        part.config = replace(
            config, layers=len(windows), windows=windows, ropes=ropes, delta_layers=delta
        )
        part._layers = [self._layers[index] for index in indices]
        part._executor = Executor(part._record())
        return part

    @property
    def native(self) -> NativeProgram | None:
        """The program of :meth:`forward` for compiled kernels, on a CPU that has them."""
        return self._executor.native if self.device.type == "cpu" else None

    def _record(self) -> Program:
        """The operations of a forward pass."""
        config = self.config
        program = Recorder(heads_of(config), config.dtype, self.numerics)
        x, delta, recurrent = program.embed(self._embedding, config.embedding_scale), 0, 0
        for index, layer in enumerate(self._layers):
            inputs = record_entry(config, program, layer.norms[0], x, delta)
            if index:
                program.tap(x, index - 1)
            cache = index - recurrent if layer.delta is None else recurrent
            rope = config.ropes[index] if config.ropes else 0
            delta = record_layer(
                config, program, layer, x, inputs, cache, config.windows[index], rope
            )
            recurrent += layer.delta is not None
        program.add(x, delta, config.residual_scale)
        program.tap(x, len(self._layers) - 1)
        logits = program.multiply(
            program.add_norm(program.select(x), 0, self.final_norm), self._head
        )
        if config.logit_cap:
            program.cap_logits(logits, config.logit_cap)
        return program.finish()


def numerics_for(config: DecoderConfig, requested: str) -> str:
    """Numerics of the CPU for a model.

    Args:
        config: The model.
        requested: As :func:`paceline.kernels.choose_numerics` takes it. "auto" is "portable" for a
            model of which the processor's own numerics would not change a bit, and where they are
            slower.

    Returns:
        As :func:`paceline.kernels.choose_numerics` returns it.

    Raises:
        ValueError: The level in use does not have the requested numerics.
    """
    chosen = choose_numerics(requested)
    if requested != "auto":
        return chosen
    if chosen == "amx":  # tiles in attention alone are slower than FMAs for a single row
        multiplied = config.weights == "bfloat16"
    else:
        multiplied = config.kv_dtype == torch.bfloat16
    return chosen if multiplied else "portable"


def _check_names(config: DecoderConfig, weights: Mapping[str, Weight]) -> None:
    """Refuse tensors of layers that would be left out, such as biases or scales."""
    known = {"self_attn.rotary_emb.inv_freq", *layer_shapes(config)}
    for name in weights:
        *start, index, part = name.split(".", 3)
        if start != ["model", "layers"] or int(index) >= config.layers:
            continue
        own = known
        if int(index) in config.delta_layers:
            own = {each for each in known if not each.startswith("self_attn.")} | {*DELTA_TENSORS}
        if part not in own:
            raise UnsupportedModelError(
                f"tensor {name!r} is not part of a model of type {config.model_type!r} with this "
                "configuration"
            )
