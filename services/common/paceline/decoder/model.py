"""The packed decoder: one forward pass over the query blocks of many sequences.

The pass is recorded once as a :class:`paceline.kernels.Program`. The residual stream, norms and
RoPE are float32 for bfloat16 weights too; the compiled kernels keep all activations in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, Self

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig, Rope, UnsupportedModelError
from paceline.decoder.layer import build_layer, heads_of, linears_of, record_entry, record_layer
from paceline.decoder.linear import FixedProducts, Linear
from paceline.decoder.packed import Parts
from paceline.device import device_of
from paceline.kernels import (
    Executor,
    KVCacheView,
    Norm,
    Pass,
    Probe,
    Program,
    Recorder,
    Rule,
    TreePlan,
    choose_numerics,
    gumbel_noise_at,
)
from paceline.kernels.executor import NativeProgram
from paceline.kernels.linear import PackedMatrix

_SAMPLES = 4096  # positions and tokens of which the rules have digests


@dataclass(frozen=True)
class ForwardResult:
    # `[R, V]` for the requested rows; float32 from the compiled kernels, else in the model's type.
    logits: Tensor
    taps: tuple[Tensor, ...] = ()  # per tapped layer, its output `[M, hidden]` in the model's type


class AttentionObserver(Protocol):
    """Receives attention scores of a forward pass, without an effect on the pass."""

    def probes(self, layer: int) -> Sequence[Probe]:
        """Return scores to record in a layer, 0 for the first."""

    def rows(self, layer: int) -> Sequence[int]:
        """Return packed rows whose queries are wanted in a layer."""

    def attended(self, layer: int, q: Tensor) -> None:
        """Called after the pass for layers with wanted rows, with their queries after RoPE, float32
        ``[n, Hq, D]`` in the order of :meth:`rows`."""


class Decoder:
    """A language model over packed query blocks.

    On the CPU, if :func:`check_batch_invariance` holds, the bits of a token's logits depend neither
    on the rest of the batch nor on whether its ancestors are committed or nodes of the tree. Safe
    to call from several threads that use different caches.
    """

    mapped_bytes = 0  # of weights in the cache of a file, which the system counts as free

    # How its products keep the bits of rows off the CPU; None: the library chooses by their number.
    products: FixedProducts | None = None

    def __init__(
        self,
        config: DecoderConfig,
        parts: Parts,
        device: torch.device | str,
        numerics: str = "portable",
    ) -> None:
        """Build of packed parts; see :func:`config_for` and :func:`numerics_for`."""
        self.config = config
        self.numerics = numerics_for(config, numerics)
        self.device = torch.device(device)
        outer = parts.outer()
        norm, head, embedding = outer["norm"], outer["head"], outer.get("embedding")
        assert isinstance(norm, Tensor)
        self.final_norm = Norm(norm, config.norm_eps)  # with the model's factor on logits
        self._head = Linear(head)
        embedding = self._head.weight if embedding is None else embedding
        assert isinstance(embedding, Tensor | PackedMatrix)
        self._embedding = embedding
        # Inputs of layers: embedding, projection of the embedded tokens, and norm of its outputs.
        self._own_inputs: tuple[Tensor | PackedMatrix, Linear, Norm] | None = None
        if config.layer_input:
            table, own_norm = outer["own.embedding"], outer["own.norm"]
            assert isinstance(table, Tensor | PackedMatrix)
            assert isinstance(own_norm, Tensor)
            # Projected values count divided by the root of `hidden`: their norm's epsilon has it.
            last = Norm(own_norm, config.norm_eps * config.hidden)
            self._own_inputs = table, Linear(outer["own.projection"]), last
        self._layers = device_of(device).map(
            lambda index: build_layer(config, parts.layer(index), index), range(config.layers)
        )
        self.rope = Rope(config, device)
        try:
            self._executor = Executor(self._record())
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embedded tokens, int64 ``[n]``: float32 ``[n, hidden]``, before the model's factor
        on them."""
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
        """Run packed query blocks and write their keys and values into the caches, which have room
        up to ``block.stop``; the caller commits them.

        ``tokens``, int64 ``[M]``, are packed as in the plan, whose ``block.sequence`` indexes
        ``caches``. Logits are of ``logit_rows``, int64 ``[R]``, or of all; ``taps`` are layers
        whose outputs to return, 0 for the first. Raises ``ValueError`` if tokens and plan differ in
        length.
        """
        if tokens.shape != (plan.rows,):
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, plan has {plan.rows} rows")
        table = self.rope.table(plan.longest)
        call = Pass(tokens, plan, caches, table, logit_rows, taps)
        if observer is not None:
            layers = range(self.config.kv_layers)
            probes = {layer: recorded for layer in layers if (recorded := observer.probes(layer))}
            rows = {layer: wanted for layer in layers if (wanted := observer.rows(layer))}
            call = replace(call, probes=probes, queries=rows)
        done = self._executor.run(call)
        if observer is not None:
            for layer, q in done.queries.items():
                observer.attended(layer, q)
        return ForwardResult(done.logits, tuple(done.taps[i] for i in taps))

    def matrices(self) -> list[object]:
        """Return the linear layers of all layers, and of the head; routed experts' are one each,
        and layers without one have something else."""
        layers = [
            (layer.qkv, layer.out, layer.router, layer.gate_up, layer.down, *(layer.shared or ()))
            for layer in self._layers
        ]
        return [*chain.from_iterable(layers), self._head]

    def linears(self) -> list[Linear]:
        """Return one linear layer of every shape, in the order of layers, and the LM head."""
        shapes: dict[tuple[int, int], Linear] = {}
        for layer in self._layers:
            for _, linear in linears_of(layer):
                shapes.setdefault((linear.in_features, linear.out_features), linear)
        inputs = [] if self._own_inputs is None else [self._own_inputs[1]]
        return [*shapes.values(), *inputs, self._head]

    def with_layers(self, indices: Sequence[int]) -> Self:
        """Return a decoder over some of the layers, with the same weights; caches have as many."""
        config = self.config
        windows = tuple(config.windows[index] for index in indices)
        ropes = tuple(config.ropes[index] for index in indices) if config.ropes else ()
        part = copy(self)
        delta, shared = (
            tuple(at for at, index in enumerate(indices) if index in layers)
            for layers in (config.delta_layers, config.shared_layers)
        )
        part.config = replace(
            config, layers=len(windows), windows=windows, ropes=ropes, delta_layers=delta,
            shared_layers=shared,
        )  # fmt: skip
        part._layers = [self._layers[index] for index in indices]
        part._executor = Executor(part._record())
        return part

    @property
    def native(self) -> NativeProgram | None:
        """The program of :meth:`forward` for compiled kernels, on a CPU that has them."""
        return self._executor.native

    def rules(self) -> list[Rule]:
        """Return what the bits of tokens depend on, on a CPU, besides weights and text; empty where
        operations run one by one, whose sums PyTorch orders."""
        if self.native is None:
            return []
        config = self.config
        types = {"hidden": config.dtype, "weights": config.weights, "kv": config.kv_dtype}
        names = {name: str(kind).removeprefix("torch.") for name, kind in types.items()}
        angles = {"table": bits_of(self.rope.table(0)[..., :_SAMPLES, :])}
        noise = {"noise": bits_of(gumbel_noise_at(0, 0, torch.arange(_SAMPLES)))}
        return [
            Rule("numerics", "", self.numerics, names),
            *self.native.program.rules(config.kv_dtype),
            Rule("rotary embedding", "", "rounded from float64", angles),
            Rule("sampling", "", "argmax of filtered logits with Gumbel noise", noise),
        ]

    def _record(self) -> Program:
        """The operations of a forward pass."""
        config = self.config
        program = Recorder(heads_of(config), config.dtype, self.numerics)
        x, delta, own_inputs = program.embed(self._embedding, config.embedding_scale), 0, 0
        if self._own_inputs is not None:
            table, projection, norm = self._own_inputs
            own_inputs = program.add_norm(program.multiply(x, projection), 0, norm)
            program.add(own_inputs, program.embed(table), (config.layer_input / 2) ** 0.5)
        for index, layer in enumerate(self._layers):
            inputs = record_entry(config, program, layer.norms[0], x, delta)
            if index:
                program.tap(x, index - 1)
            rope = config.ropes[index] if config.ropes else 0
            delta = record_layer(
                config, program, layer, x, inputs, config.cache_of(index), config.windows[index],
                rope, own_inputs,
            )  # fmt: skip
        if delta:
            program.add(x, delta, config.residual_scale)
        program.tap(x, len(self._layers) - 1)
        logits = program.multiply(
            program.add_norm(program.select(x), 0, self.final_norm), self._head
        )
        if config.logit_cap:
            program.cap_logits(logits, config.logit_cap)
        return program.finish()


