"""The noise of sampling on each device that is here: its words against SplitMix64 in Python integers and
published outputs, its values against decimal arithmetic, both against the distributions they must have."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.torch_devices import DEVICES

from flowspec_edge.sampling import sampler
from flowspec_edge.sampling.rule import gumbel, gumbel_at, gumbel_from, keys, splitmix64
from flowspec_edge.sampling.sampler import _noise, device_words, noise_rows
from microbench.shapes.launches import launches

MASK = 2**64 - 1
LONG = 1 << 17  # words of a stream whose distribution is tested
SIGMAS = 6.0  # of a normal statistic: one in 5e8; the streams are always the same


class SplitMix64:
    """Vigna's splitmix64.c, whose state is a counter, so outputs can be skipped."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def skip(self, outputs: int) -> SplitMix64:
        self._state = (self._state + outputs * 0x9E3779B97F4A7C15) & MASK
        return self

    def next(self) -> int:
        self.skip(1)
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def words_of(seed: int, position: int, vocabulary: int) -> list[int]:
    """As ``rule`` defines them: position and token each choose an output of a generator."""
    tokens = SplitMix64(SplitMix64(seed).skip(position).next())
    return [tokens.next() for _ in range(vocabulary)]


@pytest.mark.parametrize(("seed", "published"), [
    (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
               16408922859458223821]),
    (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC])])
def test_outputs_are_those_that_others_have_published(seed: int, published: list[int]) -> None:
    oracle = SplitMix64(seed)
    assert [oracle.next() for _ in published] == published
    found = splitmix64(np.array([seed]), np.arange(len(published)))
    assert found.view(np.uint64).tolist() == published


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**62), min_size=1, max_size=3),
       st.integers(1, 300))
@examples(40, quick=16)
def test_the_words_are_the_same_on_every_machine(
    device: str, seed: int, positions: list[int], vocabulary: int
) -> None:
    at = np.array(positions)
    expected = [words_of(seed, position, vocabulary) for position in positions]
    found = device_words(seed, at, vocabulary, torch.device(device)).cpu().numpy()
    assert found.view(np.uint64).tolist() == expected
    host = splitmix64(keys(seed, at)[:, None], np.arange(vocabulary))
    assert host.view(np.uint64).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@given(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**20), 2**20),
                 st.sampled_from([0, -1, 2**63 - 1, -(2**63)])))
