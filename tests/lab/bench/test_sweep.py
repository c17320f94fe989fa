"""Sweeps: points in order, files there and back, and the measurement against single requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from kits.bench_reports import report
from kits.requests import answer, plain
from pydantic import ValidationError

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.axes import AXES, Value
from flowspec_edge.lab.bench.paper_results import BandwidthCurves, load_paper_results
from flowspec_edge.lab.bench.results import ENERGY, BenchReport, Sweep, load_sweep
from flowspec_edge.lab.bench.runner import BenchPlan, PointCluster, Workload, cached, measure_points, steps
from flowspec_edge.strategies.params import Params

PAPER = load_profile("paper-7b")
REQUESTS = [Request([5, 9, 20], max_new_tokens=8), Request([7] * 5, max_new_tokens=5)]
PLAN = BenchPlan(["chunk_pp", "flowspec"], [Workload("t", REQUESTS)], [0.0])


class Plain:
    """Plain decoding that counts its requests."""

    def __init__(self, model: Path) -> None:
        self.decoder, self.asked = plain(model), 0

    def __call__(self, request: Request) -> tuple[list[int], str]:
        self.asked += 1
        return answer(self.decoder, request)


class Opener:
    """Virtual clusters under the profile of the point; records the opened values."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.opened: list[Value] = []

    @contextmanager
    def __call__(self, value: Value | None) -> Iterator[PointCluster]:
        assert value is not None
        self.opened.append(value)
        cluster = VirtualCluster(self.model, 2, AXES["bandwidth"].profile(PAPER, value))
        yield PointCluster(cluster, [float(value) - 1.5, float(value)])  # type: ignore[arg-type]
        cluster.close()


def bandwidth(values: list[Value]) -> Sweep:
    sweep = Sweep("paper-7b", "virtual", {"stages": 2, "temperature": 0.0}, {"cpu": "none"}, "2026-01-02",
                  published=load_paper_results().bandwidths("paper-7b", 4, 0.0))
    for value in values:
        point = sweep.point(value)
        point.report = report(["chunk_pp", "flowspec"], ["qa"], [0.0], seed=int(value))  # type: ignore[arg-type]
    return sweep


def test_a_sweep_is_the_same_as_single_requests_at_each_value(model: Path) -> None:
    sweep, plain, opener = bandwidth([]), Plain(model), Opener(model)
    plans: dict[Value, BenchPlan] = dict.fromkeys((200, 1000), PLAN)
    told: list[str] = []
    saved: list[bool] = []
    expected_steps = steps(sweep, plans)
    measure_points(sweep, plans, opener, plain, told.append, lambda: saved.append(sweep.complete))
    assert opener.opened == [200, 1000]  # as asked
    assert [point.value for point in sweep.points] == [1000, 200]  # from wide to narrow
    assert len(told) == expected_steps
    assert told[0] == "200 Mbps: plain decoding"
    assert told[-1] == "1000 Mbps: flowspec"
    assert plain.asked == len(REQUESTS)  # once, not once a value
    assert saved[-1] is True
    assert not any(saved[:-2])
    for point in sweep.points:
        assert point.measured_mbps == [point.value - 1.5, point.value]  # type: ignore[operator]
        assert [row.identical for row in point.report.rows] == [True, True]
        cluster = VirtualCluster(model, 2, AXES["bandwidth"].profile(PAPER, point.value))
        for row in point.report.rows:
            alone = [cluster.generate(replace(request, strategy=row.strategy)).stats for request in REQUESTS]
            assert row.tokens_per_second == fmean(stats.tokens_per_second for stats in alone)
    flow = sweep.speeds()["flowspec"]
    assert flow[1000].tokens_per_second > flow[200].tokens_per_second


