"""The packed decoder: one forward pass over the query blocks of many sequences.

The pass is recorded once as a :class:`paceline.kernels.Program`. The residual stream, norms and
RoPE are float32 for bfloat16 weights too; the compiled kernels keep all activations in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig, Rope, UnsupportedModelError, head_order
from paceline.decoder.device import DeviceLost
from paceline.decoder.experts import Experts
from paceline.decoder.families import (
    DELTA_INPUTS,
    DELTA_TENSORS,
    FAMILIES,
    delta_outs,
    expert_name,
)
from paceline.decoder.model_source import ModelSource
from paceline.decoder.packed import PackedWeights
from paceline.decoder.products import Products, fix_products
from paceline.decoder.ranks import Ranks
from paceline.decoder.sources import open_model
from paceline.decoder.weights import (
    Linear,
    Weight,
    fuse,
    in_int8,
    in_order,
    is_rotated,
    plain,
    take,
)
from paceline.kernels import (
    Delta,
    Executor,
    Heads,
    KVCacheView,
    Norm,
    Pass,
    Probe,
    Program,
    Recorder,
    Routing,
    TreePlan,
    choose_numerics,
)
from paceline.kernels.executor import NativeProgram
from paceline.kernels.linear import PackedMatrix
from paceline.kernels.rotated import RotatedMatrix

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward pass."""

    logits: Tensor
    """``[R, V]`` for the requested rows; float32 from the compiled kernels, else in the model's
    type."""

    taps: tuple[Tensor, ...] = ()
    """Per tapped layer, its output ``[M, hidden]`` in the model's type."""


