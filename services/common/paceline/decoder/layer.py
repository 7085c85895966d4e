"""One layer of the packed decoder: its tensors, and how its operations are recorded.

All layers of a model are recorded one after the other (:mod:`paceline.decoder.model`). A drafter
with a layer of its target's family, as heads for multi-token prediction are, records one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig, head_order
from paceline.decoder.experts import Experts
from paceline.decoder.families import DELTA_INPUTS, FAMILIES, delta_outs, expert_name
from paceline.decoder.packed import PackedWeights
from paceline.decoder.weights import Linear, Weight, fuse, in_int8, in_order, plain, take
from paceline.kernels import Delta, Heads, Norm, Recorder, Routing
from paceline.kernels.linear import PackedMatrix
from paceline.kernels.rotated import RotatedMatrix


@dataclass(frozen=True)
class DecoderLayer:
    """The parts of a layer."""

    norms: tuple[Norm | None, ...]  # before and after attention and feed-forward block
    qkv: Linear  # with gates of attention, if there are any; or the inputs of `delta`
    delta: Delta | None
    head_norms: tuple[Norm, Norm] | None  # of queries, of keys
    sinks: Tensor | None
    out: Linear
    router: Linear | None  # scores of experts, if there are any
    gate_up: Linear | Experts
    down: Linear | Experts


def linears_of(layer: DecoderLayer) -> Iterator[tuple[str, Linear]]:
    """All linear layers of a layer, by name; experts by number."""
    for name in ("qkv", "out", "router", "gate_up", "down"):
        found = getattr(layer, name)
        if isinstance(found, Experts):
            yield from ((f"{name}.{index}", each) for index, each in enumerate(found.experts))
        elif found is not None:
            yield name, found


def heads_of(config: DecoderConfig) -> Heads:
    """The attention heads of a model."""
    return Heads(
        config.q_heads, config.kv_heads, config.head_dim,
        config.attention_scale, config.attention_cap,
    )  # fmt: skip


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer with attention, by names without the prefix of the layer;
    those of experts are one by one."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in FAMILIES[config.model_type].layer_tensors(
        config.hidden,
        config.intermediate,
        config.head_dim,
        (config.q_heads, config.kv_heads),
        (config.qkv_bias, config.o_bias, config.mlp_bias),
        config.experts,
    ):
        if ".experts." in name:
            found |= {expert_name(name, expert): shape[1:] for expert in range(config.experts)}
        else:
            found[name] = shape
    if config.qk_norm:  # also of a family whose published models have none
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            found.setdefault(name, (config.head_dim,))
    return found


def record_entry(
    config: DecoderConfig, program: Recorder, norm: Norm | None, x: int, delta: int
) -> int:
    """Record ``x += delta`` (0: nothing) and the norm of it, if there is one; returns what the
    block behind it reads."""
    if norm is not None:
        return program.add_norm(x, delta, norm, config.residual_scale)
    if delta:
        program.add(x, delta, config.residual_scale)
    return x


def record_heads(
    program: Recorder, layer: DecoderLayer, inputs: int, cache: int, rope: int = 0
) -> tuple[int, int]:
    """Record projections and rotation of a layer's attention, which write its keys and values.

    ``inputs`` have its first norm. Returns the queries, and all projections.
    """
    mixed = program.multiply(inputs, layer.qkv)
    return program.rotate(mixed, layer.head_norms, cache, rope), mixed


def record_layer(
    config: DecoderConfig,
    program: Recorder,
    layer: DecoderLayer,
    x: int,
    inputs: int,
    cache: int,
    window: int | None,
    rope: int = 0,
) -> int:
    """Record a layer.

    Args:
        config: The model.
        program: The program.
        layer: The layer.
        x: The residual stream, which includes what was before the layer.
        inputs: What :func:`record_entry` returned for the layer's first norm.
        cache: Number of its keys and values in caches, or of its recurrent states.
        window: Positions that its attention reads; None: all.
        rope: Its rotary table.

    Returns:
        What is to be added to ``x``.
    """
    _, after, before_mlp, after_mlp = layer.norms

    def leave(columns: int, norm: Norm | None) -> int:
        return columns if norm is None else program.add_norm(columns, 0, norm)

    if layer.delta is not None:
        mixed = program.multiply(inputs, layer.qkv)
        attended = program.delta(mixed, layer.delta, cache)
    else:
        q, mixed = record_heads(program, layer, inputs, cache, rope)
        attended = program.attend(q, cache, window, layer.sinks)
        if FAMILIES[config.model_type].gated:
            program.sigmoid_gate(attended, mixed)
    delta = leave(program.multiply(attended, layer.out), after)
    between = record_entry(config, program, before_mlp, x, delta)
    return leave(_feed_forward(config, program, layer, between), after_mlp)


def _feed_forward(config: DecoderConfig, program: Recorder, layer: DecoderLayer, x: int) -> int:
    gate = partial(program.gate, gelu=config.gelu, limit=config.swiglu_limit)
    if layer.router is None:
        assert isinstance(layer.gate_up, Linear)
        assert isinstance(layer.down, Linear)
        gated = gate(program.multiply(x, layer.gate_up))
        return program.multiply(gated, layer.down)
    assert isinstance(layer.gate_up, Experts)
    assert isinstance(layer.down, Experts)
    routing = Routing(config.experts, config.experts_per_token, config.norm_topk_prob)
    routes = program.route(program.multiply(x, layer.router), routing)
    gate_up = program.multiply_slots(program.spread(x, routes), layer.gate_up)
    return program.combine(program.multiply_slots(gate(gate_up), layer.down), routes)


def read_norm(config: DecoderConfig, weights: Mapping[str, Weight], name: str, width: int) -> Norm:
    weight = plain(take(weights, f"{name}.weight", (width,)), torch.float32)
    return Norm(weight + config.norm_offset, config.norm_eps)


def load_layer(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    shared: PackedWeights | None,
    device: torch.device,
    index: int,
) -> DecoderLayer:
    base, family = f"model.layers.{index}.", FAMILIES[config.model_type]
    dim = config.head_dim
    q, kv, wide, hidden = (
        config.q_heads * dim, config.kv_heads * dim, config.intermediate, config.hidden
    )  # fmt: skip

    def fused(
        matrix: str, names: Sequence[str], outs: Sequence[int], ins: int, bias: bool,
        order: Tensor | None = None,
    ) -> Linear:  # fmt: skip
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
        return read_norm(config, weights, base + name, width)

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
    return DecoderLayer(
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
