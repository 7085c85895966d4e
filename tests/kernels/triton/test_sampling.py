"""The fused sampling kernel names the tokens that the CPU names."""

from __future__ import annotations

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import sampling_params

from paceline.kernels import History, SamplingParams, choose_token

NONE = History([1])


# Shrinking takes minutes in Triton's interpreter.
# The same examples in each run: at the edge of top-p sums of the two may differ in the last bit.
@settings(max_examples=12, phases=set(Phase) - {Phase.shrink}, derandomize=True)
@example(  # one token is left where top_k would keep three
    params=[SamplingParams(temperature=0.7, top_k=3, min_p=0.5)],
    position=0,
    vocab=1023,
    coarse=False,
    dtype=torch.float32,
    seed=1,
)
@given(
    params=st.lists(sampling_params(), min_size=1, max_size=3),
    position=st.integers(0, 2**40),
    vocab=st.sampled_from([1, 5, 1023, 1500]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_row_gets_the_token_of_the_contract(
    params: list[SamplingParams],
    position: int,
    vocab: int,
    coarse: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    from paceline.kernels._triton.backend import choose

    torch.manual_seed(seed)
    logits = 3 * torch.randn(len(params), vocab)
    if coarse:  # many ties, and both zeros
        logits = logits.round()
    logits = logits.to(dtype)
    positions = [position + index for index in range(len(params))]
    found = choose(logits, params, positions)
    rows = zip(logits, params, positions, strict=True)
    assert found == [choose_token(row, each, at, NONE) for row, each, at in rows]
