"""From times of segments to a stage's curve.

The model: a segment of r rows through n layers over c cached tokens takes

    overhead + n * (ms[r] + context_ms[r] * c / 1000)

with one overhead for all, and an ms and a context_ms for each r that was measured.  Two different n
tell overhead and layers apart, two different c text and context.  All are found together, by least
squares of the relative deviations, so that short and long segments weigh the same; then overhead is
kept, and each of the two rows of figures is made to rise with the rows (as a StageCurve demands) by
pooling neighbours that fall: the least-squares fit among all that rise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.config import StageCurve
from flowspec_edge.fleet.measure_clock import typical
from flowspec_edge.fleet.measure_stage import Case

_DIGITS = 4
_LEAST_MS = 1e-6


def fit_stage(milliseconds: Mapping[Case, float]) -> StageCurve:
    """The curve of one layer that fits the cases best.

    Without different numbers of layers the overhead is 0, without different contexts there is no
    ``context_ms``.
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
    found = _solve(design[:, 1:], times - overhead, times)
    # A context that costs nothing, or less, by chance: its text's time is then the mean of all.
    slopes = rising(found[len(rows):].tolist()) if kinds == 2 else []
    slopes = [max(0.0, slope) for slope in slopes]
    rest = times - overhead
    if slopes:
        rest = rest - design[:, 1 + len(rows):] @ np.array(slopes)
    levels = rising(_solve(design[:, 1:1 + len(rows)], rest, times).tolist())
    return StageCurve(
        layers=1, rows=[float(r) for r in rows], ms=[rounded(max(_LEAST_MS, ms)) for ms in levels],
        context_ms=[rounded(ms) for ms in slopes], overhead_ms=rounded(overhead))


def deviations(curve: StageCurve, milliseconds: Mapping[Case, float]) -> NDArray[np.float64]:
    """How far the curve is off in each case: fitted / measured - 1."""
    def fitted(case: Case) -> float:
        return curve.overhead_ms + case.layers / curve.layers * curve.milliseconds(case.rows, case.context)

    return np.array([fitted(case) / ms - 1 for case, ms in sorted(milliseconds.items())])


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence, by least squares, that does not fall: neighbours that do are pooled."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def lines(times: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[dict[str, float], float]:
    """Straight lines, one for each name, that are equally steep: (each line's time at size 0, slope).

    ``times`` are (size, seconds); of many of one size the typical time counts, as often as there are.
    No figure is negative; what sizes alike cannot tell apart is no slope.
    """
    points = [(name, size, typical([t for s, t in taken if s == size]), sum(s == size for s, _ in taken))
              for name, taken in times.items() for size in sorted({size for size, _ in taken})]

    def means(of: Callable[[str, int, float], float]) -> dict[str, float]:
        return {name: sum(of(n, s, t) * w for n, s, t, w in points if n == name)
                / sum(w for n, _, _, w in points if n == name) for name in times}

    sizes, levels = means(lambda _, s, t: s), means(lambda _, s, t: t)
    spread = sum(w * (s - sizes[n]) ** 2 for n, s, _, w in points)
    common = sum(w * (s - sizes[n]) * (t - levels[n]) for n, s, t, w in points)
    slope = max(0.0, common / spread) if spread > 0 else 0.0
    for name in times:  # a line through the means that would begin below 0 is too steep
        if sizes[name] > 0:
            slope = min(slope, levels[name] / sizes[name])
    return {name: max(0.0, levels[name] - slope * sizes[name]) for name in times}, slope


def rounded(value: float) -> float:
    """To the digits that a measurement is worth."""
    return float(f"{value:.{_DIGITS}g}")


def _solve(design: NDArray[np.float64], times: NDArray[np.float64], scale: NDArray[np.float64]
           ) -> NDArray[np.float64]:
    """Least squares of (design @ x - times) / scale."""
    solution = np.linalg.lstsq(design / scale[:, None], times / scale, rcond=None)[0]
    return np.asarray(solution, dtype=np.float64)
