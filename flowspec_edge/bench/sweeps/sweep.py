"""A sweep, the same benchmark at several values of one axis, and its JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from flowspec_edge.bench.results.paper_results import BandwidthCurves, DepthCells
from flowspec_edge.bench.results.report import BenchReport, Difference, JsonResults, read_results
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.bench.results.samples import Sample

Axis = Literal["bandwidth", "depth", "stages", "segment", "latency"]
Links = Literal["virtual", "namespaces", "cluster"]
Clock = Literal["virtual", "wall"]
Value = int | float | tuple[int, int]  # a pair (d0, d_exp) on the axis "depth"
PaperFigures = BandwidthCurves | DepthCells

UNITS: dict[Axis, str] = {"bandwidth": "Mbps", "depth": "levels", "stages": "stages", "segment": "rows",
                          "latency": "ms"}


@dataclass
class SweepPoint:
    """``measured_mbps``: of each device's link; None in virtual time or without traffic shaping."""

    value: Value
    report: BenchReport
    measured_mbps: list[float] | None = None


@dataclass
class Sweep(JsonResults):
    """The results of a sweep.

    links     virtual, network namespaces on this machine, or a cluster's own
    profile   None if no time comes from a profile
    settings  as in a report, without what the axis sets; a sweep has a single temperature
    """

    axis: Axis
    links: Links
    emulated: bool
    profile: str | None
    clock: Clock
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    points: list[SweepPoint] = field(default_factory=list)
    published: PaperFigures | None = None
    complete: bool = False

    def point(self, value: Value) -> SweepPoint:
        """The point, created if necessary; points ascend, but descend on the axis "bandwidth"."""
        for point in self.points:
            if point.value == value:
                return point
        made = SweepPoint(value, BenchReport(self.profile, self.clock))
        self.points.append(made)
        self.points.sort(key=lambda point: point.value, reverse=self.axis == "bandwidth")
        return made

    def speeds(self) -> dict[str, dict[Value, ReportRow]]:
        """Strategy → value → the row, or with several tasks their mean."""
        found: dict[str, dict[Value, ReportRow]] = {}
        for point in self.points:
            for row in point.report.means:
                found.setdefault(row.strategy, {})[point.value] = row
        return found

    def differences(self) -> list[tuple[Value, Difference]]:
        return [(point.value, d) for point in self.points for d in point.report.differences]

    def as_json(self) -> dict[str, Any]:
        """The ``flowspec sweep … --json`` object, without values that have not been measured yet."""
        return {
            "kind": "sweep", "axis": self.axis, "unit": UNITS[self.axis], "links": self.links,
            "emulated": self.emulated, "profile": self.profile, "clock": self.clock, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            "points": [_point_json(point) for point in self.points if point.report.samples],
            "published": self.published.model_dump() if self.published else None,
        }


def label(value: Value, unit: str = "") -> str:
    text = f"({value[0]}, {value[1]})" if isinstance(value, tuple) else f"{value:g}"
    return f"{text} {unit}".strip()


def retained_share(speeds: Sequence[float | None]) -> float | None:
    """The last value's tokens/s over the first one's; None if one of them is missing."""
    if len(speeds) < 2 or not speeds[0] or speeds[-1] is None:
        return None
    return speeds[-1] / speeds[0]


def _point_json(point: SweepPoint) -> dict[str, Any]:
    report = point.report.as_json()
    return {"value": point.value, "measured_mbps": point.measured_mbps,
            **{key: report[key] for key in ("energy", "rows", "means", "differences", "samples")}}


class _Point(BaseModel):
    value: int | float | tuple[int, int]
    measured_mbps: list[float] | None
    samples: list[Sample]
    differences: list[Difference]


class _File(BaseModel):
    kind: Literal["sweep"]
    axis: Axis
    links: Links
    emulated: bool
    profile: str | None
    clock: Clock
    date: str
    complete: bool
    machine: dict[str, Any]
    settings: dict[str, Any]
    points: list[_Point]
    published: PaperFigures | None

    @model_validator(mode="after")
    def _values_suit_the_axis(self) -> _File:
        if any(isinstance(point.value, tuple) != (self.axis == "depth") for point in self.points):
            raise ValueError(f"a point's value does not suit the axis {self.axis}")
        return self


def load_sweep(path: Path) -> Sweep:
    """Read a file that :meth:`Sweep.save` wrote; UsageError with the first fault for any other file."""
    file = read_results(path, _File.model_validate, "sweep of flowspec sweep",
                        "flowspec sweep bandwidth --json OUT")
    names = _File.model_fields.keys() - {"kind", "points"}
    sweep = Sweep(**{name: getattr(file, name) for name in names})
    for read in file.points:
        point = sweep.point(read.value)
        point.measured_mbps = read.measured_mbps
        point.report.samples, point.report.differences = read.samples, read.differences
    return sweep
