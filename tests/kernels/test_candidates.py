"""The best candidates of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels import best_candidates, cpu_kernels


@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 7, 16, 63, 64, 65, 1000]),
    width=st.integers(1, 12),
    removed=st.integers(0, 1000),
    seed=st.integers(0, 100),
)
def test_they_are_the_largest_with_their_softmax(
    rows: int, vocab: int, width: int, removed: int, seed: int
) -> None:
    """Of rows that are part of longer ones; some tokens are filtered out."""
    draws = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, vocab + 9, generator=draws) * 4
    whole[:, 1 : min(removed, vocab)] = -torch.inf
    scores, width = whole[:, :vocab], min(width, vocab)
    ids, logs = best_candidates(scores, width)
    expected = scores.log_softmax(-1)
    torch.testing.assert_close(logs, expected.topk(width).values, rtol=1e-5, atol=1e-5)
    drawn = logs > -torch.inf
    torch.testing.assert_close(logs[drawn], expected.gather(1, ids)[drawn], rtol=1e-5, atol=1e-5)
    for row, kept in zip(ids, drawn, strict=True):
        assert len(row[kept].unique()) == kept.sum()
    torch.testing.assert_close(best_candidates(scores.double(), width)[1].float(), logs)


@pytest.mark.skipif(cpu_kernels().library is None, reason="torch orders equal scores freely")
def test_equal_scores_come_in_the_order_of_their_ids() -> None:
    scores = torch.zeros(2, 300)
    scores[1, [299, 5, 70]] = 1.0
    assert best_candidates(scores, 4)[0].tolist()[1][:3] == [5, 70, 299]