def test_measured_points_are_not_repeated(model: Path) -> None:
    sweep, opener, plain = bandwidth([]), Opener(model), Plain(model)
    first = replace(PLAN, strategies=["chunk_pp"])
    measure_points(sweep, {1000: first}, opener, plain)
    known = list(sweep.points[0].report.samples)
    measure_points(sweep, {1000: first, 500: PLAN}, opener, plain)
    assert opener.opened == [1000, 500]
    measure_points(sweep, {1000: PLAN}, opener, plain)
    assert opener.opened == [1000, 500, 1000]
    samples = sweep.points[0].report.samples
    assert samples[:2] == known
    assert [sample.strategy for sample in samples] == ["chunk_pp"] * 2 + ["flowspec"] * 2


def test_points_are_saved_if_a_later_value_fails(model: Path, tmp_path: Path) -> None:
    class Failing(Opener):
        def __call__(self, value: Value | None) -> AbstractContextManager[PointCluster]:
            if value == 250:
                raise UsageError("the link is gone")
            return super().__call__(value)

    sweep, path = bandwidth([]), tmp_path / "a.json"
    few = replace(PLAN, strategies=["chunk_pp"])
    with pytest.raises(UsageError, match="the link is gone"):
        measure_points(sweep, dict.fromkeys((500, 250, 125), few), Failing(model), Plain(model),
                      save=lambda: sweep.save(path))
    found = load_sweep(path)
    assert not found.complete
    assert [point.value for point in found.points] == [500]
    assert found.points[0].report.rows == sweep.point(500).report.rows
    measure_points(found, dict.fromkeys((500, 250, 125), few), Opener(model), Plain(model))
    assert found.complete
    assert [len(point.report.samples) for point in found.points] == [2, 2, 2]


def test_a_wrong_text_is_reported_at_its_value(model: Path) -> None:
    plain = Plain(model)
    sweep = bandwidth([])
    measure_points(sweep, {500: PLAN}, Opener(model), lambda request: (plain(request)[0][:-1], "length"))
    found = sweep.different_texts()
    assert len(found) == 4
    for text, (name, prompt) in zip(found, [(n, i) for n in PLAN.strategies for i in (0, 1)], strict=True):
        assert text.startswith(f"at 500 Mbps: {name}, t at T = 0, repeat 0, prompt {prompt}: token ")
        assert text.endswith("plain decoding gives the end")


def test_what_an_axis_changes() -> None:
    assert AXES["bandwidth"].profile(PAPER, 125).link.mbps == 125.0
    assert AXES["bandwidth"].profile(PAPER, 125).link.latency_ms == PAPER.link.latency_ms
    assert AXES["latency"].profile(PAPER, 0).link.latency_ms == 0.0
    assert AXES["stages"].profile(PAPER, 8) is PAPER
    assert PAPER.link.mbps == 1000
    with pytest.raises(ValidationError):
        AXES["bandwidth"].profile(PAPER, -1)
    assert (AXES["stages"].stages(4, 14), AXES["segment"].stages(4, 14)) == (14, 4)
    deep = AXES["depth"].params(Params(width=7), (3, 8))
    assert deep == Params(depth=3, expand_depth=8, width=7)
    assert AXES["segment"].params(Params(), 64) == Params(segment=64, plus_rows=64)
    assert AXES["bandwidth"].params(Params(), 64) == Params()
    with pytest.raises(UsageError, match="segment must be at least 1, not 0"):
        AXES["segment"].params(Params(), 0)
    changed = PLAN.at(AXES["segment"], 4)
    assert [r.params.segment for w in changed.workloads for r in w.requests] == [4, 4]
    assert PLAN.workloads[0].requests[0].params.segment == 16


def test_plain_decoding_is_cached_by_what_it_depends_on() -> None:
    asked: list[Request] = []

    def plain(request: Request) -> tuple[list[int], str]:
        asked.append(request)
        return [len(asked)], "length"

    again = cached(plain)
    base = REQUESTS[0]
    others = [base, replace(base, prompt=[5, 9, 21]), replace(base, max_new_tokens=9),
              replace(base, sampling=replace(base.sampling, temperature=1.0)),
              replace(base, stop_ids=frozenset({3}))]
    assert [again(request)[0] for request in others] == [[1], [2], [3], [4], [5]]
    assert [again(replace(request, strategy="x", params=Params(depth=9)))[0] for request in others] == [
        [1], [2], [3], [4], [5]]


