"""Packs a model: its tensors, by their Hugging Face names, become the parts that it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.convert.config import head_order
from paceline.convert.families import (
    FAMILIES,
    delta_outs,
    layer_shapes,
    own_tensors,
    unread_tensors,
)
from paceline.convert.weights import Weight, fuse, in_columns, in_int8, in_order, plain, take
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.linear import Linear, is_rotated
from paceline.decoder.packed import Part
from paceline.kernels import DeltaShape
from paceline.kernels.quantised import QuantisedMatrix

_EMBEDDING = "model.embed_tokens.weight"


class Packer:
    """The parts of a model, each packed when it is asked for; nothing of it is kept."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Weight], device: torch.device | str
    ) -> None:
        self._config, self._weights, self._device = config, weights, torch.device(device)

    def outer(self) -> dict[str, Part]:
        """Return the parts beside the layers: "embedding" unless the head is used as one, "head"
        and "norm". Raises ``UnsupportedModelError`` if a tensor of a layer would be left out, such
        as a bias or a scale."""
        config, shape = self._config, (self._config.vocab_size, self._config.hidden)
        _check_names(config, self._weights)
        norm = self._norm("model.norm", config.hidden)
        head = take(self._weights, _EMBEDDING if config.tied else "lm_head.weight", shape)
        parts = {"norm": norm * config.logit_scale, **self._linear("head", "head", head, None)}
        inputs = [take(self._weights, name, shape) for (name, _), shape in own_tensors(config)]
        if inputs:
            table, projection, own_norm = inputs
            blocks = isinstance(table, QuantisedMatrix)
            parts["own.embedding"] = Linear(table).weight if blocks else plain(table, config.dtype)
            parts |= self._linear("own.projection", "own.projection", projection, None)
            parts["own.norm"] = plain(own_norm, torch.float32) * 0.5**0.5
        rotated = is_rotated(config.weights, self._device)
        if not config.tied or rotated:
            embedding = head if config.tied else take(self._weights, _EMBEDDING, shape)
            parts["embedding"] = plain(embedding, config.dtype).contiguous()
        return parts

    def layer(self, index: int) -> dict[str, Part]:
        """Return the parts of a layer, by the names that :func:`paceline.decoder.layer.build_layer`
        reads."""
        config, base = self._config, f"model.layers.{index}."
        family, dim = FAMILIES[config.model_type], config.head_dim
        kv_heads, width, projected = config.layer_heads(index)
        q, kv, hidden = config.q_heads * width, kv_heads * width, config.hidden
        experts, wide = config.feed_forward(index)
        parts: dict[str, Part] = {}

        def add(
            part: str, names: Iterable[str], outs: Sequence[int], ins: int, bias: bool,
            order: Tensor | None = None, columns: Tensor | None = None,
        ) -> None:  # fmt: skip
            names = [base + name for name in names]
            outs = outs if len(names) > 1 else [sum(outs)]

            def read(kind: str, *tail: int) -> Weight:
                pairs = zip(names, outs, strict=True)
                rows = fuse([take(self._weights, f"{n}.{kind}", (o, *tail)) for n, o in pairs])
                return rows if order is None else in_order(rows, order)

            added = plain(read("bias"), torch.float32) if bias else None
            full = f"layers.{index}.{part}"
            weight = read("weight", ins)
            weight = weight if columns is None else in_columns(weight, columns)
            parts.update(self._linear(part, full, weight, added))

        def add_mlp(part: str, names: Sequence[str], outs: Sequence[int], ins: int) -> None:
            if not experts:
                add(part, [f"mlp.{name}" for name in names], outs, ins, config.mlp_bias)
            for expert in range(experts):
                named = [f"mlp.experts.{expert}.{name}" for name in names]
                add(f"{part}.{expert}", named, outs, ins, config.mlp_bias)

        for place, name in enumerate(family.layer_norms(index in config.delta_layers)):
            if name:
                parts[f"norms.{place}"] = self._norm(base + name, hidden)
        if family.sinks:
            sinks = take(self._weights, f"{base}self_attn.sinks.weight", (config.q_heads,))
            parts["sinks"] = plain(sinks, torch.float32)
        if index in config.delta_layers:
            shape = config.delta
            assert shape is not None
            out, norm = family.delta_outputs
            parts |= self._delta(f"{base}linear_attn.", norm, family.delta_convolutions)
            names = [f"linear_attn.{name}" for name in family.delta_inputs]
            outs: tuple[int, ...] = tuple(delta_outs(name, shape) for name in family.delta_inputs)
            order = None if len(outs) > 2 else _delta_rows(shape)
            add("qkv", names, outs, hidden, False, order)
            add("out", [f"linear_attn.{out}"], (hidden,), shape.values, False)
        else:
            if config.qk_norm:
                widths = (q, kv) if family.qk_norm == "rows" else (width, width)
                order = head_order(config)
                head_norms = [
                    self._norm(f"{base}self_attn.{name}", width)[... if order is None else order]
                    for name, width in zip(("q_norm", "k_norm")[:projected], widths, strict=False)
                ]
                q_norm, k_norm = head_norms[0], head_norms[-1]  # of queries alone: not read
                if family.qk_norm == "after":
                    # A rotation keeps lengths, so the norms may be taken before it; their weights
                    # are in the scores alone, and all go to the queries.
                    parts["q_factors"] = q_norm * k_norm
                    q_norm = k_norm = torch.ones_like(q_norm)
                parts |= {"q_norm": q_norm, "k_norm": k_norm}
            order, columns = _rows_in_order(config), None
            names = [f"self_attn.{name}" for name in family.qkv]
            outs = (q * (1 + config.gated), kv, kv)
            if config.stored_heads:
                rows = _padded_rows(config, index)
                order, columns = torch.cat(rows), rows[0]
                names, outs = names[:projected], outs[:projected]
                places, share = _places(config, width), (width / dim) ** 0.5
                norms = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": torch.ones(width)}
                for name, tensor in norms.items():
                    parts[name] = plain(in_order(tensor, places), torch.float32) * share
            add("qkv", names, outs, hidden, config.qkv_bias, order)
            add("out", ["self_attn.o_proj"], (hidden,), q, config.o_bias, columns=columns)
        if inputs := config.layer_input:
            add("own.gate", ["per_layer_input_gate"], (inputs,), hidden, False)
            add("own.projection", ["per_layer_projection"], (hidden,), inputs, False)
            parts["own.norm"] = self._norm(f"{base}post_per_layer_input_norm", hidden)
        if family.scaled:
            parts["scale"] = plain(take(self._weights, f"{base}layer_scalar", (1,)), torch.float32)
        if experts:
            add("router", ["mlp.router"], (experts,), hidden, family.router_bias)
            if family.router_choice:
                choice = take(self._weights, f"{base}mlp.router.choice.bias", (experts,))
                parts["choice"] = plain(choice, torch.float32)
        if experts and family.expert_norms:
            scale = plain(take(self._weights, f"{base}router.scale", (hidden,)), torch.float32)
            parts["expert_norms.0"] = scale * hidden**-0.5
            for at, name in enumerate(family.expert_norms, start=1):
                parts[f"expert_norms.{at}"] = self._norm(base + name, hidden)
            factors = take(self._weights, f"{base}router.per_expert_scale", (experts,))
            parts["expert_factors"] = plain(factors, torch.float32)
        if experts and (shared := config.shared_intermediate):
            names = [f"{family.beside}.{name}" for name in family.gate_up]
            add("shared.gate_up", names, (shared, shared), hidden, False)
            add("shared.down", [f"{family.beside}.down_proj"], (hidden,), shared, False)
            if family.shared_gate:
                add("shared.gate", ["mlp.shared_expert_gate"], (1,), hidden, False)
        add_mlp("gate_up", family.gate_up, (wide, wide), hidden)
        add_mlp("down", ["down_proj"], (hidden,), wide)
        return parts

    def _norm(self, name: str, width: int) -> Tensor:
        return read_norm(self._config, self._weights, name, width)

    def _linear(self, part: str, name: str, weight: Weight, bias: Tensor | None) -> dict[str, Part]:
        int8 = self._config.weights == "int8" and part not in ("router", "shared.gate")
        made = Linear(in_int8(name, weight, bias, self._device) if int8 else weight, bias)
        if made.packed is not None or made.bias is None:
            return {part: made.weight}
        return {part: made.weight, f"{part}.bias": made.bias}

    def _delta(self, base: str, norm: str, convolutions: Sequence[str]) -> dict[str, Part]:
        """Return what a layer with the gated delta rule has besides its projections."""
        shape = self._config.delta
        assert shape is not None

        def vector(name: str, *size: int) -> Tensor:
            return plain(take(self._weights, base + name, size), torch.float32)

        outs = {name: delta_outs(name, shape) for name in convolutions}
        convolution = torch.cat(
            [vector(f"{name}.weight", count, 1, shape.taps) for name, count in outs.items()]
        )
        parts: dict[str, Part] = {"delta.convolution": convolution[:, 0].T.contiguous()}
        if not norm:
            return parts
        return parts | {
            "delta.rates": vector("A_log", shape.value_heads).exp(),
            "delta.bias": vector("dt_bias", shape.value_heads).contiguous(),
            "delta.norm": vector(f"{norm}.weight", shape.value_dim).contiguous(),
        }


