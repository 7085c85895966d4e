"""A forward pass as a program: operations over packed rows, recorded once and run many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels.attention import Probe
from paceline.kernels.caches import KVCacheView
from paceline.kernels.delta import Delta
from paceline.kernels.rows import Norm
from paceline.kernels.structures import LIMITS, PRODUCTS, SUMS
from paceline.kernels.trees import TreePlan

if TYPE_CHECKING:
    from paceline.kernels.linear import PackedMatrix
    from paceline.kernels.rotated import IntSums

MAX_EXPERTS = 1024

# Kinds of operations; :mod:`paceline.kernels.operations` has how each runs.
Kind = Enum(
    "Kind",
    "EMBED INPUT ADD_NORM MULTIPLY ROTATE ATTEND ATTEND_CONTEXT GATE ADD TAP SELECT CAP ROUTE "
    "SPREAD COMBINE CONVOLVE DELTA SIGMOID_GATE SCALE",
)


class Matrix(Protocol):
    """A linear layer."""

    out_features: int  # number of outputs
    packed: PackedMatrix | None  # the packed weight; None where only torch can multiply

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` in the type of ``x``."""

    def sums(self, x: Tensor) -> IntSums | None:
        """The product before its scales, if its sums are integers; None: it has no scales."""


class ExpertMatrices(Protocol):
    """The linear layers of the experts of a layer, which have one shape."""

    @property
    def experts(self) -> Sequence[Matrix]:
        """The matrix of each expert."""

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """``[slots, in]`` to ``[slots, out]``, each by its expert: int64 ``[slots]``, rising."""


@dataclass(frozen=True)
class Routing:
    """How rows are routed to experts."""

    experts: int  # experts of a layer, at most `MAX_EXPERTS`
    top: int  # experts of a row: those with the highest scores, the lower number among equal ones
    among: bool  # shares are divided by their sum over these experts
    sigmoid: bool = False  # shares are sigmoids of scores, not a softmax over all experts'
    factor: float = 1.0  # on shares
    min_sum: float = 0.0  # a smaller sum counts as this


class Extent(IntEnum):
    """Which rows a buffer holds, as in ``native/program.h``."""

    ALL, SLICE, SELECTED, SLOTS = range(4)


@dataclass(frozen=True)
class Buffer:
    """float32 ``[rows, width]`` (in the model's type where torch runs the operations)."""

    width: int
    extent: Extent


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model."""

    q_heads: int  # query heads
    kv_heads: int  # key and value heads
    dim: int  # width of a head
    scale: float | None = None  # factor on attention scores; None: `dim ** -0.5`
    cap: float = 0.0  # soft cap of attention scores, `cap * tanh(score / cap)`; 0: none

    @property
    def factor(self) -> float:
        """Factor on attention scores."""
        return self.dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Operation:
    """One operation; ``native/program.h`` says what each kind does."""

    kind: Kind  # kind of the operation
    source: int = 0  # buffer it reads
    delta: int = 0  # buffer it adds to `source`, or with the ups of GATE; 0: none
    out: int = 0  # buffer it writes
    # Layer of the caches, probes and taps that it uses; part of `delta` of GATE and CONVOLVE.
    layer: int = 0
    # Newest positions that ATTEND or ATTEND_CONTEXT reads, 0 for all; or CONVOLVE reads; columns
    # that have a norm of their own in ADD_NORM, 0 for all together.
    window: int = 0
    # Embedding `[V, hidden]` of EMBED, float32 or bfloat16, or packed; weights of the channels of
    # CONVOLVE.
    table: Tensor | PackedMatrix | None = None
    # The norm of ADD_NORM, or the norms of ROTATE: of query, key and maybe value heads, or of all
    # queries and all keys together, by the width of their weights.
    norms: tuple[Norm, ...] = ()
    # Heads that ROTATE reads; none of one kind: they are not in its source.
    heads: Heads | None = None
    matrix: Matrix | None = None  # the linear layer of MULTIPLY
    rope: int = 0  # which table of the run ROTATE uses for keys
    q_rope: int = 0  # which one for queries
    # On rotated queries of ROTATE, float32 `[dim]`, or on shares of ROUTE, `[experts]`; None: none.
    factors: Tensor | None = None
    # Factor on the delta of ADD_NORM and ADD, the rows of EMBED and SCALE, the shares of ROUTE; cap
    # of CAP.
    factor: float = 1.0
    gelu: bool = False  # whether the activation of GATE is GELU (its form with tanh), not SiLU
    # Limit of the gates and ups of GATE, in the form of gpt-oss; 0: none. Of ROUTE, `min_sum`.
    limit: float = 0.0
    # Sinks of ATTEND, float32 `[Hq]`: one extra logit per head in the softmax denominator.
    sinks: Tensor | None = None
    routing: Routing | None = None  # how ROUTE chooses experts
    # Added to shares where ROUTE chooses experts by them, float32 `[experts]`; None: scores choose.
    choice: Tensor | None = None
    # The linear layers of MULTIPLY over slots, instead of `matrix`.
    experts: ExpertMatrices | None = None
    rule: Delta | None = None  # the layer of DELTA, whose `layer` counts such layers

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All linear layers of MULTIPLY."""
        if self.experts is not None:
            return tuple(self.experts.experts)
        return () if self.matrix is None else (self.matrix,)


