"""Rejection sampling: what comes out is the target's distribution, whatever q is."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from chi_square import FALSE_ALARM, p_value
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    choose_token,
    filter_logits,
)

VOCAB, DEPTH, SAMPLES = 5, 3, 800
PROMPT = [0, 1]
# Text, seed and position to a drafted token and what it is said to be drawn from.
Drafter = Callable[[list[int], int, int], tuple[int, Proposal]]


def logits(text: list[int], salt: int = 0) -> torch.Tensor:
    """A model: its opinion depends on everything before."""
    return _logits((*text, salt))


@cache
def _logits(key: tuple[int, ...]) -> torch.Tensor:
    draws = torch.Generator().manual_seed(hash(key) & 0xFFFFFFFF)
    return 1.5 * torch.randn(VOCAB, generator=draws)


def drawn(proposal_of: Callable[[list[int]], Proposal]) -> Drafter:
    """A drafter that does as it says."""

    known: dict[tuple[int, ...], Proposal] = {}

    def draft(text: list[int], seed: int, position: int) -> tuple[int, Proposal]:
        if tuple(text) not in known:
            known[tuple(text)] = proposal_of(text)
        proposal = known[tuple(text)]
        return proposal.draw(seed, position), proposal

    return draft


def listed(*chances: float) -> Proposal:
    tokens = [token for token, chance in enumerate(chances) if chance]
    return Proposal.checked(tokens, [chance for chance in chances if chance])


def certainty(text: list[int], seed: int, position: int) -> tuple[int, Proposal]:
    token = (sum(text) + seed) % VOCAB
    return token, Proposal.certain(token)


def noisy_certainty(text: list[int], seed: int, position: int) -> tuple[int, Proposal]:
    """Certain of what the plain contract would choose: it knows seed and model."""
    token = choose_token(logits(text), SamplingRules(seed=seed), position, History(text))
    return token, Proposal.certain(token)


DRAFTERS: dict[str, Drafter] = {
    "the target itself": drawn(lambda text: Proposal.likeliest(logits(text), VOCAB)),
    "another model": drawn(lambda text: Proposal.likeliest(logits(text, 1), VOCAB)),
    "truncated": drawn(lambda text: Proposal.likeliest(logits(text, 1), 2)),
    "flat": drawn(lambda text: listed(*[1 / VOCAB] * VOCAB)),
    "contrary": drawn(lambda text: Proposal.likeliest(-3 * logits(text), VOCAB)),
    "another each time": drawn(lambda text: Proposal.likeliest(logits(text, sum(text)), 3)),
    "certain": certainty,
    "certain of the plain choice": noisy_certainty,
}
PARAMS = {
    "plain": {},
    "filtered": {"temperature": 1.4, "top_k": 4, "top_p": 0.95},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "logit_bias": ((2, 0.7),)},
}


def generate(draft: Drafter, params: SamplingRules) -> tuple[int, ...]:
    """DEPTH tokens, in rounds of chains of two."""
    history = History(PROMPT)
    text = list(PROMPT)
    while len(text) < len(PROMPT) + DEPTH:
        chain, path = [], list(text)
        for _ in range(2):
            token, proposal = draft(path, params.seed, len(path))
            chain.append((token, proposal))
            path.append(token)
        for token, proposal in chain:
            row = logits(text)
            chosen = accept_or_resample(row, params, len(text), history, token, proposal)
            text.append(chosen)
            history.push(chosen)
            if chosen != token:
                break
        else:
            text.append(choose_token(logits(text), params, len(text), history))
            history.push(text[-1])
    return tuple(text[len(PROMPT) :][:DEPTH])


def chances(params: SamplingRules) -> dict[tuple[int, ...], float]:
    """Of every outcome, by the target alone."""
    found = {}
    for path in product(range(VOCAB), repeat=DEPTH):
        chance, history, text = 1.0, History(PROMPT), list(PROMPT)
        for token in path:
            chance *= float(filter_logits(logits(text), params, history).double().softmax(0)[token])
            history.push(token)
            text.append(token)
        found[path] = chance
    return found


def assert_distributed(draft: Drafter, options: dict[str, object], samples: int) -> None:
    """Per position and jointly, each test with a false alarm in 10,000."""
    found = [
        generate(draft, SamplingRules(seed=seed, rejection=True, **options))  # type: ignore[arg-type]
        for seed in range(samples)
    ]
    expected = chances(SamplingRules(**options))  # type: ignore[arg-type]
    assert p_value(found, expected) > FALSE_ALARM, "jointly"
    for place in range(DEPTH):
        alone = {
            token: sum(chance for path, chance in expected.items() if path[place] == token)
            for token in range(VOCAB)
        }
        assert p_value([path[place] for path in found], alone) > FALSE_ALARM, place


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_the_target_s(name: str) -> None:
    assert_distributed(DRAFTERS[name], {}, SAMPLES)


@pytest.mark.parametrize("options", ["filtered", "penalised"])
def test_with_filters_and_penalties(options: str) -> None:
    assert_distributed(DRAFTERS["another model"], PARAMS[options], SAMPLES)


def test_the_tests_notice_what_is_wrong() -> None:
    """The likeliest token passed off as a sample, as in engines that verify top-k trees so."""

    def best(text: list[int], seed: int, position: int) -> tuple[int, Proposal]:
        proposal = Proposal.likeliest(logits(text, 1), VOCAB)
        return int(proposal.tokens[proposal.probabilities.argmax()]), proposal

    with pytest.raises(AssertionError):
        assert_distributed(best, {}, SAMPLES)


def test_a_drafter_like_the_target_gets_everything_accepted() -> None:
    for seed in range(200):
        params = SamplingRules(seed=seed, rejection=True)
        row, history = logits([seed]), History(PROMPT)
        proposal = Proposal.likeliest(row, VOCAB)
        token = proposal.draw(seed, 7)
        assert accept_or_resample(row, params, 7, history, token, proposal) == token


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(lambda c: sum(c) > 1e-3),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)
def test_draws_are_never_impossible(weights: list[float], seed: int, position: int) -> None:
    chances = np.array(weights) / sum(weights)
    proposal = Proposal.checked(range(len(chances)), chances.tolist())
    assert proposal.probabilities[proposal.draw(seed, position)] > 0
    again = Proposal.checked(proposal.tokens.tolist(), proposal.probabilities.tolist())
    assert again.draw(seed, position) == proposal.draw(seed, position), "as it travels"


@pytest.mark.parametrize(
    ("tokens", "probabilities"),
    [
        ([], []), ([1], []), ([1, 1], [0.5, 0.5]), ([1, 2], [1.5, -0.5]), ([1], [math.nan]),
        ([1], [math.inf]), ([1, 2], [0.5, 0.4]), ([1, 2], [0.0, 0.0]),
    ],
)  # fmt: skip
def test_what_is_no_distribution(tokens: list[int], probabilities: list[float]) -> None:
    with pytest.raises(ValueError, match=r"expected|twice|number"):
        Proposal.checked(tokens, probabilities)
