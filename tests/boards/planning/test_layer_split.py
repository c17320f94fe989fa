"""Splits over boards in a given order, against all possible splits."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.planned_boards import board, problem, size

from flowspec_edge.boards.planning.layer_split import Ranges, split_evenly, split_in_order
from flowspec_edge.boards.planning.planner import CandidateBoard, SplitProblem
from flowspec_edge.errors import UsageError
from flowspec_edge.stage.shard import even_runs


def slowest(boards: list[CandidateBoard], p: SplitProblem, ranges: Ranges) -> float | None:
    """None where a board's memory is too small."""
    times = []
    for _i, (b, (lo, hi)) in enumerate(zip(boards, ranges, strict=True)):
        if p.stage(hi - lo) > b.room:
            return None
        times.append(b.profile.stage_seconds(p.rows, hi - lo, p.context))
    return max(times)


def every_split(layers: int, stages: int) -> list[Ranges]:
    return [tuple(pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), stages - 1)]


BOARDS = st.lists(st.builds(
    board, layer_ms=st.sampled_from([1.0, 2.0, 3.0]), usable_mb=st.integers(5, 30).map(lambda n: n * 100.0),
    process_mb=st.just(100.0), overhead_ms=st.sampled_from([0.0, 4.0])), min_size=1, max_size=4)


@given(BOARDS, st.integers(1, 7))
def test_no_split_is_faster(boards: list[CandidateBoard], layers: int) -> None:
    p = problem(size(layers=layers, layer_mb=200, kv_row=20_000))
    times = [t for ranges in every_split(layers, len(boards))
             if (t := slowest(boards, p, ranges)) is not None]
    found = split_in_order(boards, p)
    assert (found is None) == (not times)
    if found is not None:
        assert found in every_split(layers, len(boards))
        assert slowest(boards, p, found) == min(times)


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_even_split_is_the_one_that_stages_use(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(UsageError, match="more than the model's"):
            split_evenly(layers, stages)
    else:
        assert list(split_evenly(layers, stages)) == even_runs(layers, stages)
