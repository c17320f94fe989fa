"""The sampling rule against transformers' warpers and against the distributions it must follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.rule import Rank, Sampling, choose, log_probs, scores_from_probabilities


def warped(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """p by transformers' own warpers, in their order, in float64."""
    scores = torch.tensor(logits, dtype=torch.float64)
    scores = TemperatureLogitsWarper(s.temperature)(None, scores)
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(None, scores)
    if s.top_p < 1:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    return torch.softmax(scores, -1).numpy()


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.7, 1.0, 2.0]), st.sampled_from([0, 1, 3, 50]),
       st.sampled_from([0.1, 0.5, 0.9, 1.0]))
@examples(60, quick=24)
def test_probabilities_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (3, 20))
    s = Sampling(temperature, top_k, top_p)
    np.testing.assert_allclose(np.exp(log_probs(logits, s)), warped(logits, s), atol=1e-9)


# Upper 1e-6 points of the chi-square distribution (Abramowitz and Stegun, table 26.8, extended).
CRITICAL = {2: 27.63, 4: 33.38, 7: 40.52}


@pytest.mark.parametrize(("sampling", "freedom"), [
    (Sampling(1.0, seed=5), 7), (Sampling(0.6, seed=6), 7), (Sampling(1.5, top_k=5, seed=7), 4),
    (Sampling(1.0, top_p=0.75, seed=8), 2),
])
def test_draws_follow_the_distribution(sampling: Sampling, freedom: int) -> None:
    logits = np.array([[1.0, 0.6, 0.3, 0.0, -0.2, -0.5, -0.8, -1.1]])
    if sampling.top_p < 1:
        logits = np.array([[2.0, 1.6, 1.3, -0.5, -1.0, -1.0, -2.0, -2.0]])
    p = warped(logits, sampling)[0]
    draws = 20_000
    drawn = choose(np.repeat(logits, draws, 0), np.arange(draws), sampling)
    counts = np.bincount(drawn, minlength=8)
    allowed = p > 0
    assert allowed.sum() == freedom + 1
    assert counts[~allowed].sum() == 0
    statistic = (((counts - draws * p) ** 2)[allowed] / (draws * p[allowed])).sum()
    assert statistic < CRITICAL[freedom]


def test_rows_at_the_same_position_share_their_noise() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 50))
    twice = choose(np.repeat(logits, 2, 0), np.array([9, 9]), Sampling(1.0, seed=1))
    assert twice[0] == twice[1]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.75, 0.99])
def test_a_childs_chance_given_noise_is_its_average_chance(p: float) -> None:
    """Over many positions; and it wins where the score says so: score and outcome share the noise."""
    positions, vocabulary, token = 4000, 40, 7
    sampling = Sampling(1.0, seed=11)
    ids, chance = np.array([token], np.int32), np.array([p])
    scores = np.array([scores_from_probabilities(ids, chance, position, sampling, "noise")[0]
                       for position in range(positions)])
    assert (scores <= 0).all()
    assert np.exp(scores).mean() == pytest.approx(p, abs=0.02)
    logits = np.full((positions, vocabulary), np.log((1 - p) / (vocabulary - 1)))
    logits[:, token] = np.log(p)
    won = choose(logits, np.arange(positions), sampling) == token
    for low, high in ((0.0, 0.2), (0.2, 0.8), (0.8, 1.0)):
        there = (np.exp(scores) >= low) & (np.exp(scores) <= high)
        if there.sum() > 100:
            assert won[there].mean() == pytest.approx(np.exp(scores[there]).mean(), abs=0.1)


@pytest.mark.parametrize(("sampling", "rank"), [(Sampling(1.0, seed=3), "draft"), (Sampling(), "noise"),
                                                (Sampling(), "draft")])
def test_without_noise_a_chance_is_its_score(sampling: Sampling, rank: Rank) -> None:
    p = np.array([0.5, 0.25, 1.0])
    scores = scores_from_probabilities(np.array([3, 4, 5], np.int32), p, 12, sampling, rank)
    np.testing.assert_allclose(np.exp(scores), p)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1},
                                 {"top_p": -0.1}, {"top_p": 1.5}, {"seed": -1}])
def test_bad_parameters_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        Sampling(**bad)  # type: ignore[arg-type]
