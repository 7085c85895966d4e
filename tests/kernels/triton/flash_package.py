"""A stand-in for the package flash-attn, with the arguments and results that it documents."""

from types import ModuleType

import torch
from torch import Tensor

# Of each call, whether it was causal and the numbers of keys.
CALLS: list[tuple[bool, list[int]]] = []


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


def flash_attn_with_kvcache(
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


def module() -> ModuleType:
    made = ModuleType("flash_attn")
    made.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    return made