def test_file_round_trip(tmp_path: Path) -> None:
    sweep = bandwidth([250, 1000, 62.5])
    sweep.points[0].measured_mbps = [998.5, 999.0]
    widest = sweep.points[0].report
    widest.samples = [replace(sample, energy_j=2.0) for sample in widest.samples]
    sweep.save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert [point["value"] for point in data["points"]] == [1000, 250, 62.5]
    assert (data["kind"], data["axis"], data["unit"], data["links"], data["emulated"], data["clock"]) == (
        "sweep", "bandwidth", "Mbps", "virtual", False, "virtual")
    assert data["points"][0].keys() == {"value", "measured_mbps", "energy", "rows", "means", "differences",
                                        "samples"}
    assert [point["energy"] for point in data["points"]] == [ENERGY, None, None]
    assert data["points"][0]["measured_mbps"] == [998.5, 999.0]
    assert data["points"][1]["measured_mbps"] is None
    assert data["points"][0]["rows"][1]["strategy"] == "flowspec"
    assert data["published"]["tokens_per_second"]["flowspec"] == [8.76, 9.13, 9.35, 9.44]
    back = load_sweep(tmp_path / "a.json")
    assert back.as_json() == sweep.as_json()
    back.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()


def test_grid_round_trip(tmp_path: Path) -> None:
    sweep = Sweep("paper-7b", "virtual", axis=AXES["depth"],
                  published=load_paper_results().depths("paper-7b", 4))
    for pair in ((5, 3), (3, 8), (3, 5)):
        sweep.point(pair).report = report(["flowspec"], ["qa"], [0.0], seed=pair[1])
    sweep.save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert [point["value"] for point in data["points"]] == [[3, 5], [3, 8], [5, 3]]
    assert data["published"]["best"] == {"depth": 5, "expand_depth": 5, "tokens_per_second": 9.65}
    back = load_sweep(tmp_path / "a.json")
    assert list(back.speeds()["flowspec"]) == [(3, 5), (3, 8), (5, 3)]
    assert back.as_json() == sweep.as_json() | {"points": [
        point | {"value": tuple(point["value"])} for point in data["points"]]}


@pytest.mark.parametrize(("change", "says"), [
    ({"kind": "run"}, "kind: input should be 'sweep'"),
    ({"axis": "power"}, "axis: no axis and no strategy's parameter 'power'"),
    ({"points": 3}, "points: input should be a valid list"),
    ({"axis": "depth"}, "a point's value does not suit the axis depth"),
    ({"published": {"source": "me"}}, "published"),
])
def test_files_that_are_no_sweep(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(bandwidth([250]).as_json() | change))
    with pytest.raises(UsageError, match=r"is no sweep of flowspec sweep \(") as error:
        load_sweep(path)
    assert says in str(error.value)
    BenchReport("paper-7b", "virtual").save(path)
    with pytest.raises(UsageError, match="is no sweep"):
        load_sweep(path)


def test_published_figures_belong_to_one_testbed() -> None:
    published = load_paper_results()
    curves = published.bandwidths("paper-7b", 4, 0.0)
    assert curves is not None
    assert curves.curve("megatron") == {125: 0.96, 250: 1.59, 500: 2.00, 1000: 2.25}
    assert curves.curve("pearl") == {}
    for other in (("paper-13b-int4", 4, 0.0), ("paper-7b", 8, 0.0), ("paper-7b", 4, 1.0), (None, 4, 0.0)):
        assert published.bandwidths(*other) is None
    assert published.depths("paper-7b", 8) is None
    assert published.depths(None, 4) is None
    with pytest.raises(ValidationError, match="every strategy needs a figure for each of mbps"):
        BandwidthCurves(source="", model="", profile="", temperature=0.0, mbps=[1.0, 2.0],
                        tokens_per_second={"a": [1.0]})