def read_norm(
    config: DecoderConfig, weights: Mapping[str, Weight], name: str, width: int
) -> Tensor:
    """Return the factors of a norm, float32 ``[width]``."""
    return plain(take(weights, f"{name}.weight", (width,)), torch.float32) + config.norm_offset


def _rows_in_order(config: DecoderConfig) -> Tensor | None:
    """Return the rows of q, k and v with the dimensions of q and k in the order of the rotary
    table, and gates behind all of them."""
    order, dim = head_order(config), config.head_dim
    gated = config.gated
    if order is None and not gated:
        return None
    order = torch.arange(dim) if order is None else order
    wide = (1 + gated) * config.q_heads * dim
    queries = torch.arange(wide).view(config.q_heads, -1, dim)
    keys = torch.arange(config.kv_heads * dim).view(-1, dim) + wide
    values = keys + config.kv_heads * dim
    parts = [queries[:, 0, order], keys[:, order], values, queries[:, 1:]]
    return torch.cat([part.flatten() for part in parts])


def _places(config: DecoderConfig, width: int) -> Tensor:
    """Return where the dimensions of a padded head are in one of ``width``, int64 ``[head_dim]``;
    -1: nowhere. RoPE turns those half a head apart."""
    halves = torch.full((2, config.head_dim // 2), -1)
    halves[:, : width // 2] = torch.arange(width).view(2, -1)
    return halves.flatten()


def _padded_rows(config: DecoderConfig, layer: int) -> list[Tensor]:
    """Return the rows of the projections of a layer for padded queries, keys and values: KV heads
    are there for each of `kv_heads`."""
    kv_heads, width, projected = config.layer_heads(layer)
    place = _places(config, width)

    def rows(first: int, heads: int, times: int) -> Tensor:
        rows = (first + torch.arange(heads)[:, None]) * width + place
        return rows.masked_fill(place < 0, -1).repeat_interleave(times, 0).flatten()

    keys, values = config.q_heads, config.q_heads + kv_heads * (projected == 3)
    times, queries = config.kv_heads // kv_heads, rows(0, keys, 1)
    if projected == 1:
        return [queries]
    return [queries, rows(keys, kv_heads, times), rows(values, kv_heads, times)]


def _delta_rows(shape: DeltaShape) -> Tensor:
    """Return rows in the order of :class:`paceline.kernels.Delta`: of two projections, of queries,
    keys, values and gates and of betas and decays, which have the rows of a key head together; or
    of one, of factors, gates and values."""
    if not shape.key_dim:
        factors, gates, values = torch.arange(3 * shape.values).chunk(3)
        return torch.cat([factors, values, gates])
    group = shape.value_heads // shape.key_heads
    widths = (shape.key_dim, shape.key_dim, *[group * shape.value_dim] * 2)
    first = torch.arange(shape.key_heads * sum(widths)).view(shape.key_heads, -1)
    second = torch.arange(2 * shape.value_heads).view(shape.key_heads, -1) + first.numel()
    (q, k, v, z), (b, a) = first.split(widths, 1), second.split(group, 1)
    return torch.cat([part.flatten() for part in (q, k, v, b, a, z)])


def _check_names(config: DecoderConfig, weights: Mapping[str, Weight]) -> None:
    """Refuse tensors of layers that would be left out, such as biases or scales."""
    known: dict[int, set[str]] = {}  # names by layer
    for name in sorted(weights):  # the same error each time
        *start, number, part = name.split(".", 3)
        if start != ["model", "layers"] or (index := int(number)) >= config.layers:
            continue
        if index not in known:
            unread = "self_attn.rotary_emb.inv_freq", *unread_tensors(config, index)
            known[index] = {*unread, *layer_shapes(config, index)}
        if part not in known[index]:
            raise UnsupportedModelError(
                f"tensor {name!r} is not part of a model of type {config.model_type!r} with this "
                "configuration"
            )