@dataclass(frozen=True)
class Context:
    """Keys and values that all rows of a sequence attend to."""

    cache: KVCacheView  # its length: keys and values are in its first slots
    length: int  # number of these slots, 1 or more


@dataclass(frozen=True)
class Pass:
    """Arguments of one run."""

    tokens: Tensor | None  # int64 `[M]`; None for a program that begins with INPUT
    plan: TreePlan  # query blocks of the M rows
    caches: Sequence[KVCacheView]  # KV by sequence
    # Cosines, then sines, float32 `[positions, D]`; several kinds of tables are `[kinds, positions,
    # D]`.
    table: Tensor
    selection: Tensor | None = None  # rows that need logits, int64 `[R]`; None: all
    taps: Sequence[int] = ()  # layers whose outputs are wanted
    # Attention scores to record, by layer.
    probes: Mapping[int, Sequence[Probe]] = field(default_factory=dict)
    # Rows whose queries are wanted, by layer.
    queries: Mapping[int, Sequence[int]] = field(default_factory=dict)
    contexts: Sequence[Context] = ()  # contexts by sequence, for a program with ATTEND_CONTEXT
    inputs: Tensor | None = None  # `[M, width]` of INPUT, float32 or bfloat16


@dataclass(frozen=True)
class PassResult:
    """Result of a run."""

    # `[R, V]`, float32 from a native call, else in the model's type; empty from a program without
    # logits.
    logits: Tensor
    # By layer, its output `[M, hidden]` in the model's type; `[R, hidden]` where it was recorded
    # after the selection.
    taps: Mapping[int, Tensor]
    # By layer, the queries after RoPE that were wanted, float32 `[n, Hq, D]`.
    queries: Mapping[int, Tensor]


class Rule(NamedTuple):
    """How one part of a pass is computed, as far as its bits depend on it. Passes with equal rules,
    weights and inputs have equal bits."""

    region: str  # the part, such as "linear layer"
    case: str  # which of them, such as a format; empty: all
    implementation: str  # how it is computed, such as the order of sums
    constants: Mapping[str, str]  # numbers and digests that fix the rest


