"""Row positions visible to continuations: the full prefix, or the part a KV budget allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels import SELECTION_CHUNK, best_chunks, streaming
from paceline.train.budget.preset import OBSERVED, BudgetPreset


@dataclass(frozen=True)
class Draw:
    """Random choices of a step.

    Attributes:
        prefixes: Where each continuation begins, multiples of 64.
        budget: Visible prefix positions of the sparse view. Unit: tokens.
        policy: How they are selected.
    """

    prefixes: list[int]
    budget: int
    policy: str

    @classmethod
    def of(cls, preset: BudgetPreset) -> Draw:
        """Drawn from torch's global generator, which a checkpoint keeps."""
        first = preset.shortest_prefix // OBSERVED
        last = (preset.length - preset.continuation) // OBSERVED
        prefixes = torch.randint(first, last + 1, (preset.segments,)) * OBSERVED
        budget = torch.multinomial(torch.tensor(preset.weights), 1).item()
        policy = torch.randint(len(preset.policies), ()).item()
        return cls(
            prefixes.tolist(),
            preset.budgets[int(budget)],
            preset.policies[int(policy)],
        )


def chosen(policy: str, prefix: int, budget: int, weights: Tensor | None) -> Tensor:
    """Positions of a prefix that a policy selects under a KV budget, bool `[prefix]`.

    `streaming`: the first 4 and the newest. `chunk_topk`: the chunks of 8 with the most attention
    (BudgetDraft, section 3.4); `weights`, float `[prefix]`, is the attention of each position. Both
    select all of a prefix that fits the budget.
    """
    seen = torch.zeros(prefix, dtype=torch.bool)
    if policy == "streaming" or budget >= prefix:
        for part in streaming(prefix, budget):
            seen[part.start : part.stop] = True
        return seen
    if weights is None:
        raise ValueError("chunk_topk needs attention weights, got None")
    scores = weights.unflatten(0, (-1, SELECTION_CHUNK)).sum(-1)
    seen[best_chunks(scores[None], SELECTION_CHUNK, budget // SELECTION_CHUNK)[0]] = True
    return seen


def full_view(prefixes: list[int], continuation: int, length: int, lag: int) -> Tensor:
    """Row positions visible to each continued token, bool `[segments, continuation, length]`.

    A token at position p attends to all up to p - `lag`.
    """
    positions = torch.tensor(prefixes)[:, None] + torch.arange(continuation)
    return torch.arange(length) <= positions[..., None] - lag


def sparse_view(full: Tensor, prefixes: list[int], kept: list[Tensor]) -> Tensor:
    """`full` without the prefix positions that are not in `kept`; newer positions stay visible."""
    sparse = full.clone()
    for view, prefix, seen in zip(sparse, prefixes, kept, strict=True):
        view[:, :prefix] &= seen
    return sparse
