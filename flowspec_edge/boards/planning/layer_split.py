"""Splits a model's layers over boards in a given order (``planner`` chooses boards and order)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from flowspec_edge.boards.planning.planner import (
    CandidateBoard,
    DoesNotFit,
    PipelinePlan,
    PlannedStage,
    SplitProblem,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.model_size import ModelBytes

Ranges = tuple[tuple[int, int], ...]


def problem_for(size: ModelBytes, context: int, concurrency: int, boards: int) -> SplitProblem:
    """Return the problem of a split for ``concurrency`` requests that share ``context`` tokens."""
    from flowspec_edge.d0.capacity import cache_rows  # loads torch

    rows = cache_rows(context, concurrency, Params(), max(1, boards - 1))
    return SplitProblem(size, context, rows - context, Params().segment, concurrency)


def split_evenly(layers: int, stages: int) -> Ranges:
    """Return [lo, hi) of each stage, the first ones one longer; raise UsageError for more stages than layers."""
    if stages > layers:
        raise UsageError(f"{stages} stages are more than the model's {layers} layers")
    ranges = _assign(layers, [layers] * stages, lambda stage, count: count)
    assert ranges is not None
    return ranges


def split_in_order(stages: Sequence[CandidateBoard], problem: SplitProblem) -> Ranges | None:
    """Return [lo, hi) of each stage, V1 first, with the slowest stage as fast as possible; None if none fits."""
    limits = [problem.layers_within(board) for board in stages]

    def seconds(stage: int, count: int) -> float:
        return stages[stage].profile.stage_seconds(problem.rows, count, problem.context)

    return _assign(problem.size.layers, limits, seconds)


def plan_as_listed(d0: CandidateBoard, verify: Sequence[CandidateBoard], problem: SplitProblem,
                   ranges: Ranges | None = None) -> PipelinePlan:
    """Plan the boards as they are listed; ``ranges`` default to :func:`split_in_order`.

    Raise DoesNotFit, without a reason, for too little memory.
    """
    ranges = ranges or split_in_order(verify, problem)
    if ranges is None or d0.room < problem.d0 or any(
            problem.stage(hi - lo) > board.room for board, (lo, hi) in zip(verify, ranges, strict=True)):
        raise DoesNotFit(f"{problem.size.name} does not fit on {len(verify) + 1} boards")
    stages = tuple(
        PlannedStage(board, (lo, hi), board.profile.stage_seconds(problem.rows, hi - lo, problem.context))
        for board, (lo, hi) in zip(verify, ranges, strict=True))
    links = {board.name: board.profile.link_seconds(problem.size.segment_bytes(problem.rows))
             for board in (d0, *verify)}
    hops = sum(max(sum(links[a.name]), sum(links[b.name])) for a, b in pairwise([*verify, d0]))
    hops += max(links[d0.name][1], links[verify[0].name][1])  # token ids: latency alone
    return PipelinePlan(
        problem, d0, stages, (),
        slowest=max(*(stage.seconds for stage in stages), *(busy for busy, _ in links.values())),
        latency=sum(stage.seconds for stage in stages) + hops + d0.profile.verify_seconds(problem.rows))


def _assign(layers: int, limits: Sequence[int], seconds: Callable[[int, int], float]) -> Ranges | None:
    """Give each further layer to the stage that is fastest with it: optimal, as layers only slow stages."""
    if min(limits) < 1 or len(limits) > layers or sum(limits) < layers:
        return None
    counts = [1] * len(limits)
    for _ in range(layers - len(limits)):
        best = min(range(len(limits)), key=lambda stage: (
            seconds(stage, counts[stage] + 1) if counts[stage] < limits[stage] else math.inf))
        counts[best] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
