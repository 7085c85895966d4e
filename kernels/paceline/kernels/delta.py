"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), and gated short convolutions (LFM2),
over token trees, and their states.

A layer keeps a state of fixed size for each sequence instead of keys and values. ``native/delta.h``
has the operations; their order for a token is the same in prefill, decoding and trees.

A pass never changes the states it begins with: it stores those behind its rows beside them. So a
failed step can be run again. Rows that may be rejected are not in the stored states. Their inputs
are logged; the next pass runs those that were accepted again, without outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import address
from paceline.kernels.rows import Norm
from paceline.kernels.structures import CDelta, CStates
from paceline.kernels.trees import QueryBlock

if TYPE_CHECKING:
    from paceline.kernels.program import Pass


@dataclass(frozen=True)
class DeltaShape:
    """Shape of all layers with the gated delta rule, or with short convolutions."""

    layers: int  # number of these layers
    key_heads: int  # heads of queries and keys, Hk
    value_heads: int  # heads of values, Hv, a multiple of Hk; each has a state
    key_dim: int  # width of a query and a key, Dk; 0: the layers are short convolutions
    value_dim: int  # width of a value, Dv
    taps: int  # tokens that the convolution reads, 2 to `MAX_TAPS`

    @property
    def channels(self) -> int:
        """Values of a row that the convolution reads: queries, keys and values; or factors and
        values."""
        keys = self.key_heads * self.key_dim
        return 2 * keys + self.values if keys else 2 * self.values

    @property
    def values(self) -> int:
        """Values of a row."""
        return self.value_heads * self.value_dim

    @property
    def logged(self) -> int:
        """Values that change a state: channels, betas and decays of a row."""
        return self.channels + (2 * self.value_heads if self.key_dim else 0)

    @property
    def byte_size(self) -> int:
        """Bytes of the states of one sequence at one position."""
        state = self.value_heads * self.key_dim * self.value_dim
        return 4 * self.layers * (state + (self.taps - 1) * self.channels)


@dataclass(frozen=True)
class Delta:
    """A layer. A row of its input has queries, keys and values (the channels), then betas and
    decays before their activations ``[Hv]``, then gates ``[Hv Dv]``. Of a short convolution it has
    factors, values and gates, ``[Hv Dv]`` each: outputs are gates times the convolved products.
    """

    shape: DeltaShape  # shape of all layers with the rule
    # Weights of the channels, or of the values of a short convolution, the newest token's last,
    # float32 `[taps, ...]`.
    convolution: Tensor
    # Rates of `exp(-rate softplus(x + bias))`, float32 `[Hv]`, and the norm of the outputs of a
    # head; None: it is a short convolution.
    rates: Tensor | None = None
    bias: Tensor | None = None
    norm: Norm | None = None
    beta: float = 1.0  # factor on betas

    def to_c(self) -> ctypes.Structure:
        """``Delta`` of ``native/delta.h``; the layer must outlive it."""
        s = self.shape
        delta = CDelta(
            s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.taps,
            address(self.convolution, "a convolution"),
        )  # fmt: skip
        if self.rates is not None and self.bias is not None and self.norm is not None:
            delta.rates, delta.bias = address(self.rates, "rates"), address(self.bias, "a bias")
            delta.norm, delta.eps = address(self.norm.weight, "a norm"), self.norm.eps
            delta.beta = self.beta
        return delta


class _Slot:
    """States at one position, and the logged rows behind them."""

    def __init__(self, shape: DeltaShape) -> None:
        state = (shape.layers, shape.value_heads, shape.key_dim, shape.value_dim)
        self.position: int | None = None  # None: nothing is stored
        self.rows = 0
        self.state = torch.zeros(state)
        self.window = torch.zeros(shape.layers, shape.taps - 1, shape.channels)
        self.log = torch.zeros(shape.layers, 0, shape.logged)

    def covers(self, position: int) -> bool:
        """Return whether the state at a position follows from it."""
        return self.position is not None and 0 <= position - self.position <= self.rows

    def copy(self, other: _Slot, rows: int) -> None:
        """Store what another slot has, with as many logged rows."""
        self.state.copy_(other.state)
        self.window.copy_(other.window)
        self.log = other.log[:, :rows].clone()
        self.position, self.rows = other.position, rows


