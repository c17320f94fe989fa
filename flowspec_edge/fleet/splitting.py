"""A model's layers over boards whose order is given.

Pure arithmetic.  Knows that every stage needs a layer, what memory holds, and how to keep the slowest
stage fast.  Does not choose boards or their order (``planner``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.fleet.memory import ModelBytes
    from flowspec_edge.fleet.planner import Board, Plan, Problem

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


def plan_as_listed(d0: Board, verify: Sequence[Board], problem: Problem,
                   ranges: Ranges | None = None) -> Plan:
    """All boards in the order given, with the layers of ``ranges`` or those of :func:`split_in_order`.

    ``planner.DoesNotFit``, without a reason, where memory is too small.
    """
    from flowspec_edge.fleet.planner import DoesNotFit, Plan, Stage

    ranges = ranges or split_in_order(verify, problem)
    if ranges is None or d0.room < problem.d0 or any(
            problem.stage(hi - lo, i == 0) > board.room
            for i, (board, (lo, hi)) in enumerate(zip(verify, ranges, strict=True))):
        raise DoesNotFit(f"{problem.size.name} does not fit on {len(verify) + 1} boards")
    stages = tuple(
        Stage(board, (lo, hi), board.profile.stage_seconds(problem.rows, hi - lo, problem.context))
        for board, (lo, hi) in zip(verify, ranges, strict=True))
    links = {board.name: board.profile.link_seconds(problem.size.segment_bytes(problem.rows))
             for board in (d0, *verify)}
    hops = sum(max(sum(links[a.name]), sum(links[b.name])) for a, b in pairwise([*verify, d0]))
    hops += max(links[d0.name][1], links[verify[0].name][1])  # token ids weigh nothing
    return Plan(problem, d0, stages, (),
                slowest=max(*(stage.seconds for stage in stages), *(busy for busy, _ in links.values())),
                way=sum(stage.seconds for stage in stages) + hops + d0.profile.verify_seconds(problem.rows))


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
