"""The sampling kernels name the tokens that the CPU names."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import sampling_rules
from torch import Tensor

from paceline.cuda.triton import backend
from paceline.cuda.triton.backend import perturbed, sampling_record
from paceline.cuda.triton.candidates import best_of_rows
from paceline.cuda.triton.plan import MASK_ALIGN, MASK_WORDS, path_words
from paceline.drafter.growth.levels import LevelTrees, TreeShape
from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    best_candidates,
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


# Candidates of rows and levels of trees are those of PyTorch's operations


INF = math.inf


def expected_of(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """By a stable sort: of equal scores the lowest id first."""
    ids = scores.float().sort(dim=1, descending=True, stable=True).indices[:, :width]
    return ids, scores.float().log_softmax(-1).gather(1, ids)


@pytest.mark.parametrize(
    ("vocab", "width", "dtype"),
    [
        (1, 1, torch.float32), (5, 5, torch.bfloat16), (700, 8, torch.float32),
        (3001, 16, torch.bfloat16), (70_000, 3, torch.float32),
    ],
)  # fmt: skip
def test_the_best_of_any_row(vocab: int, width: int, dtype: torch.dtype) -> None:
    """With ties, zeros of both signs and -inf; of rows that lie apart."""
    torch.manual_seed(vocab)
    logits = (2 * torch.randn(4, vocab + 3)).round()[:, :vocab]
    logits[0] = 0.0
    logits[0, ::2] = -0.0
    logits[1, : vocab // 2] = -INF
    logits[2, 1:] = -INF
    logits = logits.to(dtype)
    ids, logs = best_of_rows(logits, width)
    right, right_logs = expected_of(logits, width)
    assert torch.equal(ids, right)
    torch.testing.assert_close(logs, right_logs, rtol=1e-5, atol=1e-5)


def test_a_row_without_any_candidate_has_no_probability() -> None:
    ids, logs = best_of_rows(torch.full((1, 1500), -INF), 2)
    assert (ids.tolist(), logs.tolist()) == ([[0, 1]], [[-INF, -INF]])


@pytest.mark.parametrize("filtered", [False, True])
def test_noise_and_filters_are_those_of_the_contract(filtered: bool) -> None:
    """Rows at T = 0 and above it, for a drafter with fewer tokens than its target."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(3, 1500)
    params = [SamplingRules(temperature=0.0), SamplingRules(seed=3, temperature=0.7)]
    params.append(SamplingRules(seed=1 << 63, top_k=9 if filtered else 0, min_p=0.0))
    positions = [5, 1 << 33, 70]
    ids = 3 * torch.arange(1500)
    record = torch.from_numpy(sampling_record(params, positions))
    found, logs = best_of_rows(logits, 8, record, ids, filtered=filtered)
    scores = perturbed_logits(logits, params, positions, ids)
    right, right_logs = expected_of(scores, 8)
    assert torch.equal(found, ids[right])
    torch.testing.assert_close(logs, right_logs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("widths", "confident", "survival", "paths"),
    [
        ((4, 5, 5), False, 0.02, True), ((3, 7), True, 0.0, True), ((1, 1, 1), True, 0.3, False),
        ((16, 16), False, 0, False),
    ],
)  # fmt: skip
def test_levels_of_trees_are_those_of_plain_operations(
    widths: tuple[int, ...], confident: bool, survival: float, paths: bool
) -> None:
    """With equal scores, candidates of probability 0, budgets of every size, and confidences that
    are no number."""
    count, trees = 20, 6
    log_survival = math.log(survival) if survival else -INF
    shape = TreeShape(widths, count, log_survival, chain=set(widths) == {1})
    generator = np.random.default_rng(len(widths))
    last = torch.tensor(generator.integers(0, shape.stops[-1], (trees, 1)))

    def rank(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        return best_candidates(logits, min(widths[level], count))

    found = [LevelTrees(shape, last, rank, kernels=each) for each in (True, False)]
    if paths:
        for each in found:
            each.begin_paths()
    for level in range(len(widths)):
        parents = shape.sizes[level - 1] if level else 1
        logits = torch.tensor(generator.integers(-3, 4, (trees * parents, count))).float()
        logits[:, : count // 2] = -INF
        logs = None
        if confident:
            logs = torch.tensor(generator.normal(-1, 1, (trees, parents)))
            logs[0, 0], logs[-1, 0] = math.nan, -INF
        for each in filter(lambda each: each.grows, found):
            nodes = each.frontier.stop - each.frontier.start if level else 1
            rows = logits.view(trees, parents, count)[:, :nodes].flatten(0, 1)
            each.add_level(rows, None if logs is None else logs[:, :nodes])
    kernel, plain = found
    real = plain.packed()[..., 2] > -INF  # a CPU leaves out nodes that no tree expands
    assert torch.equal(kernel.packed()[..., 2] > -INF, real)
    assert torch.equal(kernel.packed()[real], plain.packed()[real])
    if paths:
        assert kernel.paths is not None
        assert plain.paths is not None
        stop = shape.stops[-2]  # the last level is fed to no pass
        of_both = [each.paths[:, :stop, :stop][real[:, :stop]] for each in (kernel, plain)]
        assert torch.equal(*of_both)


def test_paths_are_packed_behind_the_slots_before_the_tree() -> None:
    """Of trees that begin anywhere, as a part of larger tables."""
    nodes, starts = 70, [0, 1, 31, 32, 63, 64, 1000]
    paths = torch.rand(len(starts), 90, 90) < 0.3
    blocks = torch.zeros(len(starts), 4, dtype=torch.int32)
    blocks[:, 1] = torch.tensor(starts)
    words = path_words(paths[:, :nodes, :nodes], blocks[:, 1]).view(len(starts), nodes, MASK_WORDS)
    bits = (words[..., None] >> torch.arange(32) & 1).bool().flatten(2)
    for start, found, path in zip(starts, bits, paths, strict=True):
        shift = start % MASK_ALIGN
        assert torch.equal(found[:, shift : shift + nodes], path[:nodes, :nodes])
        assert not found[:, :shift].any()
        assert not found[:, shift + nodes :].any()
