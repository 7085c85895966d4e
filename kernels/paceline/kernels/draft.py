"""Drafts of a model, for several texts in one native call (``native/draft.c``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import address, library
from paceline.kernels.executor import CACHE_TYPES, NativeProgram
from paceline.kernels.structures import CModel, DraftText

if TYPE_CHECKING:
    from paceline.kernels.linear import PackedMatrix

_OUT_OF_MEMORY = 1


@dataclass(frozen=True)
class DraftBlockModel:
    """The parts of a model of draft blocks beside its program (DSpark, section 3)."""

    # Program of hidden states `[n, states]` to the keys and values of contexts.
    context: NativeProgram
    length: int  # positions of a block
    levels: int  # the last of them, which predict
    mask: int  # token of the positions behind the anchor
    state_input: bool  # whether a block's positions read the newest states
    # The sequential head: W1 `[rows, rank]`, float32, and W2 `[R, rank]`, packed.
    head: tuple[Tensor, PackedMatrix] | None
    # The confidence head: weights of the hidden state `[hidden]`, by row of W1 the share of the
    # token before, and what its logits are divided by `[levels]`; all float32.
    confidence: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class StateText:
    """How a model of levels reads a text whose tokens come with states (EAGLE-3, section 3).

    Its program for levels reads its own tap 0 at the parents of the nodes.
    """

    program: NativeProgram  # tokens and states to logits and tap 0
    states: int  # width of the states of a position


class NativeDraft:
    """A model whose drafts are one native call. Used on one thread."""

    def __init__(
        self,
        program: NativeProgram,
        dtype: torch.dtype,
        ids: Tensor,
        block: DraftBlockModel | None = None,
        text: StateText | None = None,
    ) -> None:
        """Describe a model.

        Args:
            program: Tokens to logits: of a level, or of a block, whose tap 0 is what the LM head
                reads.
            dtype: Type of caches and states, float32 or bfloat16.
            ids: Token id of each logit, int64 ``[R]``, rising.
            block: The other parts of a model of blocks; None: a tree's levels run through the
                program one after the other.
            text: How a model of levels reads texts with states; None: it reads tokens alone.
        """
        self._kept: list[Any] = [program, ids, block, text]
        # Positions of a block; 0: a model of levels.
        self.length = 0 if block is None else block.length
        self._model = CModel(
            block=program.address, hidden=program.width, bf16=dtype == torch.bfloat16,
            kv_type=CACHE_TYPES.index(dtype), drafted=len(ids),
            ids=address(ids, "ids of drafted tokens"),
        )  # fmt: skip
        if text is not None:
            self._model.text, self._model.states = text.program.address, text.states
        if block is not None:
            self._add_block(block)
        self._draft: Callable[..., int] = library().paceline_draft

    def draft(self, texts: Sequence[DraftText], table: Tensor) -> None:
        """Draft a tree for each text, whose contexts have room for the new states and a block;
        their fields from ``drafted`` on are the result. ``table`` has cosines, then sines, of all
        positions, float32 ``[kinds, positions, D]``, or of one kind ``[positions, D]``. Raises
        ``MemoryError``, and ``IndexError`` for a token outside of the vocabulary."""
        count = len(texts)
        failed = self._draft(
            ctypes.addressof(self._model), (ctypes.c_void_p * count)(*map(ctypes.addressof, texts)),
            count, address(table, "table"), len(table) if table.dim() == 3 else 1, table.shape[-2],
            torch.get_num_threads(),
        )  # fmt: skip
        if failed == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for the drafts of {count} texts: draft for fewer")
        if failed:
            raise IndexError("a token is outside of the vocabulary of the drafter")

    def _add_block(self, block: DraftBlockModel) -> None:
        model = self._model
        model.context, model.states = block.context.address, block.context.width
        model.length, model.levels = block.length, block.levels
        model.mask, model.state_input = block.mask, block.state_input
        if block.head is not None:
            w1, w2 = block.head
            matrix = w2.matrix(block.context.numerics)
            self._kept.append(matrix)
            model.rank = w1.shape[1]
            model.w1, model.w2 = address(w1, "W1"), ctypes.addressof(matrix)
        if block.confidence is not None:
            model.confidence = address(block.confidence[0], "the confidence head")
            model.offsets = address(block.confidence[1], "offsets of confidences")
            model.temperatures = address(block.confidence[2], "temperatures of confidences")
