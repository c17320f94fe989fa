"""Fits measured times: segment times to a stage's curve, work times to one line each.

A segment of r rows through n layers over c cached tokens takes

    overhead + n * (ms[r] + context_ms[r] * c / 1000).

Two values of n separate the overhead from the layers, two of c the context from the rest.  The fit is by
least squares of the relative errors, so that short and long segments have equal weight.  ms and context_ms
are then made non-decreasing in r by isotonic regression, as a StageCurve requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.device_profile import StageCurve

_DIGITS = 4
_LEAST_MS = 1e-6
_TRIMMED = 0.1  # the share of the longest times that a mean leaves out


@dataclass(frozen=True, slots=True, order=True)
class SegmentCase:
    layers: int
    rows: int
    context: int


def fit_stage(milliseconds: Mapping[SegmentCase, float]) -> StageCurve:
    """Fit a stage's time to measured cases.

    With one number of layers the overhead is 0; with one context there is no ``context_ms``.
    """
    cases = sorted(milliseconds)
    rows = sorted({case.rows for case in cases})
    cuts, contexts = ({getattr(case, name) for case in cases} for name in ("layers", "context"))
    kinds = 1 + (len(contexts) > 1)
    times = np.array([milliseconds[case] for case in cases])
    design = np.zeros((len(cases), 1 + kinds * len(rows)))
    for line, case in zip(design, cases, strict=True):
        at = rows.index(case.rows)
        line[0] = len(cuts) > 1
        line[1 + at] = case.layers
        if kinds == 2:
            line[1 + len(rows) + at] = case.layers * case.context / 1e3
    overhead = max(0.0, float(_solve(design, times, times)[0]))
    overhead = min(overhead, 0.99 * float(times.min()))
    solution = _solve(design[:, 1:], times - overhead, times)
    # Noise may make the cost of context negative; it is then 0, and ms the mean over the contexts.
    slopes = isotonic(solution[len(rows):].tolist()) if kinds == 2 else []
    slopes = [max(0.0, slope) for slope in slopes]
    residual = times - overhead
    if slopes:
        residual = residual - design[:, 1 + len(rows):] @ np.array(slopes)
    levels = isotonic(_solve(design[:, 1:1 + len(rows)], residual, times).tolist())
    return StageCurve(
        layers=1, rows=[float(r) for r in rows], ms=[rounded(max(_LEAST_MS, ms)) for ms in levels],
        context_ms=[rounded(ms) for ms in slopes], overhead_ms=rounded(overhead))


def relative_errors(curve: StageCurve, milliseconds: Mapping[SegmentCase, float]) -> NDArray[np.float64]:
    """Return fitted / measured - 1 for each case, in sorted order."""
    def fitted(case: SegmentCase) -> float:
        return curve.overhead_ms + case.layers / curve.layers * curve.milliseconds(case.rows, case.context)

    return np.array([fitted(case) / ms - 1 for case, ms in sorted(milliseconds.items())])


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (mean, count)
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def fit_lines(times: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[dict[str, float], float]:
    """Fit lines through (size, seconds) with one slope: (each line's time at size 0, slope).

    Times of one size enter as their trimmed mean, weighted by their number.  No figure is negative; the slope
    is 0 if no name has different sizes.
    """
    points = [(name, size, trimmed_mean([t for s, t in samples if s == size]), sum(s == size for s, _ in samples))
              for name, samples in times.items() for size in sorted({size for size, _ in samples})]

    def means(value: Callable[[str, int, float], float]) -> dict[str, float]:
        return {name: sum(value(n, s, t) * w for n, s, t, w in points if n == name)
                / sum(w for n, _, _, w in points if n == name) for name in times}

    sizes, levels = means(lambda _, s, t: s), means(lambda _, s, t: t)
    spread = sum(w * (s - sizes[n]) ** 2 for n, s, _, w in points)
    common = sum(w * (s - sizes[n]) * (t - levels[n]) for n, s, t, w in points)
    slope = max(0.0, common / spread) if spread > 0 else 0.0
    for name in times:  # no line may start below 0
        if sizes[name] > 0:
            slope = min(slope, levels[name] / sizes[name])
    return {name: max(0.0, levels[name] - slope * sizes[name]) for name in times}, slope


def rounded(value: float) -> float:
    """Round ``value`` to the significant digits of a measurement."""
    return float(f"{value:.{_DIGITS}g}")


def _solve(design: NDArray[np.float64], times: NDArray[np.float64], scale: NDArray[np.float64]
           ) -> NDArray[np.float64]:
    """Return the least squares solution of (design @ x - times) / scale."""
    solution = np.linalg.lstsq(design / scale[:, None], times / scale, rcond=None)[0]
    return np.asarray(solution, dtype=np.float64)


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the longest tenth; unlike a quantile it keeps costs that only some runs pay."""
    ordered = np.sort(np.asarray(seconds))
    return float(ordered[: len(ordered) - int(_TRIMMED * len(ordered))].mean())
