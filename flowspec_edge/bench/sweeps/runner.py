"""Measures a sweep: applies each value of the axis to requests, stages or links, and runs the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

from flowspec_edge.bench.run.runner import Advance, BenchPlan, NearTieJudge, PlainDecoding, Workload, measure
from flowspec_edge.bench.sweeps.sweep import UNITS, Axis, Sweep, Value, label
from flowspec_edge.device_profile import LinkCost, Profile
from flowspec_edge.runtime.request import ClusterBackend, Request
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params


class PointCluster(NamedTuple):
    """A cluster and the measured bandwidth of each device's link in 10^6 bits a second, or None."""

    cluster: ClusterBackend
    measured_mbps: list[float] | None


OpenPoint = Callable[[Value], AbstractContextManager[PointCluster]]


def params_at(params: Params, axis: Axis, value: Value) -> Params:
    """UsageError if the parameters are invalid at this value."""
    if axis == "depth":
        assert isinstance(value, tuple)
        return params.changed(depth=value[0], expand_depth=value[1])
    if axis == "segment":
        return params.changed(segment=_whole(value), plus_rows=_whole(value))
    return params


def stages_at(stages: int, axis: Axis, value: Value) -> int:
    return _whole(value) if axis == "stages" else stages


def profile_at(profile: Profile, axis: Axis, value: Value) -> Profile:
    key = {"bandwidth": "mbps", "latency": "latency_ms"}.get(axis)
    if key is None:
        return profile
    assert not isinstance(value, tuple)
    link = LinkCost.model_validate({**profile.link.model_dump(), key: float(value)})
    return profile.model_copy(update={"link": link})


def plan_at(plan: BenchPlan, axis: Axis, value: Value) -> BenchPlan:
    works = [Workload(work.task, [replace(request, params=params_at(request.params, axis, value))
                                  for request in work.requests]) for work in plan.workloads]
    return replace(plan, workloads=works)


def steps(sweep: Sweep, plans: Mapping[Value, BenchPlan]) -> int:
    return sum(plan.steps(sweep.point(value).report) for value, plan in plans.items())


def measure_sweep(sweep: Sweep, plans: Mapping[Value, BenchPlan], open_point: OpenPoint, plain: PlainDecoding,
                  advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None,
                  explains: NearTieJudge | None = None) -> None:
    """Add to ``sweep`` what it lacks of ``plans``, value by value in their order.

    Complete values are not opened.  ``advance`` is called ``steps`` times; ``save`` and ``explains`` as in
    :func:`measure`.
    """
    sweep.complete = False
    expected = cached(plain)
    for value, plan in plans.items():
        point = sweep.point(value)
        if not plan.missing(point.report):
            continue

        def advance_here(what: str, where: str = label(value, UNITS[sweep.axis])) -> None:
            advance(f"{where}: {what}")

        with open_point(value) as (cluster, measured):
            point.measured_mbps = measured
            measure(cluster, expected, plan, point.report, advance_here, save, explains)
    sweep.complete = True
    save()


def cached(plain: PlainDecoding) -> PlainDecoding:
    """Plain decoding that runs each request once: no axis changes the text."""
    known: dict[tuple[tuple[int, ...], int, Sampling, frozenset[int]], tuple[list[int], str]] = {}

    def answer(request: Request) -> tuple[list[int], str]:
        key = tuple(request.prompt), request.max_new_tokens, request.sampling, request.stop_ids
        if key not in known:
            known[key] = plain(request)
        return known[key]

    return answer


def _whole(value: Value) -> int:
    assert isinstance(value, int)
    return value