@dataclass(frozen=True)
class _Layer:
    norms: tuple[Norm | None, ...]  # before and after attention and feed-forward block
    qkv: Linear  # with gates of attention, if there are any; or the inputs of `delta`
    delta: Delta | None
    head_norms: tuple[Norm, Norm] | None  # of queries, of keys
    sinks: Tensor | None
    out: Linear
    router: Linear | None  # scores of experts, if there are any
    gate_up: Linear | Experts
    down: Linear | Experts


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

    products: Products | None = None
    """How its products keep the bits of rows off the CPU; None: the library chooses by their
    number."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        device: torch.device | str,
        shared: PackedWeights | None = None,
        ranks: Ranks | None = None,
        numerics: str = "portable",
    ) -> None:
        """Build from tensors by their Hugging Face names; see :meth:`load`."""
        self.config = config
        """Its configuration."""
        self.numerics = numerics_for(config, numerics)
        """How its compiled kernels multiply bfloat16, as :func:`numerics_for` returns it."""
        self.device = torch.device(device)
        """Device on which the model runs."""
        self._ranks = ranks

        def large(name: str, key: str) -> Weight | PackedMatrix:
            if shared is not None:
                return shared.get(name)
            return take(weights, key, (config.vocab_size, config.hidden))

        norm = _norm(config, weights, "model.norm", config.hidden)
        self.final_norm = replace(norm, weight=norm.weight * config.logit_scale)
        """The norm before the LM head, with the model's factor on logits."""
        head = large("head", _EMBEDDING if config.tied else "lm_head.weight")
        own: Weight | PackedMatrix = head
        if ranks is not None:
            assert not isinstance(head, PackedMatrix)
            own = in_order(head, ranks.rows(config.vocab_size))

        def quantised(matrix: Weight | PackedMatrix) -> Weight | PackedMatrix | RotatedMatrix:
            int8 = config.weights == "int8"
            return in_int8("head", matrix, None, self.device) if int8 else matrix

        self._head = Linear(quantised(own))
        self._embedding: Tensor | PackedMatrix
        if not config.tied:
            embedding = large("embedding", _EMBEDDING)
            assert not isinstance(embedding, PackedMatrix)
            self._embedding = plain(embedding, config.dtype).contiguous()
        elif is_rotated(config.weights, self.device):
            self._embedding = Linear(head).weight
        else:
            self._embedding = self._head.weight if own is head else Linear(quantised(head)).weight
        self._layers = self._load_layers(
            partial(_layer, config, weights, shared, ranks, self.device)
        )
        _check_names(config, weights)
        self.rope = Rope(config, device)
        """Cosines and sines of positions."""
        self._executor = Executor(self._record())

    def _load_layers(self, load: Callable[[int], _Layer]) -> list[_Layer]:
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
        ranks: Ranks | None = None,
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
            ranks: The processes that share the model, of which each loads its part; None: one.
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
        try:
            with torch.inference_mode():
                return cls(config, found.weights(config, device), device, shared, ranks, numerics)
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
            found |= {f"layers.{index}.{name}": each.weight for name, each in _linears(layer)}
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

    def fix_products(self) -> Products:
        """Have all linear layers keep a row's bits, whatever rows are beside it; see
        :mod:`paceline.decoder.products`. Returns which rules they have. Experts have products of
        their own."""
        layers = [
            each
            for layer in self._layers
            for each in (layer.qkv, layer.out, layer.router, layer.gate_up, layer.down)
            if isinstance(each, Linear)
        ]
        self.products = fix_products([*layers, self._head])
        return self.products

    def linears(self) -> list[Linear]:
        """One linear layer of every shape, in the order of layers, and the LM head."""
        shapes: dict[tuple[int, int], Linear] = {}
        for layer in self._layers:
            for _, each in _linears(layer):
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
    def ranks(self) -> int:
        """Processes that share the model."""
        return 1 if self._ranks is None else self._ranks.size

    def lost(self) -> DeviceLost | None:
        """Why no step can run any more, if it is known without a call of the device."""
        return None

    @property
    def native(self) -> NativeProgram | None:
        """The program of :meth:`forward` for compiled kernels, on a CPU that has them."""
        return self._executor.native if self.device.type == "cpu" else None

    def _record(self) -> Program:
        """The operations of a forward pass."""
        config = self.config
        ranks, size = self._ranks, self.ranks
        heads = Heads(
            config.q_heads // size, config.kv_heads // size, config.head_dim,
            config.attention_scale, config.attention_cap,
        )  # fmt: skip
        all_gather = None if ranks is None else ranks.all_gather
        program = Recorder(heads, config.dtype, size, all_gather, self.numerics)
        scale = config.residual_scale
        x, delta = program.embed(self._embedding, config.embedding_scale), 0

        def enter(norm: Norm | None) -> int:
            if norm is not None:
                return program.add_norm(x, delta, norm, scale)
            if delta:
                program.add(x, delta, scale)
            return x

        def leave(columns: int, norm: Norm | None) -> int:
            outputs = program.all_gather(columns)
            return outputs if norm is None else program.add_norm(outputs, 0, norm)

        recurrent = 0
        for index, layer in enumerate(self._layers):
            before, after, before_mlp, after_mlp = layer.norms
            inputs = enter(before)
            if index:
                program.tap(x, index - 1)
            mixed = program.multiply(inputs, layer.qkv)
            if layer.delta is not None:
                attended = program.delta(mixed, layer.delta, recurrent)
                recurrent += 1
            else:
                at, rope = index - recurrent, config.ropes[index] if config.ropes else 0
                q = program.rotate(mixed, layer.head_norms, at, rope)
                attended = program.attend(q, at, config.windows[index], layer.sinks)
                if FAMILIES[config.model_type].gated:
                    program.sigmoid_gate(attended, mixed)
            delta = leave(program.multiply(program.all_gather(attended), layer.out), after)
            delta = leave(_feed_forward(config, program, layer, enter(before_mlp)), after_mlp)
        program.add(x, delta, scale)
        program.tap(x, len(self._layers) - 1)
        logits = program.all_gather(
            program.multiply(program.add_norm(program.select(x), 0, self.final_norm), self._head)
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


def _linears(layer: _Layer) -> Iterator[tuple[str, Linear]]:
    """All linear layers of a layer, by name; experts by number."""
    for name in ("qkv", "out", "router", "gate_up", "down"):
        found = getattr(layer, name)
        if isinstance(found, Experts):
            yield from ((f"{name}.{index}", each) for index, each in enumerate(found.experts))
        elif found is not None:
            yield name, found


def _feed_forward(config: DecoderConfig, program: Recorder, layer: _Layer, x: int) -> int:
    gate = partial(program.gate, gelu=config.gelu, limit=config.swiglu_limit)
    if layer.router is None:
        assert isinstance(layer.gate_up, Linear)
        assert isinstance(layer.down, Linear)
        gated = program.all_gather(gate(program.multiply(x, layer.gate_up)))
        return program.multiply(gated, layer.down)
    assert isinstance(layer.gate_up, Experts)
    assert isinstance(layer.down, Experts)
    routing = Routing(config.experts, config.experts_per_token, config.norm_topk_prob)
    routes = program.route(program.multiply(x, layer.router), routing)
    gate_up = program.multiply_slots(program.spread(x, routes), layer.gate_up)
    return program.combine(program.multiply_slots(gate(gate_up), layer.down), routes)


def _check_names(config: DecoderConfig, weights: Mapping[str, Weight]) -> None:
    """Refuse tensors of layers that would be left out, such as biases or scales."""
    layer = FAMILIES[config.model_type].layer_tensors(
        config.hidden,
        config.intermediate,
        config.head_dim,
        (config.q_heads, config.kv_heads),
        (config.qkv_bias, config.o_bias, config.mlp_bias),
        config.experts,
    )
    known = {"self_attn.rotary_emb.inv_freq"}
    for name, _ in layer:
        known |= {expert_name(name, expert) for expert in range(max(1, config.experts))}
    if config.qk_norm:
        known |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
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


def _norm(config: DecoderConfig, weights: Mapping[str, Weight], name: str, width: int) -> Norm:
    weight = plain(take(weights, f"{name}.weight", (width,)), torch.float32)
    return Norm(weight + config.norm_offset, config.norm_eps)


def _layer(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    shared: PackedWeights | None,
    ranks: Ranks | None,
    device: torch.device,
    index: int,
) -> _Layer:
    base, family = f"model.layers.{index}.", FAMILIES[config.model_type]
    dim = config.head_dim
    q, kv, wide, hidden = (
        config.q_heads * dim, config.kv_heads * dim, config.intermediate, config.hidden
    )  # fmt: skip

    def fused(
        matrix: str, names: Sequence[str], outs: Sequence[int], ins: int, bias: bool,
        order: Tensor | None = None,
    ) -> Linear:  # fmt: skip
        if ranks is not None:
            own = ranks.rows(*outs)
            order = own if order is None else order[own]
        if len(names) == 1:
            outs = [sum(outs)]

        def parts(kind: str, *tail: int) -> Weight:
            each = zip(names, outs, strict=True)
            rows = fuse([take(weights, f"{base}{n}.{kind}", (o, *tail)) for n, o in each])
            return rows if order is None else in_order(rows, order)

        name = f"layers.{index}.{matrix}"
        weight: Weight | PackedMatrix | RotatedMatrix
        weight = parts("weight", ins) if shared is None else shared.get(name)
        added = plain(parts("bias"), torch.float32) if bias else None
        if config.weights == "int8" and matrix != "router":
            weight = in_int8(name, weight, added, device)
        return Linear(weight, added)

    def norm(name: str, width: int) -> Norm:
        return _norm(config, weights, base + name, width)

    delta = None
    if index in config.delta_layers:
        delta = _delta(config, partial(take, weights), f"{base}linear_attn.")
    head_norms = None
    if config.qk_norm and delta is None:
        widths = (q, kv) if family.qk_norm == "rows" else (dim, dim)
        q_norm, k_norm = norm("self_attn.q_norm", widths[0]), norm("self_attn.k_norm", widths[1])
        order = head_order(config)
        if order is not None:
            q_norm, k_norm = (replace(n, weight=n.weight[order]) for n in (q_norm, k_norm))
        head_norms = (q_norm, k_norm)

    def feed_forward(matrix: str, names: Sequence[str], outs: Sequence[int], ins: int) -> Any:
        bias = config.mlp_bias
        if not config.experts:
            return fused(matrix, [f"mlp.{name}" for name in names], outs, ins, bias)
        return Experts(
            [
                fused(
                    f"{matrix}.{e}", [f"mlp.experts.{e}.{name}" for name in names], outs, ins, bias
                )
                for e in range(config.experts)
            ]
        )

    sinks = None
    if family.sinks:
        found = take(weights, f"{base}self_attn.sinks.weight", (config.q_heads,))
        sinks = plain(found, torch.float32)
    qkv, router = [f"self_attn.{name}" for name in family.qkv], None
    if config.experts:
        router = fused("router", ["mlp.router"], (config.experts,), hidden, family.router_bias)
    if delta is not None:
        names = [f"linear_attn.{name}" for name in DELTA_INPUTS]
        mixed = fused("qkv", names, delta_outs(delta.shape), hidden, False)
        heads = delta.shape.value_heads * delta.shape.value_dim
        out = fused("out", ["linear_attn.out_proj"], (hidden,), heads, False)
    else:
        outs = (q * (1 + family.gated), kv, kv)
        mixed = fused("qkv", qkv, outs, hidden, config.qkv_bias, _rows_in_order(config))
        out = fused("out", ["self_attn.o_proj"], (hidden,), q, config.o_bias)
    return _Layer(
        norms=tuple(norm(name, hidden) if name else None for name in family.norms),
        qkv=mixed,
        delta=delta,
        head_norms=head_norms,
        sinks=sinks,
        out=out,
        router=router,
        gate_up=feed_forward("gate_up", family.gate_up, (wide, wide), hidden),
        down=feed_forward("down", ["down_proj"], (hidden,), wide),
    )


def _delta(config: DecoderConfig, read: Callable[..., Weight], base: str) -> Delta:
    """What a layer with the gated delta rule has besides its projections."""
    shape = config.delta
    assert shape is not None

    def vector(name: str, *size: int) -> Tensor:
        return plain(read(base + name, size), torch.float32)

    return Delta(
        shape,
        convolution=vector("conv1d.weight", shape.channels, 1, shape.taps)[:, 0].T.contiguous(),
        rates=vector("A_log", shape.value_heads).exp(),
        bias=vector("dt_bias", shape.value_heads).contiguous(),
        norm=Norm(vector("norm.weight", shape.value_dim).contiguous(), config.norm_eps),
    )


def _rows_in_order(config: DecoderConfig) -> Tensor | None:
    """The rows of q, k and v with the dimensions of q and k in the order of the rotary table, and
    gates behind all of them."""
    order, dim = head_order(config), config.head_dim
    gated = FAMILIES[config.model_type].gated
    if order is None and not gated:
        return None
    order = torch.arange(dim) if order is None else order
    wide = (1 + gated) * config.q_heads * dim
    queries = torch.arange(wide).view(config.q_heads, -1, dim)
    keys = torch.arange(config.kv_heads * dim).view(-1, dim) + wide
    values = keys + config.kv_heads * dim
    parts = [queries[:, 0, order], keys[:, order], values, queries[:, 1:]]
    return torch.cat([part.flatten() for part in parts])
