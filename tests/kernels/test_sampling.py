"""Noise, filters against a plain reading of their definition, choices of tokens and candidates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import sampling_rules
from torch import Tensor

from paceline.kernels import (
    History,
    SamplingRules,
    best_candidates,
    choose_token,
    edits,
    filter_logits,
    gumbel_noise_at,
    raw_logprobs,
    sampling,
)
from paceline.kernels.noise import philox

EMPTY = History([])


def plain_filter(logits: Tensor, params: SamplingRules, history: History) -> list[float]:
    """The documented order, one token at a time, in Python floats of float32 steps."""
    x = logits.float().tolist()
    for token in history.prompt | set(history.output):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(history.output):
        count = history.output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    if params.temperature == 0:
        return x
    x = [value / params.temperature for value in x]
    kept = set(range(len(x)))
    if params.min_p:
        best = max(x)
        kept = {v for v in kept if x[v] >= best + math.log(params.min_p)}
    order = sorted(kept, key=lambda v: (-x[v], v))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        best = x[order[0]]
        weights = [math.exp(x[v] - best) for v in order]
        reached, count = 0.0, 0
        while count < len(order) and reached < params.top_p * sum(weights):
            reached += weights[count]
            count += 1
        order = order[:count]
    return [value if v in set(order) else -math.inf for v, value in enumerate(x)]


@given(params=sampling_rules(penalties=True), seed=st.integers(0, 10**6))
def test_filters_do_what_their_definition_says(params: SamplingRules, seed: int) -> None:
    logits = 3 * torch.randn(64, generator=torch.Generator().manual_seed(seed))
    history = History([1, 2, 2, 60], [2, 7, 7, 7])
    found = filter_logits(logits, params, history)
    expected = torch.tensor(plain_filter(logits, params, history))
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "kept"),
    [({"top_k": 2}, [1, 2]), ({"top_k": 3}, [1, 2, 3]), ({"top_p": 0.3}, [1, 2])],
)
def test_ties_go_to_the_lower_id(change: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([0.0, 5.0, 5.0, 5.0, 5.0])
    found = filter_logits(logits, SamplingRules(**change), EMPTY)  # type: ignore[arg-type]
    assert found.isfinite().nonzero()[:, 0].tolist() == kept


def test_ties_go_to_the_lower_id_across_a_large_vocabulary() -> None:
    logits = torch.zeros(5000)
    kept = filter_logits(logits, SamplingRules(top_k=700), EMPTY).isfinite()
    assert kept[:700].all()
    assert not kept[700:].any()
    kept = filter_logits(logits, SamplingRules(top_p=0.5), EMPTY).isfinite()
    assert kept.sum().item() == pytest.approx(2500, abs=1)
    assert kept[: int(kept.sum())].all()
    assert choose_token(logits, SamplingRules(temperature=0), 0, EMPTY) == 0


@given(params=sampling_rules(penalties=True), position=st.integers(0, 10**6))
def test_the_choice_is_the_best_filtered_noisy_logit(params: SamplingRules, position: int) -> None:
    """Greedy too, where penalties and biases count."""
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(position))
    history = History([1, 2, 2], [2, int(logits.argmax())])
    expected = filter_logits(logits, params, history)
    if params.temperature:
        expected = expected + gumbel_noise_at(params.seed, position, torch.arange(300))
    assert choose_token(logits, params, position, history) == int(expected.argmax())


@given(
    params=sampling_rules(),
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from((1, 2, 63, 511, 513, 1024, 20_001)),
    spread=st.sampled_from((0.0, 0.3, 3.0, 30.0)),
    kind=st.sampled_from(("any", "equal ones", "few allowed")),
)
def test_compiled_kernels_choose_as_torch_does(
    params: SamplingRules, seed: int, vocab: int, spread: float, kind: str
) -> None:
    """Many equal scores, a mask of a grammar, a flat and a sharp distribution included."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(vocab, generator=generator)
    if kind == "equal ones":
        logits = logits.round()
    if kind == "few allowed":
        logits[torch.rand(vocab, generator=generator) < 0.99] = -math.inf
        logits[vocab // 2] = 0.0
    found = choose_token(logits, params, seed, EMPTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_choose", lambda *_: None)
        assert found == choose_token(logits, params, seed, EMPTY)


def test_choices_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    counts = torch.zeros(5)
    for seed in range(8000):
        counts[choose_token(logits, SamplingRules(seed=seed), 3, EMPTY)] += 1
    expected = 8000 * logits.softmax(0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 23  # 4 degrees of freedom, p = 1e-4


def test_ids_outside_the_vocabulary_are_refused() -> None:
    params = SamplingRules(logit_bias=((10, 1.0),))
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        choose_token(torch.zeros(5), params, 0, EMPTY)


def test_raw_logprobs() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0])
    logprob, best = raw_logprobs(logits, 0, 2)
    expected = logits.log_softmax(0)
    assert logprob == pytest.approx(expected[0].item())
    assert [token for token, _ in best] == [1, 2]
    assert best[0][1] == pytest.approx(expected[1].item())
    assert raw_logprobs(logits, 0, 0)[1] == []
    assert len(raw_logprobs(logits, 0, 99)[1]) == 4


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
    noise = torch.randn(vocab, generator=draws)
    perturbed = best_candidates(scores / 0.7 + noise, width)
    assert all(map(torch.equal, best_candidates(scores, width, 0.7, noise), perturbed))


def test_equal_scores_come_in_the_order_of_their_ids() -> None:
    scores = torch.zeros(2, 300)
    scores[1, [299, 5, 70]] = 1.0
    assert best_candidates(scores, 4)[0].tolist()[1][:3] == [5, 70, 299]


@given(
    prompt=st.lists(st.integers(0, 9), max_size=6),
    moves=st.lists(st.none() | st.integers(0, 9), max_size=40),
)
def test_the_penalties_of_a_history_are_those_of_its_tokens(
    prompt: list[int], moves: list[int | None]
) -> None:
    history, output = History(prompt), list[int]()
    for token in moves:
        if token is not None:
            history.push(token)
            output.append(token)
        elif output:
            assert history.pop() == output.pop()
    params = SamplingRules(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    (seen, _), (emitted, penalties), _ = edits(params, history)
    assert sorted(seen) == sorted({*prompt, *output})
    counts = {token: 0.25 + 0.5 * output.count(token) for token in output}
    assert dict(zip(emitted.tolist(), penalties.tolist(), strict=True)) == counts


# Known answers of philox4x32-10 from the Random123 distribution: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    a, b, c, d = words(counter)
    k, other = words(key)
    assert list(philox((a, b, c, d), (k, other))) == words(expected)
    many = [np.full(3, word, np.uint64) for word in (a, b, c, d)]
    found = philox((many[0], many[1], many[2], many[3]), (k, other))
    assert np.array(found).T.tolist() == [words(expected)] * 3


def spelled_out(seed: int, position: int, token: int) -> float:
    """The documented layout, one number at a time."""
    counter = (position & 0xFFFFFFFF, position >> 32, token >> 1, 0)
    out = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    high, low = (out[0], out[1]) if token % 2 == 0 else (out[2], out[3])
    u = (((high << 20) | (low >> 12)) + 0.5) * 2.0**-52
    return float(np.float32(-math.log(-math.log(u))))


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
    ids=st.lists(st.integers(0, 2**31), max_size=40),
)
def test_noise_follows_the_documented_layout(seed: int, position: int, ids: list[int]) -> None:
    noise = gumbel_noise_at(seed, position, torch.tensor(ids, dtype=torch.int64))
    assert noise.dtype == torch.float32
    expected = [spelled_out(seed, position, token) for token in ids]
    np.testing.assert_array_max_ulp(noise.numpy(), np.array(expected, np.float32), maxulp=1)


@pytest.mark.parametrize("vocab", [1, 2, 8191, 8192, 8193, 20001])
def test_some_ids_get_the_noise_of_all(vocab: int) -> None:
    ids = torch.randint(vocab, (50,))
    whole = gumbel_noise_at(7, 9, torch.arange(vocab))
    assert torch.equal(gumbel_noise_at(7, 9, ids), whole[ids])


def test_noise_is_standard_gumbel() -> None:
    ids = torch.arange(50000)
    noise = torch.cat([gumbel_noise_at(3, position, ids) for position in range(20)]).double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=4e-3)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=2e-2)
    ranked = noise.sort().values
    expected = (-(-ranked).exp()).exp()
    empirical = (torch.arange(ranked.numel()) + 0.5) / ranked.numel()
    assert (expected - empirical).abs().max().item() < 2e-3  # Kolmogorov-Smirnov, 1e6 draws


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1)])
def test_numbers_out_of_range_are_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        gumbel_noise_at(seed, position, torch.arange(4))