class RecurrentStates:
    """States of one sequence: those that the next pass begins with, those that it writes, and a
    snapshot for other texts that begin alike."""

    def __init__(self, shape: DeltaShape) -> None:
        """Make the states of an empty text."""
        self.shape = shape
        with torch.inference_mode(False):  # tensors of inference mode are read-only outside of it
            self._slots = [_Slot(shape), _Slot(shape)]
        self._slots[0].position = 0
        self._snapshot: _Slot | None = None

    def _kept(self) -> list[_Slot]:
        return [slot for slot in (*self._slots, self._snapshot) if slot is not None]

    def _covering(self, position: int) -> _Slot | None:
        slots = [slot for slot in self._kept() if slot.covers(position)]
        return max(slots, key=lambda slot: slot.position or 0, default=None)

    def begin(self, start: int, drafted: int) -> tuple[_Slot, _Slot]:
        """Return the slots of a pass, what it begins with and what it writes, by the position of
        its first row and the number of rows at its end that will be logged. Raises ``ValueError``:
        the states at this position are not kept."""
        source = self._covering(start)
        if source is None and start:
            kept = [(slot.position, slot.rows) for slot in self._slots]
            raise ValueError(
                f"no recurrent states of position {start} are kept, but those of (position, rows "
                f"behind it) {kept}: compute the text again"
            )
        newest, other = sorted(self._slots, key=lambda slot: -(slot.position or 0))
        target = other if source is not other else newest
        target.position = None
        if target.log.shape[1] < drafted:
            with torch.inference_mode(False):
                target.log = torch.zeros(self.shape.layers, drafted, self.shape.logged)
        if source is None:
            target.state.zero_()
            target.window.zero_()
            source = target
        return source, target

    def compact(self, slots: Sequence[int], start: int) -> None:
        """Move logged rows as the KV of accepted nodes: from ``slots`` to ``start`` on."""
        newest = max(self._slots, key=lambda slot: slot.position or 0)
        base = newest.position or 0
        moved = [
            (slot - base, to - base) for to, slot in enumerate(slots, start) if slot - base >= 0
        ]
        if moved:
            sources, targets = map(list, zip(*moved, strict=True))
            newest.log[:, targets] = newest.log[:, sources]

    def take_snapshot(self, position: int) -> None:
        """Keep the states at a position, if they are stored without logged rows."""
        slot = self._covering(position)
        if slot is not None and slot.position == position:
            with torch.inference_mode(False):
                self._snapshot = self._snapshot or _Slot(self.shape)
            self._snapshot.copy(slot, 0)

    def reusable(self, tokens: int) -> int:
        """Return the longest prefix of at most so many committed tokens whose states are kept."""
        return max(
            (
                min(tokens, slot.position + slot.rows)
                for slot in self._kept()
                if slot.position is not None and slot.position <= tokens
            ),
            default=0,
        )

    def copy_prefix(self, source: RecurrentStates, tokens: int) -> None:
        """Take over the states behind so many tokens of another sequence. Raises ``ValueError`` if
        they are not kept; see :meth:`reusable`."""
        slot = source._covering(tokens)
        if slot is None or slot.position is None:
            if tokens:
                raise ValueError(f"no recurrent states of position {tokens} are kept")
            return
        self._slots[0].copy(slot, tokens - slot.position)
        self._slots[1].position = self._snapshot = None

    def assume(self, position: int) -> None:
        """Pretend that what is stored belongs to a position, for measurements."""
        self._slots[0].position, self._slots[1].position = position, None
        self._slots[0].rows = 0


@dataclass(frozen=True)
class _Step:
    """The states of a sequence in a pass."""

    start: int
    stop: int
    drafted: int
    source: _Slot
    target: _Slot

    @property
    def replayed(self) -> int:
        """Logged rows between the states and the first row."""
        return 0 if self.source.position is None else self.start - self.source.position


class DeltaPass:
    """The states of all sequences in one pass."""

    def __init__(self, call: Pass) -> None:
        """Begin it. Raises ``ValueError``: states that it needs are not kept, or a cache has
        none."""
        blocks = call.plan.blocks
        last = {block.sequence: index for index, block in enumerate(blocks)}
        # Rows of each block that the stored states will include.
        self.committed = [
            block.length if last[block.sequence] != index else _committed(block)
            for index, block in enumerate(blocks)
        ]
        starts: dict[int, int] = {}
        for block in blocks:
            starts.setdefault(block.sequence, block.start)
        self.steps: list[_Step | None] = []  # step of each sequence; None: it has no block
        for index, cache in enumerate(call.caches):
            if index not in starts:
                self.steps.append(None)
                continue
            states: RecurrentStates | None = getattr(cache, "states", None)
            if states is None:
                raise ValueError(
                    f"cache {index} has no recurrent states, which this model needs; make it from "
                    "the model's configuration"
                )
            final = blocks[last[index]]
            drafted = final.length - self.committed[last[index]]
            slots = states.begin(starts[index], drafted)
            self.steps.append(_Step(starts[index], final.stop, drafted, *slots))

    def finish(self) -> None:
        """The pass has succeeded: what it wrote is stored."""
        for step in self.steps:
            if step is not None:
                step.target.position, step.target.rows = step.stop - step.drafted, step.drafted

    def to_c(self) -> tuple[ctypes.Array[Any], ctypes.Array[ctypes.c_int64]]:
        """``States`` of each sequence, and the committed rows of each block."""
        states = (CStates * len(self.steps))()
        for row, step in zip(states, self.steps, strict=True):
            if step is None:
                continue
            row.start, row.replayed = step.start, step.replayed
            for slot, name in ((step.source, "from"), (step.target, "to")):
                setattr(row, f"{name}_rows", slot.log.shape[1])
                setattr(row, "from_" if name == "from" else "to", slot.state.data_ptr())
                setattr(row, f"{name}_window", slot.window.data_ptr())
                setattr(row, f"{name}_log", slot.log.data_ptr())
        return states, (ctypes.c_int64 * len(self.committed))(*self.committed)


def _committed(last: QueryBlock) -> int:
    """Return the stored rows of a sequence's last block: all of a text, the root of a tree."""
    if last.final:
        return last.length
    roots = 1 if last.parents is None else last.parents.count(-1)
    return 1 if roots == 1 else 0
