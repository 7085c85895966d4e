"""The decoder of one rank, and how the other ranks follow the steps of rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from paceline.decoder.cache import LocalCache
from paceline.decoder.model import AttentionObserver, Decoder, ForwardResult
from paceline.decoder.ranks import Ranks, RanksLost
from paceline.kernels import KVCacheView, QueryBlock, TreePlan, plan_trees


@runtime_checkable
class WholeCache(KVCacheView, Protocol):
    """A cache at rank 0 with the heads of all ranks, which drafters read."""

    def put(self, head: int, start: int, rows: Tensor) -> None:
        """Fill slots and heads from these on: ``[layers, 2, heads, n, row_width]``
        of the cache's type."""
        ...


class RankCaches:
    """What the other ranks have to do with their caches before the next step of rank 0."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        """Number of all ranks."""
        self._numbers: weakref.WeakKeyDictionary[KVCacheView, int] = weakref.WeakKeyDictionary()
        self._new = count()
        self._changes: list[list[Any]] = []

    def number(self, cache: KVCacheView) -> int:
        """Number of a cache at the other ranks."""
        if cache not in self._numbers:
            self._numbers[cache] = number = next(self._new)
            weakref.finalize(cache, self._changes.append, ["drop", number])
        return self._numbers[cache]

    def compact(self, cache: KVCacheView, slots: Sequence[int], start: int) -> None:
        """Move the KV at ``slots`` to ``start``, ``start + 1``, ...; none moves to a later slot."""
        self._changes.append(["compact", self.number(cache), list(slots), start])

    def copy_prefix(self, cache: KVCacheView, source: KVCacheView, tokens: int) -> None:
        """Take over the first ``tokens`` positions of another cache."""
        self._changes.append(["copy", self.number(cache), self.number(source), tokens])

    def drop(self, cache: KVCacheView) -> None:
        """Free the memory of a cache."""
        if cache in self._numbers:
            self._changes.append(["drop", self._numbers.pop(cache)])

    def take(self) -> list[list[Any]]:
        """The changes since the last call."""
        changes = self._changes[:]
        del self._changes[: len(changes)]
        return changes


class ParallelDecoder(Decoder):
    """One rank's part of a decoder. At rank 0 a step runs at all ranks; see :func:`run_rank`.

    Its configuration is that of the whole model.
    """

    _ranks: Ranks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`Decoder`; ranks are needed."""
        super().__init__(*args, **kwargs)
        self.rank_caches = RankCaches(self.ranks)
        """At rank 0, what the other ranks have to do."""
        self._indices: tuple[int, ...] | None = None

    def with_layers(self, indices: Sequence[int]) -> Self:
        part = super().with_layers(indices)
        part._indices = tuple(indices)
        return part

    def lost(self) -> RanksLost | None:
        return self._ranks.lost()

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
        """See :class:`Decoder`. An observer sees the heads of rank 0. Raises ``RanksLost``: another
        rank has ended, or the step failed at one of them."""
        run = super().forward
        if self._ranks.rank:
            return run(tokens, plan, caches, logit_rows=logit_rows, taps=taps)
        whole = [isinstance(cache, WholeCache) for cache in caches]
        self._ranks.tell(
            {
                "changes": self.rank_caches.take(),
                "layers": self._indices,
                "tokens": tokens.tolist(),
                "blocks": [(b.sequence, b.start, b.parents, b.length) for b in plan.blocks],
                "caches": [self.rank_caches.number(cache) for cache in caches],
                "whole": whole,
                "tables": all(cache.table is not None for cache in caches),
                "rows": None if logit_rows is None else logit_rows.tolist(),
            }
        )
        with self._ranks.together("a step failed"):
            result = run(tokens, plan, caches, logit_rows=logit_rows, taps=taps, observer=observer)
            blocks = [block for block in plan.blocks if whole[block.sequence]]
            if blocks:
                self._collect(blocks, caches)
        return result

    def _collect(self, blocks: Sequence[QueryBlock], caches: Sequence[KVCacheView]) -> None:
        """Take the other ranks' keys and values of blocks into the caches."""
        config = self._ranks.part(self.config)
        sizes = [block.length * config.kv_bytes_per_token for block in blocks]
        own = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        for rank, part in enumerate(self._ranks.collect(own)[1:], 1):
            for block, piece in zip(blocks, part.split(sizes), strict=True):
                rows = piece.view(config.kv_dtype)
                rows = rows.view(config.layers, 2, config.kv_heads, block.length, -1)
                cache = caches[block.sequence]
                assert isinstance(cache, WholeCache)
                cache.put(rank * config.kv_heads, block.start, rows)


class _HeadsCache(LocalCache):
    """A rank's heads of a sequence."""

    def compact(self, slots: list[int], start: int) -> None:
        self._store[..., start : start + len(slots), :] = self._store[..., slots, :]

    def copy_prefix(self, source: _HeadsCache, tokens: int) -> None:
        self.reserve(tokens)
        self._store[..., :tokens, :] = source._store[..., :tokens, :]

    def rows(self, start: int, stop: int) -> Tensor:
        """The bytes of slots, uint8 ``[n]``."""
        return self._store[..., start:stop, :].flatten().view(torch.uint8)


@torch.inference_mode()
def run_rank(decoder: ParallelDecoder, ranks: Ranks) -> None:
    """Run the steps of rank 0 at another rank, until rank 0 ends them. Raises ``RanksLost``:
    another rank has ended."""
    caches: dict[int, _HeadsCache] = {}
    while (step := ranks.listen()) is not None:
        with ranks.together("a step failed"):
            _run_step(decoder, ranks, caches, step)


def _run_step(
    decoder: ParallelDecoder, ranks: Ranks, caches: dict[int, _HeadsCache], step: dict[str, Any]
) -> None:
    if step["layers"] is not None:
        decoder = decoder.with_layers(step["layers"])
    config = ranks.part(decoder.config)

    def cache(number: int) -> _HeadsCache:
        if number not in caches:
            caches[number] = _HeadsCache(config, decoder.device)
        return caches[number]

    for kind, number, *how in step["changes"]:
        if kind == "drop":
            caches.pop(number, None)
        elif kind == "compact":
            cache(number).compact(*how)
        else:
            cache(number).copy_prefix(cache(how[0]), how[1])
    used = [cache(number) for number in step["caches"]]
    blocks = [QueryBlock(*block) for block in step["blocks"]]
    for block in blocks:
        used[block.sequence].reserve(block.stop)
    for each in used:
        if not step["tables"]:  # operations one by one, as at rank 0
            each.table = None
    rows = None if step["rows"] is None else _numbers(step["rows"], decoder)
    plan = plan_trees(blocks, device=decoder.device)
    decoder.forward(_numbers(step["tokens"], decoder), plan, used, logit_rows=rows)
    whole = [block for block in blocks if step["whole"][block.sequence]]
    if whole:
        ranks.collect(torch.cat([used[b.sequence].rows(b.start, b.stop) for b in whole]))


def _numbers(values: list[int], decoder: Decoder) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=decoder.device)
