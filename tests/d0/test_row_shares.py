"""How a batch's rows are shared, against brute force over all divisions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.d0.row_shares import (
    divide,
    divide_in_order,
    fair_weights,
    prompt_rows_beside,
)
from flowspec_edge.strategies.slot_worth import SlotWorth

falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(lambda row: sorted(row, reverse=True))
offers = st.lists(falling, min_size=1, max_size=4)


def curve(flat: int, slope: float) -> Callable[[int], float]:
    return lambda rows: 1.0 + slope * max(0, rows - flat)


def rate(found: list[list[float]], shares: tuple[int, ...], seconds: Callable[[int], float], stages: int,
         taken: int, gained: float) -> float:
    gain = gained + sum(sum(offer[:n]) for offer, n in zip(found, shares, strict=True))
    return gain / (seconds(1) + stages * (seconds(taken + sum(shares)) - seconds(1)))


@given(found=offers, flat=st.integers(1, 12), slope=st.floats(0.001, 0.5), stages=st.integers(1, 6),
       taken=st.integers(0, 10),
       weights=st.lists(st.sampled_from([1.0, 0.5, 0.125]), min_size=4, max_size=4))
def test_no_division_with_the_guaranteed_rows_is_faster(found: list[list[float]], flat: int, slope: float,
                                                        stages: int, taken: int, weights: list[float]
                                                        ) -> None:
    seconds, gained = curve(flat, slope), float(taken > 0)
    weights = weights[:len(found)]
    shares = divide(found, seconds, stages, 24, taken, gained, weights)
    free = max(n for n in range(1, 25) if seconds(n) <= 1.05 * seconds(1))
    sure = [min(len(offer), max(1, int(free * weight / sum(weights))))
            for offer, weight in zip(found, weights, strict=True)]
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


def test_a_weight_of_two_guarantees_twice_the_rows() -> None:
    likely, unlikely = [0.9] * 20, [0.1] * 20
    free_rows = curve(12, 1e9)
    assert divide([unlikely, likely], free_rows, 4, 24) == [6, 6]
    assert divide([unlikely, likely], free_rows, 4, 24, weights=[2.0, 1.0]) == [8, 4]
    assert divide([unlikely, likely, likely], free_rows, 4, 24, weights=[1000.0, 1.0, 1.0]) == [10, 1, 1]


def test_a_step_of_priority_is_a_factor_of_four() -> None:
    alone = fair_weights([()] * 4, [0, 1, 3, -1])
    assert [weight / alone[3] for weight in alone] == pytest.approx([1 / 4, 1 / 16, 1 / 256, 1.0])
    least, *_ = fair_weights([()] * 2, [2**63 - 1, -(2**63)])
    assert least > 0
    assert fair_weights([], []) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("abc"), st.integers(-10, 10)), min_size=1))
def test_priorities_do_not_change_a_callers_weight(requests: list[tuple[str, str, int]]) -> None:
    callers = [(key, user) for key, user, _ in requests]
    weights = fair_weights(callers, [priority for *_, priority in requests])
    assert sum(weights) == pytest.approx(1.0)
    keys = {key for key, _ in callers}
    for key in keys:
        users = {user for other, user in callers if other == key}
        for user in users:
            own = [weight for caller, weight in zip(callers, weights, strict=True) if caller == (key, user)]
            assert sum(own) == pytest.approx(1 / len(keys) / len(users))


@given(found=offers, flat=st.integers(1, 12), slope=st.floats(0.001, 0.5), stages=st.integers(1, 6))
def test_in_order_the_first_has_what_it_would_have_alone(
        found: list[list[float]], flat: int, slope: float, stages: int) -> None:
    seconds = curve(flat, slope)
    first, *others = divide_in_order(found, seconds, stages, 24)
    assert [first] == divide(found[:1], seconds, stages, 24 - len(found) + 1)
    assert all(1 <= share <= len(offer) for offer, share in zip(found[1:], others, strict=True))
    at_least = first + len(others)
    assert first + sum(others) <= max(at_least, sum(
        seconds(n) <= 1.05 * seconds(first) for n in range(1, 60)))


def test_rows_beside_segments_that_fill_every_slot() -> None:
    """Where every row costs time, a request that is never worth a slot's second row is not left waiting."""
    slot = SlotWorth(4)
    assert [divide([[0.9, 0.2]], curve(1, 1.0), 4, 16, 1, 1.0, slot=slot) for _ in range(5)] == [[1]] * 5


def test_in_order_what_the_first_leaves_free_goes_to_the_next() -> None:
    likely, unlikely = [0.9] * 5, [0.1] * 20
    assert divide_in_order([likely, unlikely, likely], curve(12, 1e9), 4, 24) == [5, 6, 1]
    assert divide_in_order([unlikely, likely, likely], curve(12, 1e9), 4, 24) == [12, 1, 1]


@given(found=offers, most=st.integers(4, 24))
def test_in_order_there_are_no_more_rows_than_room(found: list[list[float]], most: int) -> None:
    assert sum(divide_in_order(found, curve(24, 0.0), 4, most)) == min(most, sum(map(len, found)))
    longest = max(len(found), *map(len, found))
    shares = divide_in_order(found, None, 4, 24)
    assert sum(shares) == min(longest, sum(map(len, found)))
    assert min(shares) >= 1


@given(flat=st.integers(1, 40), slope=st.floats(0.001, 0.5), others=st.integers(1, 64),
       most=st.integers(1, 300))
def test_a_prompt_slows_the_others_by_a_quarter_at_most(flat: int, slope: float, others: int, most: int
                                                         ) -> None:
    seconds = curve(flat, slope)
    rows = prompt_rows_beside(seconds, others, most)
    fits = [n for n in range(1, most + 1) if seconds(others + n) <= 1.25 * seconds(others)]
    assert rows == (max(fits) if fits else 1)


@pytest.mark.parametrize(("seconds", "others"), [(None, 5), (curve(4, 0.1), 0)])
def test_a_prompt_alone_is_not_held_back(seconds: Callable[[int], float] | None, others: int) -> None:
    assert prompt_rows_beside(seconds, others, 200) == 200
