"""Drafts of a block model in one native call (``native/draft.c``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import address, library
from paceline.kernels.executor import CACHE_TYPES, NativeProgram, numbers, pointers

if TYPE_CHECKING:
    from paceline.kernels.linear import PackedMatrix

_MAX_NODES = 255
_OUT_OF_MEMORY = 1


class _Model(ctypes.Structure):
    _fields_ = [
        *(*pointers("context", "block"), *numbers("length", "levels", "hidden", "states")),
        *numbers("state_input", "bf16", "kv_type", "mask", "drafted"),
        *(*pointers("ids"), *numbers("rank"), *pointers("w1", "w2", "confidence", "offsets")),
    ]


class DraftText(ctypes.Structure):
    """A text that is drafted for, and its tree: ``Text`` of ``native/draft.c``.

    Attributes:
        context: Address of the context's table; see :class:`~paceline.kernels.LayerTable`.
        base: Position in the context's first slot, a multiple of ``CHUNK``.
        first: First position whose states are new.
        length: Positions of the context, and of the text before its anchor.
        fresh: Address of the new states, ``[length - first, states]``.
        newest: Address of memory for the states of one position, the newest; kept between calls.
        anchor: Token at position ``length``.
        row: Its row of W1.
        count: Number of logits of which candidates are taken, the first ones.
        temperature: Scores are ``logits / temperature + noise``; 0: the logits.
        seed: Of the noise.
        nodes: Maximum number of nodes.
        depth: Maximum length of a path.
        levels: Length of ``width``.
        width: Address of the numbers of nodes of the levels, int64.
        min_score: Nodes with a lower log of the survival are not expanded.
        drafted: Number of nodes of the tree, which are sorted by falling survival.
        token: Token ids of the nodes.
        parent: Their parents; -1: the anchor.
        chance: Their confidences.
    """

    _fields_ = [
        *(*pointers("context"), *numbers("base", "first", "length"), *pointers("fresh", "newest")),
        *(*numbers("anchor", "row", "count"), ("temperature", ctypes.c_double)),
        *(("seed", ctypes.c_uint64), *numbers("nodes", "depth", "levels"), *pointers("width")),
        *(("min_score", ctypes.c_double), *numbers("drafted")),
        ("token", ctypes.c_int64 * _MAX_NODES),
        ("parent", ctypes.c_int64 * _MAX_NODES),
        ("chance", ctypes.c_double * _MAX_NODES),
    ]


class BlockDraft:
    """A block model whose drafts are one native call. Used on one thread."""

    def __init__(
        self,
        context: NativeProgram,
        block: NativeProgram,
        *,
        length: int,
        levels: int,
        mask: int,
        state_input: bool,
        dtype: torch.dtype,
        ids: Tensor,
        head: tuple[Tensor, PackedMatrix] | None,
        confidence: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Describe a model.

        Args:
            context: Program of hidden states ``[n, states]`` to the keys and values of contexts.
            block: Program of blocks to logits; tap 0 is what the LM head reads.
            length: Positions of a block.
            levels: The last of them, which predict.
            mask: Token of the positions behind the anchor.
            state_input: Whether a block's positions read the newest states.
            dtype: Type of states and contexts, float32 or bfloat16.
            ids: Token id of each logit, int64 ``[R]``, rising.
            head: The sequential head: W1 ``[rows, rank]``, float32, and W2 ``[R, rank]``, packed.
            confidence: The confidence head: weights of the hidden state ``[hidden]``, and by row
                of W1 the share of the token before; both float32.
        """
        native = library()
        assert native is not None
        self._kept: list[Any] = [context, block, ids, head, confidence]
        model = _Model(
            context=context.address,
            block=block.address,
            length=length,
            levels=levels,
            hidden=block.width,
            states=context.width,
            state_input=state_input,
            bf16=dtype == torch.bfloat16,
            kv_type=CACHE_TYPES.index(dtype),
            mask=mask,
            drafted=len(ids),
            ids=address(ids, "ids of drafted tokens"),
        )
        if head is not None:
            w1, w2 = head
            matrix = w2.matrix()
            self._kept.append(matrix)
            model.rank = w1.shape[1]
            model.w1, model.w2 = address(w1, "W1"), ctypes.addressof(matrix)
        if confidence is not None:
            model.confidence = address(confidence[0], "the confidence head")
            model.offsets = address(confidence[1], "offsets of confidences")
        self._model = model
        self._draft: Callable[..., int] = native.paceline_draft
        native.paceline_draft.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int64),
        ]
        native.paceline_draft.restype = ctypes.c_int64

    def draft(self, texts: Sequence[DraftText], table: Tensor) -> None:
        """Draft a tree for each text; their fields from ``drafted`` on are the result.

        Args:
            texts: Their contexts have room for the new states and a block.
            table: Cosines, then sines, float32 ``[positions, D]``, of all positions.

        Raises:
            MemoryError: Memory ran out.
            IndexError: An anchor is outside of the vocabulary.
        """
        count = len(texts)
        failed = self._draft(
            ctypes.addressof(self._model),
            (ctypes.c_void_p * count)(*map(ctypes.addressof, texts)),
            count,
            address(table, "table"),
            torch.get_num_threads(),
        )
        if failed == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for the drafts of {count} texts: draft for fewer")
        if failed:
            raise IndexError("an anchor is outside of the vocabulary of the drafter")
