"""The sampling kernels choose the tokens that the CPU chooses."""

import random

import pytest
import torch

from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    choose_token,
    choose_tokens,
)

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
}


@pytest.mark.parametrize(("vocab", "rows"), [(4096, 100), (151_936, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_cpu(
    device: torch.device, kind: str, vocab: int, rows: int
) -> None:
    rng = random.Random(0)
    logits = 4 * torch.randn(rows, vocab)
    logits = logits.bfloat16() if vocab > 5000 else logits  # with many ties
    params = [SamplingRules(**KINDS[kind], seed=rng.getrandbits(64)) for _ in range(rows)]  # type: ignore[arg-type]
    positions = [rng.getrandbits(30) for _ in range(rows)]
    empty = History([])
    assert choose_tokens(logits.to(device), params, positions).tolist() == [
        choose_token(row, each, at, empty)
        for row, each, at in zip(logits, params, positions, strict=True)
    ]


def test_drafts_are_accepted_or_replaced_as_on_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    logits, empty = 4 * torch.randn(40, 128_256), History([])
    params, drafted = SamplingRules(top_p=0.95, seed=7, rejection=True), {}
    for row in range(0, 40, 2):
        proposal = Proposal.likeliest(logits[row] + torch.randn(128_256), 20)
        drafted[row] = proposal.draw(params.seed, row), proposal
    assert choose_tokens(logits.to(device), [params] * 40, range(40), drafted).tolist() == [
        accept_or_resample(each, params, row, empty, *drafted[row])
        if row in drafted
        else choose_token(each, params, row, empty)
        for row, each in enumerate(logits)
    ]
