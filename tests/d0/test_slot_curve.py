"""What D0 makes of the stages' reports: rows of a segment -> seconds in the slowest stage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.strategies.parameters import LONGEST_BLOCK

REPORTS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 300), st.floats(0, 10)), max_size=60)


def learned(reports: list[tuple[int, int, float]]) -> SlotCurve:
    curve = SlotCurve()
    for report in reports:
        curve.observe(*report)
    return curve


def roofline(flat: float, knee: float) -> Callable[[int], float]:
    """As long as one row takes up to ``knee`` rows, from there on in proportion to rows."""
    return lambda rows: flat * max(1.0, rows / knee)


@given(REPORTS)
def test_no_row_makes_a_segment_faster(reports: list[tuple[int, int, float]]) -> None:
    curve = learned(reports)
    answers = [curve.seconds(rows) for rows in range(1, 400)]
    assert answers == sorted(answers)
    assert np.isfinite(answers).all()
    assert answers[0] > 0


@given(REPORTS)
def test_no_answer_is_outside_of_what_was_reported(reports: list[tuple[int, int, float]]) -> None:
    """Not below the slowest stage's fastest report, nor, up to twice the rows that all stages have
    reported of, above the slowest report of all."""
    told = [(stage, rows, s) for stage, rows, s in reports if 0 < rows <= 256 and s > 0]
    if not told:
        return
    curve = learned(reports)
    stages = {stage for stage, _, _ in told}
    assert curve.seconds(1) >= max(min(s for v, _, s in told if v == stage) for stage in stages)
    largest = min(max(rows for v, rows, _ in told if v == stage) for stage in stages)
    assert curve.seconds(min(2 * largest, 256)) <= max(s for _, _, s in told)


@given(st.floats(0.01, 1), st.floats(1, 64), st.sets(st.integers(1, 64), min_size=1))
def test_a_roofline_is_never_judged_too_slow(flat: float, knee: float, sizes: set[int]) -> None:
    """Whatever was seen of it: what is bound by memory, then by compute, shows how far it is flat."""
    truth = roofline(flat, knee)
    curve = learned([(1, rows, truth(rows)) for rows in sizes])
    for rows in range(min(sizes), max(sizes) + 1):
        assert curve.seconds(rows) <= truth(rows) * (1 + 1e-9)


@given(st.lists(st.floats(0.001, 1), min_size=64, max_size=64), st.sets(st.integers(1, 64), min_size=1))
def test_exact_at_seen_sizes_and_below_the_chord_between(steps: list[float], sizes: set[int]) -> None:
    truth = np.cumsum(steps)
    seen = sorted(sizes)
    curve = learned([(1, rows, truth[rows - 1]) for rows in seen])
    for rows in seen:
        assert curve.seconds(rows) == pytest.approx(truth[rows - 1])
    for rows in range(seen[0], seen[-1]):
        assert curve.seconds(rows) <= np.interp(rows, seen, truth[np.array(seen) - 1]) + 1e-9


def test_beyond_what_was_seen_it_is_flat_for_as_much_again() -> None:
    curve = learned([(1, 20, 0.5)])
    assert [curve.seconds(rows) for rows in (1, 20, 40, 80, 512)] == pytest.approx([.5, .5, .5, 1.0, 6.4])


def test_at_first_sixteen_rows_take_as_long_as_one() -> None:
    curve = SlotCurve()
    assert curve.seconds(1) == curve.seconds(16) > 0
    assert curve.seconds(32) == 2 * curve.seconds(16)


@given(st.lists(st.floats(1, 100), min_size=6, max_size=6), st.integers(0, 3))
def test_delays_do_not_count(late: list[float], place: int) -> None:
    """Six of the newest nine segments of a size may be late, and two may have been cut short."""
    times = [0.1, 0.1, 0.1, *(0.1 * factor for factor in late)]
    assert learned([(1, 16, s) for s in times]).seconds(16) == pytest.approx(0.1)
    early = [0.001, 0.001, *[0.1] * 7]
    assert learned([(1, 16, s) for s in early[place:] + early[:place]]).seconds(16) == pytest.approx(0.1)


@given(st.floats(0.2, 5))
def test_a_changed_pace_is_noticed_within_nine_segments(factor: float) -> None:
    truth = roofline(0.08, 24)
    before = [(1, rows, truth(rows)) for rows in (1, 8, 16, 24, 40, 64) * 20]
    curve = learned([*before, *((1, rows, factor * s) for _, rows, s in before[:54])])
    for rows in (1, 8, 16, 24, 40, 64):
        assert curve.seconds(rows) == pytest.approx(factor * truth(rows))


def test_a_size_that_was_slow_once_is_forgotten_in_the_end() -> None:
    """After a board has cooled down, say: segments of that size are tried again."""
    curve = learned([(1, 64, 0.8)])
    seen = []
    for _ in range(4096):
        curve.observe(1, 40, 0.1)
        seen.append(curve.seconds(64))
    assert seen[0] == 0.8
    assert seen[-1] == 0.1
    assert seen.index(0.1) > 1000  # not soon, for each time costs a few slow segments


def test_the_slowest_stage_decides_at_each_size() -> None:
    flat, steep = roofline(0.08, 64), roofline(0.02, 4)
    curve = learned([(stage, rows, truth(rows)) for stage, truth in enumerate((flat, steep), start=1)
                     for rows in range(1, 65)])
    for rows in range(1, 65):
        assert curve.seconds(rows) == pytest.approx(max(flat(rows), steep(rows)))


def test_each_row_takes_its_time_over_a_link() -> None:
    told = [(1, 1, 0.08), (1, 64, 0.1)]
    curve, without = learned(told), learned(told)
    curve.link_row_s = 0.001
    for rows in (1, 7, 64, 400):
        assert curve.seconds(rows) == pytest.approx(without.seconds(rows) + 0.001 * rows)


def test_nothing_is_left_of_other_devices() -> None:
    curve = learned([(1, 16, 0.3), (2, 64, 0.9)])
    assert curve.seconds(64) == 0.9
    curve.clear()
    fresh = SlotCurve()
    assert [curve.seconds(rows) for rows in range(1, 99)] == [fresh.seconds(rows) for rows in range(1, 99)]


# ---- what exploring costs ------------------------------------------------------------------------


STAGES, TURNS = 4, 1024
ROWS = np.arange(1, LONGEST_BLOCK + 1)
SHAPES = {
    "flat": np.full(LONGEST_BLOCK, 0.08),
    "flat to 32": 0.08 * np.maximum(1, ROWS / 32),
    "a step after 40": 0.08 + 0.08 * (ROWS > 40),
    "a rise from 12 to 20": 0.08 + 0.02 * np.clip(ROWS - 12, 0, 8),
    "flat, then a gentle slope": 0.08 + 0.00065 * np.maximum(0, ROWS - 16),
    "tiles of 16": 0.08 * np.ceil(ROWS / 16),
    "every row costs": 0.02 + 0.01 * ROWS,
}


def rates(seconds: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """What a segment of 1, 2, … rows brings a second, the way that FlowSpec+ reckons."""
    return gains / (seconds[0] + STAGES * (seconds - seconds[0]))


@pytest.mark.parametrize(("shape", "jitter"), [*zip(SHAPES, cycle((0.03, 0.0)), strict=False)])
def test_to_learn_costs_little_whatever_the_curve(shape: str, jitter: float) -> None:
    """From nothing; each choice against the best one, while reports are as late as the last stage's.

    Every eighth segment is a root alone.  Each further row is .8 or .93 times as likely as the one before.
    """
    truth, random = SHAPES[shape], np.random.default_rng(1)
    for share in (0.8, 0.93):
        gains = np.cumsum(share ** np.arange(LONGEST_BLOCK))
        worth = rates(truth, gains)
        curve, under_way, lost = SlotCurve(), [], []
        for turn in range(TURNS):
            rows = 1
            if turn % 8:
                believed = np.array([curve.seconds(n) for n in ROWS.tolist()])
                rows = int(np.argmax(rates(believed, gains))) + 1
                lost.append(1 - worth[rows - 1] / worth.max())
            under_way.append(rows)
            if len(under_way) == STAGES:
                done = under_way.pop(0)
                curve.observe(1, done, truth[done - 1] * (1 + jitter * abs(random.normal())))
        assert np.mean(lost) < 0.03


def test_sizes_of_a_sparse_model_lie_on_a_line() -> None:
    """Below the truth of U(n), which bends downwards; a roofline's guess is flat at first."""
    sparse, dense = SlotCurve(sparse=True), SlotCurve()
    for curve in (sparse, dense):
        curve.observe(1, 1, 10.0)
        curve.observe(1, 16, 40.0)
    assert [sparse.seconds(rows) for rows in (1, 2, 8, 16)] == pytest.approx([10, 12, 24, 40])
    assert dense.seconds(2) == 10
