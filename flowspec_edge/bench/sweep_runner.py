"""Measuring a sweep: what a value of the axis changes, and one plan after the other.

Knows what is of the request (tree depths, segment), of the cluster (stages) and of the links.  Does
not know how a cluster is opened: the caller hands in a function for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from flowspec_edge.bench.runner import Advance, Explains, Plain, Plan, Workload, measure
from flowspec_edge.bench.sweep import UNITS, Axis, Sweep, Value, label
from flowspec_edge.config import Link, Profile
from flowspec_edge.runtime.request import Cluster, Request
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params


class PointCluster(NamedTuple):
    """A cluster that is as the axis says, and what its links were measured to give: 10^6 bits a
    second for each device, None if nothing was measured."""

    cluster: Cluster
    measured_mbps: list[float] | None


OpenPoint = Callable[[Value], AbstractContextManager[PointCluster]]


def params_at(params: Params, axis: Axis, value: Value) -> Params:
    """The parameters at a point; UsageError for what no strategy can run with."""
    if axis == "depth":
        assert isinstance(value, tuple)
        return replace(params, depth=value[0], expand_depth=value[1])
    if axis == "segment":
        return replace(params, segment=_whole(value), plus_rows=_whole(value))
    return params


def stages_at(stages: int, axis: Axis, value: Value) -> int:
    """How many verification devices there are at a point."""
    return _whole(value) if axis == "stages" else stages


def profile_at(profile: Profile, axis: Axis, value: Value) -> Profile:
    """The profile with the link of a point."""
    key = {"bandwidth": "mbps", "latency": "latency_ms"}.get(axis)
    if key is None:
        return profile
    assert not isinstance(value, tuple)
    link = Link.model_validate({**profile.link.model_dump(), key: float(value)})
    return profile.model_copy(update={"link": link})


def plan_at(plan: Plan, axis: Axis, value: Value) -> Plan:
    """The same requests with the parameters of a point."""
    works = [Workload(work.task, [replace(request, params=params_at(request.params, axis, value))
                                  for request in work.requests]) for work in plan.workloads]
    return replace(plan, workloads=works)


def steps(sweep: Sweep, plans: Mapping[Value, Plan]) -> int:
    """How many requests it takes, beside what ``sweep`` has."""
    return sum(plan.steps(sweep.point(value).report) for value, plan in plans.items())


def measure_sweep(sweep: Sweep, plans: Mapping[Value, Plan], open_point: OpenPoint, plain: Plain,
                  advance: Advance = lambda _: None, save: Callable[[], None] = lambda: None,
                  explains: Explains | None = None) -> None:
    """Add to ``sweep`` what it lacks of ``plans``, value by value in their order.

    A value of which nothing is missing is not opened.  ``advance`` is called ``steps`` times;
    ``save`` whenever a strategy is through with a task at a value, and at the end; ``explains`` is
    ``measure``'s.
    """
    sweep.complete = False
    expected = remembered(plain)
    for value, plan in plans.items():
        point = sweep.point(value)
        if not plan.missing(point.report):
            continue
        told = partial(_advance, advance, label(value, UNITS[sweep.axis]))
        with open_point(value) as (cluster, measured):
            point.measured_mbps = measured
            measure(cluster, expected, plan, point.report, told, save, explains)
    sweep.complete = True
    save()


def remembered(plain: Plain) -> Plain:
    """Plain decoding that answers a request only once: no axis changes the text."""
    known: dict[tuple[tuple[int, ...], int, Sampling, frozenset[int]], tuple[list[int], str]] = {}

    def answer(request: Request) -> tuple[list[int], str]:
        key = tuple(request.prompt), request.max_new_tokens, request.sampling, request.stop_ids
        if key not in known:
            known[key] = plain(request)
        return known[key]

    return answer


def _advance(advance: Advance, where: str, what: str) -> None:
    advance(f"{where}: {what}")


def _whole(value: Value) -> int:
    assert isinstance(value, int)
    return value
