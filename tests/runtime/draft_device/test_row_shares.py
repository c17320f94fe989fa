"""How a batch's rows are shared, against brute force over all divisions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.runtime.draft_device.scheduling.row_shares import divide, prompt_rows

falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(lambda row: sorted(row, reverse=True))
offers = st.lists(falling, min_size=1, max_size=4)


def curve(flat: int, slope: float) -> Callable[[int], float]:
    return lambda rows: 1.0 + slope * max(0, rows - flat)


def rate(found: list[list[float]], shares: tuple[int, ...], seconds: Callable[[int], float], stages: int,
         taken: int, gained: float) -> float:
    gain = gained + sum(sum(offer[:n]) for offer, n in zip(found, shares, strict=True))
    return gain / (seconds(1) + stages * (seconds(taken + sum(shares)) - seconds(1)))


@given(found=offers, flat=st.integers(1, 12), slope=st.floats(0.001, 0.5), stages=st.integers(1, 6),
       taken=st.integers(0, 10))
def test_no_division_with_the_guaranteed_rows_is_faster(found: list[list[float]], flat: int, slope: float,
                                                        stages: int, taken: int) -> None:
    seconds, gained = curve(flat, slope), float(taken > 0)
    shares = divide(found, seconds, stages, 24, taken, gained)
    free = max(n for n in range(1, 25) if seconds(n) <= 1.05 * seconds(1))
    sure = [min(len(offer), max(1, free // len(found))) for offer in found]
    chosen = rate(found, tuple(shares), seconds, stages, taken, gained)
    for other in product(*(range(len(offer) + 1) for offer in found)):
        allowed = all(n >= least for n, least in zip(other, sure, strict=True))
        if allowed and 0 < sum(other) <= 24:
            assert chosen >= rate(found, other, seconds, stages, taken, gained) - 1e-9
    assert 0 < sum(shares) <= 24


@given(found=offers, flat=st.integers(8, 24))
def test_rows_that_cost_nothing_are_used_and_everybody_has_some(found: list[list[float]], flat: int) -> None:
    shares = divide(found, curve(flat, 1e9), 4, 24)
    assert sum(shares) == min(flat, sum(map(len, found)))
    for offer, share in zip(found, shares, strict=True):
        assert share >= min(len(offer), flat // len(found))


@given(found=offers)
def test_without_a_curve_a_batch_is_as_long_as_the_longest_offer(found: list[list[float]]) -> None:
    most = max(len(found), *map(len, found))
    assert sum(divide(found, None, 4, 24)) == min(most, sum(map(len, found)))


@given(flat=st.integers(1, 40), slope=st.floats(0.001, 0.5), others=st.integers(1, 64),
       most=st.integers(1, 300))
def test_a_prompt_slows_the_others_by_a_quarter_at_most(flat: int, slope: float, others: int, most: int
                                                         ) -> None:
    seconds = curve(flat, slope)
    rows = prompt_rows(seconds, others, most)
    fits = [n for n in range(1, most + 1) if seconds(others + n) <= 1.25 * seconds(others)]
    assert rows == (max(fits) if fits else 1)


@pytest.mark.parametrize(("seconds", "others"), [(None, 5), (curve(4, 0.1), 0)])
def test_a_prompt_alone_is_not_held_back(seconds: Callable[[int], float] | None, others: int) -> None:
    assert prompt_rows(seconds, others, 200) == 200
