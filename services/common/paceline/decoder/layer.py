"""One layer of the packed decoder: its tensors, and how its operations are recorded.

All layers of a model are recorded one after the other (:mod:`paceline.decoder.model`). A drafter
with a layer of its target's family, as heads for multi-token prediction are, records one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.decoder.config import DecoderConfig
from paceline.decoder.linear import Experts, Linear
from paceline.decoder.packed import Part
from paceline.kernels import Delta, Heads, Norm, Recorder, Routing


@dataclass(frozen=True)
class DecoderLayer:
    norms: tuple[Norm | None, ...]  # before and after attention and feed-forward block
    qkv: Linear  # with gates of attention, if there are any; or the inputs of `delta`
    delta: Delta | None
    head_norms: tuple[Norm, ...] | None  # of queries, of keys, and of values if they have one
    q_factors: Tensor | None  # on rotated queries, float32 `[head_dim]`
    sinks: Tensor | None
    out: Linear
    router: Linear | None  # scores of experts, if there are any
    choice: Tensor | None  # see :class:`paceline.kernels.program.Operation`
    # Norms of what the router reads, of what experts read and return, and of what the block beside
    # them returns; and factors on shares, by expert. None: there are none.
    expert_norms: tuple[Norm, Norm, Norm, Norm] | None
    expert_factors: Tensor | None
    # Gates and ups, and down projection, of a block beside the experts, and the gate of its output.
    shared: tuple[Linear, Linear, Linear | None] | None
    gate_up: Linear | Experts
    down: Linear | Experts
    scale: float = 1.0  # factor on what the layer returns
    shares: bool = False  # whether `qkv` has queries alone, and the cache is another layer's
    # Gates of the layer's own input, projection of the product, and its norm, if there is one.
    own_input: tuple[Linear, Linear, Norm] | None = None
    index: int = 0  # which part of all layers' inputs is its own


def linears_of(layer: DecoderLayer) -> Iterator[tuple[str, Linear]]:
    """Yield all linear layers of a layer, by name; experts by number."""
    for name in ("qkv", "out", "router", "gate_up", "down"):
        part = getattr(layer, name)
        if isinstance(part, Experts):
            yield from ((f"{name}.{index}", expert) for index, expert in enumerate(part.experts))
        elif part is not None:
            yield name, part
    for name, linear in zip(("gate_up", "down", "gate"), layer.shared or (), strict=False):
        if linear is not None:
            yield f"shared.{name}", linear
    if layer.own_input is not None:
        yield from zip(("own.gate", "own.projection"), layer.own_input[:2], strict=True)


def heads_of(config: DecoderConfig) -> Heads:
    """Return the attention heads of a model."""
    return Heads(
        config.q_heads, config.kv_heads, config.head_dim,
        config.attention_scale, config.attention_cap,
    )  # fmt: skip


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
    program: Recorder,
    layer: DecoderLayer,
    inputs: int,
    cache: int,
    rope: int = 0,
    q_rope: int | None = None,
) -> tuple[int, int]:
    """Record projections and rotation of a layer's attention, which write its keys and values, if
    it has its own.

    ``inputs`` have its first norm. Returns the queries, and all projections.
    """
    mixed = program.multiply(inputs, layer.qkv)
    if layer.shares:
        return program.rotate_queries(mixed, layer.head_norms, rope), mixed
    q = program.rotate(mixed, layer.head_norms, cache, rope, q_rope, layer.q_factors)
    return q, mixed


def record_layer(
    config: DecoderConfig,
    program: Recorder,
    layer: DecoderLayer,
    x: int,
    inputs: int,
    cache: int,
    window: int | None,
    rope: int = 0,
    own_inputs: int = 0,
) -> int:
    """Record a layer; returns what is to be added to ``x``, the residual stream, which includes
    what was before the layer; 0: nothing.

    ``inputs`` is what :func:`record_entry` returned for its first norm, ``cache`` the number of its
    keys and values in caches or of its recurrent states, ``window`` how many positions its
    attention reads (None: all), ``rope`` its rotary table, and ``own_inputs`` the inputs that each
    layer has of its own, if there are any.
    """
    _, after, before_mlp, after_mlp = layer.norms

    def leave(columns: int, norm: Norm | None) -> int:
        return columns if norm is None else program.add_norm(columns, 0, norm)

    if layer.delta is not None:
        mixed = program.multiply(inputs, layer.qkv)
        attended = program.delta(mixed, layer.delta, cache)
    else:
        scaled = (2 if config.rope_local else 1) if config.query_scale_beta else None
        q, mixed = record_heads(program, layer, inputs, cache, rope, scaled)
        attended = program.attend(q, cache, window, layer.sinks)
        if config.gated:
            program.sigmoid_gate(attended, mixed)
    delta = leave(program.multiply(attended, layer.out), after)
    between = record_entry(config, program, before_mlp, x, delta)
    delta = leave(_feed_forward(config, program, layer, between, x), after_mlp)
    if layer.own_input is not None:
        gate, projection, norm = layer.own_input
        program.add(x, delta, config.residual_scale)
        gated = program.gate(
            program.multiply(x, gate), gelu=config.gelu, ups=own_inputs, part=layer.index
        )
        delta = program.add_norm(program.multiply(gated, projection), 0, norm)
    if layer.scale != 1.0:
        program.add(x, delta, config.residual_scale)
        program.scale(x, layer.scale)
        delta = 0
    return delta


def _feed_forward(
    config: DecoderConfig, program: Recorder, layer: DecoderLayer, x: int, residual: int
) -> int:
    gate = partial(program.gate, gelu=config.gelu, limit=config.swiglu_limit)
    if layer.router is None:
        assert isinstance(layer.gate_up, Linear)
        assert isinstance(layer.down, Linear)
        gated = gate(program.multiply(x, layer.gate_up))
        return program.multiply(gated, layer.down)
    assert isinstance(layer.gate_up, Experts)
    assert isinstance(layer.down, Experts)
    routing = Routing(
        config.experts, config.experts_per_token, config.norm_topk_prob,
        config.sigmoid_shares, config.share_factor, config.min_share_sum,
    )  # fmt: skip
    scored, entering, norms = x, x, layer.expert_norms
    if norms is not None:
        scored, entering = (program.add_norm(residual, 0, norm) for norm in norms[:2])
    scores = program.multiply(scored, layer.router)
    routes = program.route(scores, routing, layer.choice, layer.expert_factors)
    gate_up = program.multiply_slots(program.spread(entering, routes), layer.gate_up)
    out = program.combine(program.multiply_slots(gate(gate_up), layer.down), routes)
    if layer.shared is not None:
        entry, exit_, opening = layer.shared
        shared = program.multiply(gate(program.multiply(x, entry)), exit_)
        if opening is not None:
            program.sigmoid_gate(shared, program.multiply(x, opening))
        if norms is not None:
            out, shared = program.add_norm(out, 0, norms[2]), program.add_norm(shared, 0, norms[3])
        program.add(out, shared)
    return out


def build_layer(config: DecoderConfig, parts: Mapping[str, Part], index: int = 0) -> DecoderLayer:
    """Return a layer, 0 for the first, of its packed parts, by their names; see
    :mod:`paceline.convert.Packer`."""

    def tensor(name: str) -> Tensor | None:
        part = parts.get(name)
        assert part is None or isinstance(part, Tensor)
        return part

    def norm(name: str) -> Norm | None:
        weight = tensor(name)
        return None if weight is None else Norm(weight, config.norm_eps)

    def linear(name: str) -> Linear:
        return Linear(parts[name], tensor(f"{name}.bias"))

    def feed_forward(name: str) -> Linear | Experts:
        if "router" not in parts:
            return linear(name)
        return Experts([linear(f"{name}.{expert}") for expert in range(config.experts)])

    q_norm, k_norm, delta = norm("q_norm"), norm("k_norm"), None
    if "delta.convolution" in parts:
        names = ("convolution", "rates", "bias")
        vectors: Any = {name: tensor(f"delta.{name}") for name in names}
        shape, delta_norm = config.delta, norm("delta.norm")
        assert shape is not None
        if delta_norm is not None:
            delta_norm = replace(delta_norm, eps=config.delta_eps or config.norm_eps)
        delta = Delta(shape, **vectors, norm=delta_norm, beta=config.delta_beta)
    head_norms: tuple[Norm, ...] | None = None
    if q_norm is not None and k_norm is not None:
        head_norms = q_norm, k_norm
    if head_norms is not None and (v_norm := norm("v_norm")) is not None:
        # Zeros that fill up a head make its mean square smaller: weights have the root of the share
        # of the rest as a factor, and the epsilon has the share.
        eps = config.norm_eps * float(v_norm.weight.max()) ** 2
        head_norms = tuple(replace(head_norm, eps=eps) for head_norm in (*head_norms, v_norm))
    scale = tensor("scale")
    expert_norms: Any = tuple(norm(f"expert_norms.{at}") for at in range(4))
    own_input = None
    if (own_norm := norm("own.norm")) is not None:
        own_input = linear("own.gate"), linear("own.projection"), own_norm
    shared = None
    if "shared.down" in parts:
        opening = linear("shared.gate") if "shared.gate" in parts else None
        shared = linear("shared.gate_up"), linear("shared.down"), opening
    return DecoderLayer(
        norms=tuple(norm(f"norms.{at}") for at in range(4)), qkv=linear("qkv"), delta=delta,
        head_norms=head_norms,
        q_factors=tensor("q_factors"), sinks=tensor("sinks"), out=linear("out"),
        router=linear("router") if "router" in parts else None, choice=tensor("choice"),
        expert_norms=None if None in expert_norms else expert_norms,
        expert_factors=tensor("expert_factors"),
        shared=shared, gate_up=feed_forward("gate_up"), down=feed_forward("down"),
        scale=1.0 if scale is None else float(scale), shares=index in config.shared_layers,
        own_input=own_input, index=index,
    )  # fmt: skip
