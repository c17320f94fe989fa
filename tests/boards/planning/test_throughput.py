"""The rate that ranks splits: what the search relies on, and virtual time beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.planned_boards import board, problem, size

from flowspec_edge.boards.planning.model_size import ModelBytes
from flowspec_edge.boards.planning.throughput import Throughput, tokens

times = st.floats(1e-4, 10.0)


@examples(200, quick=36)
@given(st.sampled_from([size(), size().without_head()]), st.integers(1, 8), times, times,
       st.floats(1.0, 50.0))
def test_a_slower_split_has_no_higher_rate(of: ModelBytes, at_once: int, slowest: float, more: float,
                                           longer: float) -> None:
    """Neither a slower stage nor a longer way raises it, which makes the search exact."""
    rate, d0 = Throughput(problem(of), at_once), board()
    latency = slowest * longer
    own = rate(d0, slowest, latency)
    assert own > 0
    assert rate(d0, slowest, latency + more) <= own * (1 + 1e-9)
    assert rate(d0, slowest + more, max(latency, slowest + more)) <= own * (1 + 1e-9)


def test_requests_at_once_fill_the_pipeline() -> None:
    """Four requests over four even stages: as one request on a pipeline of one stage with that slot."""
    looking_up = problem(size().without_head())
    d0, full = board(), Throughput(looking_up, 4)
    one = Throughput(looking_up)
    assert full(d0, 0.05, 0.2) == pytest.approx(one(d0, 0.05, 0.05))
    assert one(d0, 0.05, 0.2) < full(d0, 0.05, 0.2) < 4 * one(d0, 0.05, 0.2)


def test_a_slow_draft_device_costs_tokens() -> None:
    rate = Throughput(problem())
    quick, slow = board("quick"), board("slow", lm_head_ms=80.0)
    assert rate(slow, 0.05, 0.2) < rate(quick, 0.05, 0.2)
    assert tokens(False, 4, 4) < tokens(False, 4, 16)


def test_a_long_context_slows_the_drafts_too() -> None:
    d0 = board()
    assert d0.profile.memory is not None
    memory = d0.profile.memory.model_copy(update={"gb_per_s": 68.0})
    reading = replace(d0, profile=d0.profile.model_copy(update={"memory": memory}))
    of = size()
    assert (Throughput(problem(of, context=100_000))(reading, 0.05, 0.2)
            < Throughput(problem(of, context=1000))(reading, 0.05, 0.2))