def bits_of(values: Tensor) -> str:
    """Return the SHA-256 (hex) of floats as float32, of which -0 and 0 are equal."""
    return hashlib.sha256((values.float() + 0.0).numpy().tobytes()).hexdigest()


def config_for(
    config: DecoderConfig,
    device: torch.device | str,
    kv_cache_dtype: str = "auto",
    max_context: int | None = None,
) -> DecoderConfig:
    """Return the configuration of a model that runs on a device.

    ``kv_cache_dtype`` is the type of its caches: float32, bfloat16, int8, or "auto" for the type of
    hidden states; others than "auto" are supported on the CPU. ``max_context`` is the longest text;
    None: the model's. Raises ``ValueError`` if there is no such type of caches on the device,
    ``UnsupportedModelError`` if it lacks what the model needs.
    """
    device_of(device).check_model(config, kv_cache_dtype)
    return config.with_kv(kv_cache_dtype).with_context(max_context)


def numerics_for(config: DecoderConfig, requested: str) -> str:
    """Return the numerics of the CPU for a model, requested and returned as by
    :func:`paceline.kernels.choose_numerics`. "auto" is "portable" for a model of which the
    processor's own numerics would not change a bit. Raises ``ValueError`` if the level in use does
    not have the requested ones."""
    halves = config.kv_dtype == torch.bfloat16
    multiplied = {"amx": halves or config.weights == "bfloat16", "avx512_bf16": halves}
    return choose_numerics(requested, [name for name, does in multiplied.items() if does])
