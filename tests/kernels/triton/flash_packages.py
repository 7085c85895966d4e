"""Stand-ins for packages of attention, with the arguments and results that they document."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

CALLS: list[tuple[bool, list[int]]] = []
"""Of each call, whether it was causal and the numbers of keys."""


def attend(
    q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, count: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """One sequence: ``[n, Hq, D]`` and log-sum-exp ``[n, Hq]``, keys ``[pages, slots, Hkv, D]``."""
    key, value = (each[pages.long()].flatten(0, 1)[:count] for each in (keys, values))
    group = q.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1).float() for each in (key, value))
    scores = torch.einsum("nhd,shd->nhs", q.float(), key) * scale
    if causal:  # aligned with the ends
        seen = torch.ones(len(q), count, dtype=torch.bool).tril(count - len(q))
        scores.masked_fill_(~seen[:, None], -torch.inf)
    out = torch.einsum("nhs,shd->nhd", scores.softmax(-1), value)
    return out.half(), scores.logsumexp(-1)


def flash_attn_with_kvcache_2(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float, causal: bool, return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention 2: a padded batch ``[S, n, Hq, D]``, log-sum-exp ``[S, Hq, n]``."""
    assert return_softmax_lse
    assert k_cache.shape[1] % 256 == 0
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    CALLS.append((causal, cache_seqlens.tolist()))
    found = [
        attend(row, k_cache, v_cache, table, count, softmax_scale, causal)
        for row, table, count in zip(q, block_table, cache_seqlens.tolist(), strict=True)
    ]
    out, lse = (torch.stack(each) for each in zip(*found, strict=True))
    return out, lse.transpose(1, 2)


def flash_attn_with_kvcache_3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
    cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
    return_softmax_lse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """FlashAttention 3: packed rows ``[m, Hq, D]``, log-sum-exp ``[Hq, m]``, and more."""
    assert return_softmax_lse
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    counts = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max(counts)
    CALLS.append((causal, cache_seqlens.tolist()))
    found = [
        attend(row, k_cache, v_cache, table, count, softmax_scale, causal)
        for row, table, count in zip(
            q.split(counts), page_table, cache_seqlens.tolist(), strict=True
        )
    ]
    out, lse = (torch.cat(each) for each in zip(*found, strict=True))
    return out, lse.T, torch.empty(0), torch.empty(0)


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer: planned once for all layers; log-sum-exp ``[m, Hq]`` to base 2."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        """What the arguments say."""
        assert q_data_type == kv_data_type == torch.float16
        self._counts = qo_indptr.diff().tolist()
        pages = paged_kv_indptr.diff().tolist()
        self._pages = paged_kv_indices.split(pages)
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= each <= page_size for each in last)
        self._keys = [(n - 1) * page_size + rest for n, rest in zip(pages, last, strict=True)]
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale, self._causal = sm_scale, causal
        CALLS.append((causal, self._keys))

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """The attention of a layer."""
        assert return_lse
        keys, values = paged_kv_cache
        heads, page, dim = keys.shape[1:]
        assert self._heads == (q.shape[1], heads, dim, page)
        keys, values = (each.transpose(1, 2) for each in (keys, values))
        found = [
            attend(row, keys, values, pages, count, self._scale, self._causal)
            for row, pages, count in zip(
                q.split(self._counts), self._pages, self._keys, strict=True
            )
        ]
        out, lse = (torch.cat(each) for each in zip(*found, strict=True))
        return out, lse / math.log(2)


def modules() -> dict[str, ModuleType]:
    """By the names that are imported."""
    second, third, infer = (
        ModuleType(name) for name in ("flash_attn", "flash_attn_interface", "flashinfer")
    )
    second.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache_2
    third.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache_3
    infer.__dict__["BatchPrefillWithPagedKVCacheWrapper"] = BatchPrefillWithPagedKVCacheWrapper
    return {each.__name__: each for each in (second, third, infer)}