@dataclass(frozen=True)
class Program:
    """Recorded operations; :class:`paceline.kernels.Executor` runs them."""

    # The operations in order; if rows are selected, the last one writes buffer 0, the logits.
    operations: tuple[Operation, ...]
    selecting: int  # index of the first operation over selected rows; without any, their number
    buffers: tuple[Buffer, ...]  # buffers by number
    heads: Heads  # heads of the attention
    layers: int  # layers that the caches must have
    dtype: torch.dtype  # data type of the model
    top: int = 0  # experts of a row, which are its slots; 0 without experts
    # How compiled kernels multiply bfloat16 weights and caches, as
    # `paceline.kernels.choose_numerics` returns it.
    numerics: str = "portable"

    @property
    def recurrent(self) -> bool:
        """Whether caches need recurrent states."""
        return any(op.kind == Kind.DELTA for op in self.operations)

    def rules(self, kv: torch.dtype) -> list[Rule]:
        """What the bits of compiled kernels depend on, with keys and values of a type."""
        rules, others = dict[str, Rule](), set[str]()
        for op in self.operations:
            packed = [matrix.packed for matrix in op.matrices]
            for matrix in (op.table, *packed):
                if matrix is not None and not isinstance(matrix, Tensor):
                    rule = Rule("linear layer", *matrix.arithmetic(self.numerics))
                    rules[repr(rule)] = rule
            if not op.matrices:
                others.add(op.kind.name.lower())
        code = PRODUCTS[self.numerics] if kv == torch.bfloat16 else PRODUCTS["portable"]
        chunk = {"chunk": str(LIMITS["CHUNK"])}
        kind = str(kv).removeprefix("torch.")
        attention = Rule("attention", kind, f"{SUMS[code]}, softmax by chunks", chunk)
        alone = Rule("rows", ", ".join(sorted(others)), "float32, each row alone", {})
        return [*rules.values(), attention, alone]


