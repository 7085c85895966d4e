"""The sampling kernels name the tokens that the CPU names."""

import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import sampling_rules

from paceline.cuda.triton import backend
from paceline.cuda.triton.backend import perturbed
from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    choose_token,
    filter_logits,
    perturbed_logits,
)
from paceline.kernels.sampling import _draft_records

NONE = History([1])
ONE = SamplingRules(temperature=0.7, top_k=3, min_p=0.5)  # one token is left of three
FLAT = SamplingRules(temperature=1.9, top_p=0.999)  # more tokens are left than candidates


FINE: dict[str, Any] = {
    "position": 0, "vocab": 1023, "coarse": False, "dtype": torch.float32, "seed": 1, "bests": 16,
    "room": 5000,
}  # fmt: skip
COARSE = FINE | {"vocab": 1500, "coarse": True, "dtype": torch.bfloat16, "seed": 2}


# Shrinking takes minutes in Triton's interpreter.
@settings(max_examples=4, phases=set(Phase) - {Phase.shrink})
@example(params=[ONE, FLAT], **FINE)
# Sums of floats kept 15 tokens here and 16 there.
@example(params=[SamplingRules(temperature=0.3, top_p=0.999)], **FINE | {"seed": 314, "bests": 64})
# Both filters keep more tokens than there are candidates.
@example(params=[SamplingRules(temperature=1.9, top_p=0.9, top_k=900), FLAT], **COARSE)
# And than there is room for.
@example(params=[SamplingRules(temperature=1.9, top_p=0.9), FLAT], **COARSE | {"room": 8})
@given(
    params=st.lists(sampling_rules(), min_size=1, max_size=2),
    position=st.integers(0, 2**40),
    vocab=st.sampled_from([1, 5, 1023, 1500]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    bests=st.sampled_from([16, 64]),
    room=st.sampled_from([8, 5000]),
)
def test_any_row_gets_the_token_of_the_contract(
    params: list[SamplingRules], position: int, vocab: int, coarse: bool, dtype: torch.dtype,
    seed: int, bests: int, room: int,
) -> None:  # fmt: skip
    """Of one program with all candidates, or of several with too few."""

    torch.manual_seed(seed)
    logits = 3 * torch.randn(len(params), vocab)
    if coarse:  # many ties, and both zeros
        logits = logits.round()
    logits = logits.to(dtype)
    positions = [position + index for index in range(len(params))]
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(backend, "BESTS", bests)
        sizes.setattr(backend, "CHUNK", 32 * bests)
        sizes.setattr(backend, "SEARCH_BLOCK", 32 * bests)
        sizes.setattr(backend, "ROOM", room)
        found = backend.perturbed(logits, params, positions)
    rows = list(zip(logits, params, positions, strict=True))
    kept = [filter_logits(row, each, NONE).isfinite() for row, each, _ in rows]
    assert torch.equal(found.isfinite(), torch.stack(kept))
    assert found.argmax(1).tolist() == [choose_token(row, each, at, NONE) for row, each, at in rows]


EXTREMES = [
    SamplingRules(temperature=1e-38, top_p=0.9),
    SamplingRules(temperature=1e-17, top_p=0.9),
    SamplingRules(temperature=3e38, top_p=0.999, min_p=1e-45),
    SamplingRules(top_p=1e-45, top_k=2**32 - 1),
    SamplingRules(temperature=0.5),
]


@pytest.mark.parametrize("place", [None, math.nan, math.inf, -math.inf])
def test_extreme_parameters_and_logits_give_the_tokens_of_the_cpu(place: float | None) -> None:
    """NaN is the lowest float, plus infinity the largest, minus infinity excludes a token."""
    logits = 3 * torch.randn(len(EXTREMES), 300, generator=torch.Generator().manual_seed(0))
    if place is not None:
        logits[:, 7:90] = place
        logits[-1] = place
    found = backend.perturbed(logits, EXTREMES, [5] * len(EXTREMES))
    for row, tokens, params in zip(logits, found, EXTREMES, strict=True):
        if params.greedy and place is not None:
            continue  # bounds are those of sampling
        kept = filter_logits(row, params, NONE)
        assert torch.equal(tokens.isfinite(), kept.isfinite())
        assert int(tokens.argmax()) == choose_token(row, params, 5, NONE)


@settings(max_examples=4, phases=set(Phase) - {Phase.shrink})
@given(
    params=sampling_rules().filter(lambda each: not each.greedy),
    position=st.integers(0, 2**40),
    vocab=st.sampled_from([1, 5, 700, 1500]),
    kind=st.sampled_from(["any", "close", "equal", "certain"]),
    seed=st.integers(0, 1000),
)
def test_drafts_are_accepted_or_replaced_as_on_the_cpu(
    params: SamplingRules, position: int, vocab: int, kind: str, seed: int
) -> None:
    """Of three drafts, with a row between them that has none."""
    torch.manual_seed(seed)
    logits = 2 * torch.randn(4, vocab)
    rows = [0, 1, 3]
    drafted = {}
    for row in rows:
        other = filter_logits(logits[row], params, NONE)
        if kind != "equal":
            other = torch.randn(vocab) if kind == "any" else other + 0.3 * torch.randn(vocab)
        proposal = Proposal.likeliest(other, 40)
        token = proposal.draw(params.seed, position + row)
        drafted[row] = token, Proposal.certain(token) if kind == "certain" else proposal
    positions = [position + row for row in range(4)]
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(backend, "CHUNK", 512)
        sizes.setattr(backend, "BESTS", 16)
        scores = backend.perturbed(
            logits, [params] * 4, [-1 if row in drafted else at for row, at in enumerate(positions)]
        )
        tokens = scores.argmax(1)
        records = _draft_records(
            drafted, [params.seed] * 3, [positions[row] for row in rows], vocab
        )
        backend.accept_drafts(scores, tokens, *records)
    expected = [
        accept_or_resample(logits[row], params, positions[row], NONE, *drafted[row])
        if row in drafted
        else choose_token(logits[row], params, positions[row], NONE)
        for row in range(4)
    ]
    assert tokens.tolist() == expected


def test_rows_far_apart_and_a_reduced_vocabulary() -> None:
    """Offsets beyond 2^31, positions beyond a million; noise is that of the target's token ids."""
    memory = torch.empty((1 << 31) + 600, dtype=torch.bfloat16)
    logits = memory.as_strided((2, 500), ((1 << 31) + 64, 1))
    logits.copy_(torch.randn(2, 500, generator=torch.Generator().manual_seed(0)))
    params = [SamplingRules(seed=1, top_k=9), SamplingRules(seed=2, top_p=0.5)]
    ids = 3 * torch.arange(500)
    positions = [1 << 20, (1 << 33) + 5]
    expected = perturbed_logits(logits, params, positions, ids)
    torch.testing.assert_close(perturbed(logits, params, positions, ids), expected)