@examples(200, quick=80)
def test_the_noise_of_a_word_is_exact_to_the_last_digits(device: str, word: int) -> None:
    """In float32, too, where u is nearly 0 or nearly 1."""
    with localcontext(prec=60):
        u = (Decimal(word % 2**64) + Decimal("0.5")) / 2**64
        expected = float(-(-u.ln()).ln())
    assert gumbel_from(np.array([word]))[0] == pytest.approx(expected, rel=1e-14, abs=1e-15)
    for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        found = sampler.gumbel_from(torch.tensor([word], device=device), dtype)
        assert found.dtype == dtype
        assert found.item() == pytest.approx(expected, rel=error, abs=error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_rows_and_of_single_tokens_is_the_definitions(device: str, dtype: torch.dtype) -> None:
    positions = np.array([5, 3000, 5, 6, 0, 3, 4, 2**40])
    rows = noise_rows(7, positions, 1001, torch.empty(0, device=device, dtype=dtype))
    error = 1e-6 if dtype == torch.float32 else 1e-14
    for row, position in zip(rows, positions.tolist(), strict=True):
        np.testing.assert_allclose(row.cpu().numpy(), gumbel(7, position, 1001), rtol=error, atol=error)
    tokens = np.array([0, 1, 2, 999, 1000, 3, 4, 5], np.int32)
    single = gumbel_at(7, positions, tokens)
    assert single.tolist() == [gumbel(7, p, 1001)[t] for p, t in zip(positions.tolist(), tokens, strict=True)]
    assert gumbel_at(7, positions[:1], tokens).tolist() == gumbel(7, 5, 1001)[tokens].tolist()
    np.testing.assert_array_equal(gumbel(7, 5, 10), gumbel(7, 5, 1001)[:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_in_blocks_of_positions_is_that_of_each(dtype: torch.dtype) -> None:
    """As an accelerator makes it, here on the CPU."""
    made = _noise(375, 8, 7, 1001, torch.device("cpu"), dtype)
    rows = noise_rows(7, np.arange(3000, 3008), 1001, torch.empty(0, dtype=dtype))
    torch.testing.assert_close(made, torch.stack(rows), rtol=0, atol=0)


def test_new_positions_cost_few_launches() -> None:
    """On a small board each takes tens of microseconds; what is made once serves later rows."""
    like = torch.empty(0)
    assert launches(lambda: _noise(0, 8, 1, 50, like.device, like.dtype)) <= 30
    assert launches(lambda: noise_rows(2**40, np.array([8]), 50, like)) <= 23
    assert launches(lambda: noise_rows(2**40, np.array([8]), 50, like)) == 0


# ---- distributions -------------------------------------------------------------------------------


def stream(along: str) -> np.ndarray:
    """Words [LONG] as uint64: of one position's tokens, of a token at every position, of eight tokens with
    every seed from 0."""
    if along == "tokens":
        words = splitmix64(keys(0, np.array([0])), np.arange(LONG))
    elif along == "positions":
        words = splitmix64(keys(0, np.arange(LONG)), np.array([0]))
    else:
        words = np.concatenate([splitmix64(keys(seed, np.array([0])), np.arange(8))
                                for seed in range(LONG // 8)])
        words = words.reshape(-1, 8).T.flatten()  # so that neighbours are of neighbouring seeds
    return words.view(np.uint64)


def too_large(chi_square: float, freedom: int) -> bool:
    """By Wilson and Hilferty's normal approximation."""
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return abs(z) > SIGMAS


def assert_even(cells: np.ndarray, count: int) -> None:
    """Chi-square of values below ``count``; too even is wrong, too."""
    found, expected = np.bincount(cells.astype(np.int64), minlength=count), len(cells) / count
    assert not too_large(float(((found - expected) ** 2).sum() / expected), count - 1)


def assert_follows(values: np.ndarray, distribution: np.ndarray) -> None:
    """Kolmogorov and Smirnov: ``distribution`` is the exact one at the sorted ``values``."""
    n = len(values)
    steps = np.arange(n)
    distance = max((distribution - steps / n).max(), ((steps + 1) / n - distribution).max())
    most = math.sqrt(-math.log(NormalDist().cdf(-SIGMAS)) / 2)  # P(D sqrt n > x) = 2 exp(-2 x^2)
    assert distance * math.sqrt(n) < most


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_words_are_uniform_and_their_neighbours_tell_nothing(along: str) -> None:
    words = stream(along)
    assert len(np.unique(words)) == LONG
    bits = np.unpackbits(words.view(np.uint8).reshape(LONG, 8), axis=1).astype(np.float64)
    for flips in (bits, np.abs(np.diff(bits, axis=0))):  # as often 1 as 0, and as often as the one before
        assert (np.abs(flips.mean(0) - 0.5) * 2 * math.sqrt(len(flips)) < SIGMAS).all()
    signs = 2 * bits - 1
    for lag in (0, 1):  # each pair of bits, of a word and of two
        both = signs[: LONG - lag].T @ signs[lag:] / math.sqrt(LONG - lag)
        if lag == 0:
            np.fill_diagonal(both, 0.0)
        assert (np.abs(both) < SIGMAS).all()
    for shift in (0, 28, 56):
        assert_even(words >> np.uint64(shift) & np.uint64(255), 256)
    top = words >> np.uint64(59)
    assert_even(top[1:] * np.uint64(32) + top[:-1], 1024)
    low = words & np.uint64(31)
    assert_even(low[1:] * np.uint64(32) + low[:-1], 1024)
    # Of the number of bits that neighbours do not share, binomial with mean 32 and variance 16.
    apart = np.abs(np.diff(bits, axis=0)).sum(1)
    assert abs(apart.mean() - 32) / 4 * math.sqrt(len(apart)) < SIGMAS
    assert abs(apart.var() - 16) / 16 * math.sqrt(len(apart) / 2) < SIGMAS


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
@pytest.mark.parametrize("dtype", ["host", torch.float32])
def test_noise_follows_gumbels_distribution(along: str, dtype: object) -> None:
    words = stream(along).view(np.int64)
    if isinstance(dtype, torch.dtype):
        noise = sampler.gumbel_from(torch.from_numpy(words), dtype).double().numpy()
    else:
        noise = gumbel_from(words)
    noise = np.sort(noise)
    assert_follows(noise, np.exp(-np.exp(-noise)))
    # The tails count most: of the largest, exp(-g) is an exponential's smallest, evenly spaced on average.
    most = np.exp(-noise[-64:]) * LONG
    assert abs(most.max() - 64) / 8 < SIGMAS


def test_noise_of_seeds_and_positions_is_independent() -> None:
    """Correlations of all pairs of 64 rows, and of each with the next tokens' of all."""
    rows = np.stack([gumbel(seed, position, 20_000) for seed in range(8) for position in range(8)])
    rows = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    for lag in (0, 1, 2):
        found = rows[:, lag:] @ rows[:, : 20_000 - lag].T / math.sqrt(20_000 - lag)
        if lag == 0:
            np.fill_diagonal(found, 0.0)
        assert (np.abs(found) < SIGMAS).all()