class Recorder:
    """Records a program: each method adds an operation and returns the buffer it writes.

    A buffer's memory is used again for others once nothing reads it any more.
    """

    def __init__(self, heads: Heads, dtype: torch.dtype, numerics: str = "portable") -> None:
        """Begin a program of a model with these heads and this type; ``numerics`` as in
        :class:`Program`."""
        self._heads = heads
        self._dtype = dtype
        self._numerics = numerics
        self._operations: list[Operation] = []
        self._buffers = [Buffer(0, Extent.SELECTED)]
        self._layers = 0
        self._top = 0

    def embed(self, table: Tensor | PackedMatrix, factor: float = 1.0) -> int:
        """The rows of ``table`` ``[V, width]`` for the tokens, times a factor: the residual
        stream, or, later in the program, another input."""
        if isinstance(table, Tensor):
            width, table = table.shape[1], table.contiguous()
        else:
            width = table.ins
        extent = Extent.SLICE if self._operations else Extent.ALL
        return self._add(Kind.EMBED, width, extent, table=table, factor=factor)

    def input(self, width: int) -> int:
        """The run's ``inputs``."""
        return self._add(Kind.INPUT, width, Extent.ALL)

    def add_norm(self, x: int, delta: int, norm: Norm, factor: float = 1.0) -> int:
        """``x += delta * factor`` (delta 0: nothing), then the norm of it, or of each of its parts
        as wide as the norm."""
        extent = Extent(max(self._buffers[x].extent, Extent.SLICE))
        width, wide = self._buffers[x].width, len(norm.weight)
        return self._add(
            Kind.ADD_NORM, width, extent, source=x, delta=delta, norms=(norm,), factor=factor,
            window=wide if wide < width else 0,
        )  # fmt: skip

    def multiply(self, x: int, matrix: Matrix) -> int:
        """A linear layer."""
        extent = Extent(max(self._buffers[x].extent, Extent.SLICE))
        return self._add(Kind.MULTIPLY, matrix.out_features, extent, source=x, matrix=matrix)

    def rotate(
        self,
        heads: int,
        norms: tuple[Norm, ...] | None,
        layer: int,
        rope: int = 0,
        q_rope: int | None = None,
        factors: Tensor | None = None,
    ) -> int:
        """Queries, keys and values: queries after RoPE by one of the run's tables (``q_rope``, or
        ``rope``), times factors; keys and values go to the caches."""
        q_rope = rope if q_rope is None else q_rope
        return self._rotate(
            heads, norms, layer, self._heads, rope=rope, q_rope=q_rope, factors=factors
        )

    def rotate_queries(
        self, heads: int, norms: tuple[Norm, ...] | None = None, rope: int = 0
    ) -> int:
        """Queries alone."""
        heads_of = replace(self._heads, kv_heads=0)
        return self._rotate(heads, norms, 0, heads_of, rope=rope, q_rope=rope)

    def write(self, heads: int, norms: tuple[Norm, Norm] | None, layer: int) -> None:
        """Keys and values alone: they go to the caches."""
        self._rotate(heads, norms, layer, replace(self._heads, q_heads=0))

    def attend(self, q: int, layer: int, window: int | None, sinks: Tensor | None = None) -> int:
        """Tree attention over the caches of a layer; ``sinks`` as in :class:`Operation`."""
        return self._attend(Kind.ATTEND, q, layer, window, sinks)

    def attend_context(self, q: int, layer: int, window: int | None) -> int:
        """Attention over the contexts; all rows of a sequence attend to the same keys."""
        return self._attend(Kind.ATTEND_CONTEXT, q, layer, window)

    def delta(self, x: int, rule: Delta, layer: int) -> int:
        """The gated delta rule, or a short convolution, over the states of a layer; ``x`` as in
        :class:`Delta`."""
        width = rule.shape.value_heads * rule.shape.value_dim
        return self._add(Kind.DELTA, width, Extent.SLICE, source=x, rule=rule, layer=layer)

    def scale(self, x: int, factor: float) -> None:
        """``x *= factor``."""
        self._operations.append(Operation(Kind.SCALE, source=x, factor=factor))

    def sigmoid_gate(self, x: int, gates: int) -> None:
        """``x *= sigmoid`` of the last columns of ``gates``, or of its only one."""
        self._operations.append(Operation(Kind.SIGMOID_GATE, source=x, delta=gates))

    def gate(
        self, gate_up: int, *, gelu: bool = False, limit: float = 0.0, ups: int = 0, part: int = 0
    ) -> int:
        """``silu(gate) * up``, or ``gelu(gate) * up`` with the form that uses tanh, or the form of
        gpt-oss with a limit. ``gate_up`` has gates, then ups; or gates alone, and their ups are a
        part of ``ups`` as wide, 0 for the first."""
        of = self._buffers[gate_up]
        return self._add(
            Kind.GATE, of.width if ups else of.width // 2, of.extent, source=gate_up, delta=ups,
            layer=part, gelu=gelu, limit=limit,
        )  # fmt: skip

    def route(
        self, scores: int, routing: Routing, choice: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> int:  # fmt: skip
        """The experts of each row by the scores of all, and their shares: the routes. ``choice``
        and ``factors`` as in :class:`Operation`."""
        self._top = routing.top
        return self._add(
            Kind.ROUTE, 2 * routing.top, Extent.SLICE, source=scores, routing=routing,
            choice=choice, factor=routing.factor, factors=factors, limit=routing.min_sum,
        )  # fmt: skip

    def spread(self, x: int, routes: int) -> int:
        """A copy of each row for each of its experts: slots, sorted by expert."""
        return self._add(Kind.SPREAD, self._buffers[x].width, Extent.SLOTS, source=x, delta=routes)

    def multiply_slots(self, x: int, experts: ExpertMatrices) -> int:
        """A linear layer of its expert for each slot."""
        width = experts.experts[0].out_features
        return self._add(Kind.MULTIPLY, width, Extent.SLOTS, source=x, experts=experts)

    def combine(self, x: int, routes: int) -> int:
        """The sum of a row's slots times the shares of their experts."""
        return self._add(Kind.COMBINE, self._buffers[x].width, Extent.SLICE, source=x, delta=routes)

    def convolve(self, x: int, weights: int, base: Tensor, which: int) -> int:
        """:func:`~paceline.kernels.rows.convolve_blocks` of the plan's blocks, all as long."""
        return self._add(
            Kind.CONVOLVE, self._buffers[x].width, Extent.SLICE, source=x, delta=weights,
            table=base, layer=which, window=len(base),
        )  # fmt: skip

    def add(self, x: int, delta: int, factor: float = 1.0) -> None:
        """``x += delta * factor``."""
        self._operations.append(Operation(Kind.ADD, source=x, delta=delta, factor=factor))

    def cap_logits(self, logits: int, cap: float) -> None:
        """``logits = cap * tanh(logits / cap)``; the last operation."""
        self._operations.append(Operation(Kind.CAP, source=logits, out=logits, factor=cap))

    def tap(self, x: int, layer: int) -> None:
        """``x`` as the output of a layer, where a run wants it."""
        self._operations.append(Operation(Kind.TAP, source=x, layer=layer))

    def keep_all(self, x: int) -> int:
        """Return ``x``, of which rows will be selected: its buffer holds the rows of all slices."""
        self._buffers[x] = replace(self._buffers[x], extent=Extent.ALL)
        return x

    def select(self, x: int) -> int:
        """The rows that need logits; all operations after it work on these."""
        return self._add(Kind.SELECT, self._buffers[x].width, Extent.SELECTED, source=x)

    def finish(self) -> Program:
        """The program; if rows were selected, its last operation writes the logits."""
        kinds = [op.kind for op in self._operations]
        selecting = kinds.index(Kind.SELECT) if Kind.SELECT in kinds else len(kinds)
        operations, buffers = self._share_buffers(selecting < len(kinds))
        return Program(
            operations=tuple(operations), selecting=selecting, buffers=tuple(buffers),
            heads=self._heads, layers=self._layers, dtype=self._dtype, top=self._top,
            numerics=self._numerics,
        )  # fmt: skip

    def _add(self, kind: Kind, width: int, extent: Extent, **fields: object) -> int:
        self._buffers.append(Buffer(width, extent))
        out = len(self._buffers) - 1
        self._operations.append(Operation(kind, out=out, **fields))  # type: ignore[arg-type]
        return out

    def _rotate(
        self, source: int, norms: tuple[Norm, ...] | None, layer: int, heads: Heads, **more: Any
    ) -> int:
        self._layers = max(self._layers, layer + 1)
        width = heads.q_heads * heads.dim
        return self._add(
            Kind.ROTATE, width, Extent.SLICE, source=source, norms=norms or (), layer=layer,
            heads=heads, **more,
        )  # fmt: skip

    def _attend(
        self, kind: Kind, q: int, layer: int, window: int | None, sinks: Tensor | None = None
    ) -> int:
        width = self._buffers[q].width
        return self._add(
            kind, width, Extent.SLICE, source=q, layer=layer, window=window or 0, sinks=sinks
        )

    def _share_buffers(self, logits: bool) -> tuple[list[Operation], list[Buffer]]:
        """The operations with the fewest buffers, and these; what the last one writes is 0."""
        last = {b: i for i, o in enumerate(self._operations) for b in (o.source, o.delta, o.out)}
        operations: list[Operation] = []
        buffers, free = [self._buffers[0]], list[int]()
        number = {0: 0, self._operations[-1].out: 0} if logits else {0: 0}
        for index, op in enumerate(self._operations):
            if op.out not in number:
                wanted = self._buffers[op.out]
                place = next((f for f in free if buffers[f] == wanted), None)
                if place is None:
                    buffers.append(wanted)
                    place = len(buffers) - 1
                else:
                    free.remove(place)
                number[op.out] = place
            operations.append(
                replace(op, source=number[op.source], delta=number[op.delta], out=number[op.out])
            )
            used = {op.source, op.delta, op.out} - {0}
            free += [number[b] for b in used if last[b] == index]
        if logits:
            buffers[0] = self._buffers[self._operations[-1].out]
        return operations, buffers
