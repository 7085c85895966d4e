"""The sampling kernels name the tokens that the CPU names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import sampling_params

from paceline.kernels import (
    History,
    SamplingParams,
    choose_token,
    filter_logits,
    perturbed_logits,
)

NONE = History([1])
ONE = SamplingParams(temperature=0.7, top_k=3, min_p=0.5)  # one token is left of three
FLAT = SamplingParams(temperature=1.9, top_p=0.999)  # more tokens are left than candidates


# Shrinking takes minutes in Triton's interpreter.
@settings(max_examples=8, phases=set(Phase) - {Phase.shrink})
@example(
    params=[ONE, FLAT],
    position=0,
    vocab=1023,
    coarse=False,
    dtype=torch.float32,
    seed=1,
    keep=16,
)
@example(  # sums of floats kept 15 tokens here and 16 there
    params=[SamplingParams(temperature=0.3, top_p=0.999)],
    position=0,
    vocab=1023,
    coarse=False,
    dtype=torch.float32,
    seed=314,
    keep=64,
)
@given(
    params=st.lists(sampling_params(), min_size=1, max_size=2),
    position=st.integers(0, 2**40),
    vocab=st.sampled_from([1, 5, 1023, 1500]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    keep=st.sampled_from([16, 64]),
)
def test_any_row_gets_the_token_of_the_contract(
    params: list[SamplingParams],
    position: int,
    vocab: int,
    coarse: bool,
    dtype: torch.dtype,
    seed: int,
    keep: int,
) -> None:
    """Of one program with all candidates, or of several with too few."""
    from paceline.kernels._triton import backend

    torch.manual_seed(seed)
    logits = 3 * torch.randn(len(params), vocab)
    if coarse:  # many ties, and both zeros
        logits = logits.round()
    logits = logits.to(dtype)
    positions = [position + index for index in range(len(params))]
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(backend, "KEEP", keep)
        sizes.setattr(backend, "CHUNK", 32 * keep)
        sizes.setattr(backend, "SEARCH_BLOCK", 32 * keep)
        found = backend.perturbed(logits, params, positions)
    rows = list(zip(logits, params, positions, strict=True))
    kept = [filter_logits(row, each, NONE).isfinite() for row, each, _ in rows]
    assert torch.equal(found.isfinite(), torch.stack(kept))
    assert found.argmax(1).tolist() == [choose_token(row, each, at, NONE) for row, each, at in rows]


def test_rows_far_apart_and_a_reduced_vocabulary() -> None:
    """Offsets beyond 2^31, positions beyond a million; noise is that of the target's token ids."""
    from paceline.kernels._triton.backend import perturbed

    memory = torch.empty((1 << 31) + 600, dtype=torch.bfloat16)
    logits = memory.as_strided((2, 500), ((1 << 31) + 64, 1))
    logits.copy_(torch.randn(2, 500, generator=torch.Generator().manual_seed(0)))
    params = [SamplingParams(seed=1, top_k=9), SamplingParams(seed=2, top_p=0.5)]
    ids = 3 * torch.arange(500)
    positions = [1 << 20, (1 << 33) + 5]
    expected = perturbed_logits(logits, params, positions, ids)
    torch.testing.assert_close(perturbed(logits, params, positions, ids), expected)
