"""The search for loops against its definition, spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.bench.samples import PERIOD, SHORTEST, TIMES, repeats_itself


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


@given(texts())
def test_loops_are_found_as_defined(tokens: list[int]) -> None:
    assert repeats_itself(tokens) == by_definition(tokens)


@given(st.lists(st.integers(0, 1), max_size=80))
def test_noise_is_judged_as_defined(tokens: list[int]) -> None:
    assert repeats_itself(tokens) == by_definition(tokens)


def test_both_sides_of_the_limit() -> None:
    longest = list(range(PERIOD))
    assert repeats_itself(longest * TIMES)
    assert not repeats_itself((longest * TIMES)[:-1])
    assert repeats_itself([7] * SHORTEST)
    assert not repeats_itself([7] * (SHORTEST - 1))
    assert not repeats_itself([*range(PERIOD + 1)] * 5)
