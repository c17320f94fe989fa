"""Fits recover known curves and lines; isotonic regression against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.boards.measurement.fit import (
    SegmentCase,
    fit_lines,
    fit_stage,
    isotonic,
    relative_errors,
    trimmed_mean,
)
from flowspec_edge.device_profile import StageCurve

ROWS = (1, 2, 4, 8, 16, 32, 64)
KNOWN = StageCurve(layers=1, rows=list(ROWS), ms=[5, 5, 5.1, 5.3, 6, 8, 12],
                   context_ms=[0.5, 0.6, 0.6, 0.7, 1, 2, 4], overhead_ms=1.25)


def cases(layers: tuple[int, ...] = (2, 8), contexts: tuple[int, ...] = (64, 512, 1500)) -> list[SegmentCase]:
    return [SegmentCase(*case) for case in itertools.product(layers, ROWS, contexts)]


def milliseconds(curve: StageCurve, case: SegmentCase) -> float:
    """By numpy's interpolation and the definition of StageCurve."""
    per_layer = np.interp(case.rows, curve.rows, curve.ms)
    if curve.context_ms:
        per_layer += np.interp(case.rows, curve.rows, curve.context_ms) * case.context / 1000
    return float(curve.overhead_ms + case.layers * per_layer / curve.layers)


def test_a_curve_is_found_from_its_times() -> None:
    times = {case: milliseconds(KNOWN, case) for case in cases()}
    found = fit_stage(times)
    assert found.rows == list(ROWS)
    assert found.ms == pytest.approx(KNOWN.ms, rel=1e-3)
    assert found.context_ms == pytest.approx(KNOWN.context_ms, rel=1e-2)
    assert found.overhead_ms == pytest.approx(1.25, rel=1e-2)
    assert np.abs(relative_errors(found, times)).max() < 1e-3


def test_noise_is_averaged() -> None:
    noise = np.random.default_rng(0)
    times = {case: milliseconds(KNOWN, case) * noise.normal(1, 0.03) for case in cases()}
    found = fit_stage(times)
    for case in cases((4,), (1000,)):
        fitted = found.overhead_ms + case.layers * found.milliseconds(case.rows, case.context)
        assert fitted == pytest.approx(milliseconds(KNOWN, case), rel=0.06)


def test_one_layer_count_or_context_fits_no_slope() -> None:
    times = {case: milliseconds(KNOWN, case) for case in cases((4,), (512,))}
    found = fit_stage(times)
    assert (found.overhead_ms, found.context_ms) == (0, [])
    assert [4 * found.milliseconds(rows) for rows in ROWS] == pytest.approx(
        [times[SegmentCase(4, rows, 512)] for rows in ROWS], rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_measured_makes_a_curve(seed: int) -> None:
    noise = np.random.default_rng(seed)
    times = {case: float(noise.lognormal(0, 1.5)) for case in cases()}
    found = fit_stage(times)  # StageCurve refuses what falls, or is negative
    assert found.overhead_ms < min(times.values())


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=5))
def test_isotonic_is_the_nearest_non_decreasing_sequence(values: list[int]) -> None:
    found = isotonic(values)
    assert all(b >= a for a, b in itertools.pairwise(found))
    # The nearest one is constant on runs, with each run's mean: try all ways to cut it into runs.
    n, best = len(values), np.inf
    for cuts in itertools.product([False, True], repeat=n - 1):
        runs = np.split(np.array(values, float), [i + 1 for i, cut in enumerate(cuts) if cut])
        means = [run.mean() for run in runs]
        if all(b >= a for a, b in itertools.pairwise(means)):
            best = min(best, sum(((run - run.mean()) ** 2).sum() for run in runs))
    assert sum((np.array(found) - values) ** 2) == pytest.approx(best)


def test_lines_of_one_slope_are_found() -> None:
    times = {"a": [(n, 2.0 + 0.3 * n) for n in (1, 1, 2, 10)], "b": [(n, 5.0 + 0.3 * n) for n in (1, 4)]}
    found, slope = fit_lines(times)
    assert (found, slope) == (pytest.approx({"a": 2.0, "b": 5.0}), pytest.approx(0.3))


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.tuples(st.integers(1, 41), st.floats(0.1, 9)),
                                                        min_size=1, max_size=9), min_size=1))
def test_lines_are_never_negative_and_keep_the_total(times: dict[str, list[tuple[int, float]]]) -> None:
    found, slope = fit_lines(times)
    assert min(*found.values(), slope) >= 0
    for name, taken in times.items():  # nine are too few to leave any out
        charged = sum(found[name] + slope * size for size, _ in taken)
        assert charged == pytest.approx(sum(seconds for _, seconds in taken))


def test_no_slope_for_one_size_and_no_lines_for_nothing() -> None:
    assert fit_lines({"a": [(1, 2.0), (1, 4.0)]}) == ({"a": 3.0}, 0.0)
    assert fit_lines({}) == ({}, 0.0)


def test_the_trimmed_mean_drops_only_rare_outliers() -> None:
    assert trimmed_mean([1.0] * 18 + [50.0] * 2) == 1.0
    assert trimmed_mean([1.0] * 10 + [3.0] * 10) == pytest.approx((10 + 8 * 3) / 18)
