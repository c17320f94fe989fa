"""A model's layers over boards whose order is given.

Pure arithmetic.  Knows that every stage needs a layer, what memory holds, and how to keep the slowest
stage fast.  Does not choose boards or their order (``planner``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.fleet.memory import ModelBytes
    from flowspec_edge.fleet.planner import Board, Problem

Ranges = tuple[tuple[int, int], ...]


def problem_for(size: ModelBytes, context: int, at_once: int, boards: int) -> Problem:
    """What is to be split over ``boards``, for ``at_once`` requests whose texts together have ``context``
    tokens."""
    from flowspec_edge.fleet.planner import Problem
    from flowspec_edge.runtime.coordinator import cache_rows
    from flowspec_edge.strategies.params import Params

    rows = cache_rows(context, at_once, Params(), max(1, boards - 1))
    return Problem(size, context, rows - context, Params().segment)


def split_evenly(layers: int, stages: int) -> Ranges:
    """[lo, hi) of each stage, the first ones one longer; UsageError for more stages than layers."""
    if stages > layers:
        raise UsageError(f"{stages} stages are more than the model's {layers} layers")
    found = _share(layers, [layers] * stages, lambda stage, count: count)
    assert found is not None
    return found


def split_in_order(stages: Sequence[Board], problem: Problem) -> Ranges | None:
    """[lo, hi) of each of ``stages``, V1's first: of the splits that keep within every board's memory one
    whose slowest stage is the fastest; None if there is none."""
    within = [problem.layers_within(board, i == 0) for i, board in enumerate(stages)]

    def seconds(stage: int, count: int) -> float:
        return stages[stage].profile.stage_seconds(problem.rows, count, problem.context)

    return _share(problem.size.layers, within, seconds)


def _share(layers: int, within: Sequence[int], seconds: Callable[[int, int], float]) -> Ranges | None:
    """A layer to each stage, then one by one to whichever is the quickest with it: since no stage is
    quicker with more layers, no other way to share them has a faster slowest stage."""
    if min(within) < 1 or len(within) > layers or sum(within) < layers:
        return None
    counts = [1] * len(within)
    for _ in range(layers - len(within)):
        best = min(range(len(within)), key=lambda stage: (
            seconds(stage, counts[stage] + 1) if counts[stage] < within[stage] else math.inf))
        counts[best] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
