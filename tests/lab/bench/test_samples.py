"""Standard errors against the textbook's and against the bootstrap; texts that repeat themselves."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.lab.bench.estimates import Estimate, average, mean, ratio
from flowspec_edge.lab.bench.samples import PERIOD, SHORTEST, TIMES, repeats_itself


def test_a_means_error_is_the_textbooks() -> None:
    values = [3.1, 4.0, 9.5, 1.2, 5.5]
    assert mean(values).value == pytest.approx(fmean(values))
    assert mean(values).error == pytest.approx(stdev(values) / sqrt(len(values)))


def test_a_ratios_error_is_the_bootstraps() -> None:
    rng = np.random.default_rng(1)
    under = rng.uniform(5, 15, 200)
    over = 1.4 * under + rng.normal(0, 1.5, 200)
    drawn = rng.integers(0, 200, (4000, 200))
    spread = (over[drawn].sum(1) / under[drawn].sum(1)).std()
    found = ratio(list(over), list(under))
    assert found.value == pytest.approx(over.sum() / under.sum())
    assert found.error == pytest.approx(spread, rel=0.1)


def test_one_prompt_has_no_error() -> None:
    assert ratio([3.0], [2.0]) == Estimate(1.5, None)
    assert average([Estimate(1.0, 0.3), Estimate(3.0, None)]) == Estimate(2.0, None)
    assert average([Estimate(1.0, 0.3), Estimate(3.0, 0.4)]) == Estimate(2.0, 0.25)


def by_definition(tokens: list[int]) -> bool:
    return any(
        tokens[start:start + length] == (tokens[start:start + period] * length)[:length]
        for period in range(1, PERIOD + 1)
        for length in [max(SHORTEST, TIMES * period)]
        for start in range(len(tokens) - length + 1))


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Something, a loop of about the length that counts, something."""
    letters = st.lists(st.integers(0, 2), max_size=8)
    unit = draw(st.lists(st.integers(0, 5), min_size=1, max_size=PERIOD + 2))
    length = max(SHORTEST, TIMES * len(unit)) + draw(st.integers(-2, 2))
    return [*draw(letters), *(unit * length)[:length], *draw(letters)]


@given(texts() | st.lists(st.integers(0, 1), max_size=80))
def test_loops_are_found_as_defined(tokens: list[int]) -> None:
    assert repeats_itself(tokens) == by_definition(tokens)
