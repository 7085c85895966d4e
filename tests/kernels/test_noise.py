"""The generator against published answers, the noise against its own distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels import gumbel_noise_at
from paceline.kernels.noise import philox

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
