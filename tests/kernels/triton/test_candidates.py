"""Candidates of rows and levels of trees are those of PyTorch's operations."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cuda.triton.backend import sampling_record
from paceline.cuda.triton.candidates import best_of_rows
from paceline.cuda.triton.plan import MASK_ALIGN, MASK_WORDS, path_words
from paceline.drafter.growth.levels import LevelTrees, TreeShape
from paceline.kernels import SamplingRules, best_candidates, perturbed_logits

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
