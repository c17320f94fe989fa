"""A sweep: the same measurement at several values of one axis, and the file it lives in.

Knows the axes, what a point holds and how a sweep is written and read.  Does not know how a value
becomes a cluster (the caller's), how a point is measured (``sweep_runner``) or printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, model_validator

from flowspec_edge.bench.output import write
from flowspec_edge.bench.published import BandwidthCurves, DepthCells
from flowspec_edge.bench.report import Difference, Report, Row, Sample, first_fault, read_json
from flowspec_edge.errors import UsageError

Axis = Literal["bandwidth", "depth", "stages", "segment", "latency"]
Links = Literal["virtual", "namespaces", "cluster"]
Clock = Literal["virtual", "wall"]
Value = int | float | tuple[int, int]  # a pair is (d0, d_exp), on the axis "depth"
Figures = BandwidthCurves | DepthCells

UNITS: dict[Axis, str] = {"bandwidth": "Mbps", "depth": "levels", "stages": "stages", "segment": "rows",
                          "latency": "ms"}


@dataclass
class Point:
    """One value of the axis: an ordinary report, and what the links really gave.

    ``measured_mbps`` has one figure (10^6 bits a second) for each device; None where time is made up
    or the links are left alone.
    """

    value: Value
    report: Report
    measured_mbps: list[float] | None = None


@dataclass
class Sweep:
    """What a sweep showed.

    links      made up, network namespaces on this machine, or a cluster's own
    emulated   real processes that take the profile's time
    profile    whose time it is; None if nothing of the time is a profile's
    settings   as in a report, without what the axis sets; a sweep has a single temperature
    published  the paper's own figures for this testbed, to be shown beside
    complete   nothing is missing of what was asked
    """

    axis: Axis
    links: Links
    emulated: bool
    profile: str | None
    clock: Clock
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    points: list[Point] = field(default_factory=list)
    published: Figures | None = None
    complete: bool = False

    def point(self, value: Value) -> Point:
        """The point of this value; made, in its place, if there is none yet.

        Points go from the widest link to the narrowest, on other axes from small to large.
        """
        for point in self.points:
            if point.value == value:
                return point
        made = Point(value, Report(self.profile, self.clock))
        self.points.append(made)
        self.points.sort(key=lambda point: point.value, reverse=self.axis == "bandwidth")
        return made

    def speeds(self) -> dict[str, dict[Value, Row]]:
        """Strategy → value → its figures there: the row, or with several tasks the mean over them."""
        found: dict[str, dict[Value, Row]] = {}
        for point in self.points:
            for row in point.report.means:
                found.setdefault(row.strategy, {})[point.value] = row
        return found

    def differences(self) -> list[tuple[Value, Difference]]:
        """Every text that is not plain decoding's, and at which value."""
        return [(point.value, d) for point in self.points for d in point.report.differences]

    def as_json(self) -> dict[str, Any]:
        """The object that ``flowspec sweep … --json`` writes; a value not yet measured is left out."""
        return {
            "kind": "sweep", "axis": self.axis, "unit": UNITS[self.axis], "links": self.links,
            "emulated": self.emulated, "profile": self.profile, "clock": self.clock, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            "points": [_point_json(point) for point in self.points if point.report.samples],
            "published": self.published.model_dump() if self.published else None,
        }

    def save(self, path: Path) -> None:
        """Replace ``path`` in one step; UsageError if that cannot be done."""
        write(path, json.dumps(self.as_json(), indent=1) + "\n")


def label(value: Value, unit: str = "") -> str:
    """A value for people."""
    text = f"({value[0]}, {value[1]})" if isinstance(value, tuple) else f"{value:g}"
    return f"{text} {unit}".strip()


def kept(speeds: Sequence[float | None]) -> float | None:
    """What is left of the first value's tokens/s at the last one; None without the two."""
    if len(speeds) < 2 or not speeds[0] or speeds[-1] is None:
        return None
    return speeds[-1] / speeds[0]


def _point_json(point: Point) -> dict[str, Any]:
    report = point.report
    return {
        "value": point.value, "measured_mbps": point.measured_mbps,
        "rows": [asdict(row) for row in report.rows], "means": [asdict(row) for row in report.means],
        "differences": [asdict(d) for d in report.differences],
        "samples": [asdict(sample) for sample in report.samples],
    }


class _Point(BaseModel):
    """What a point must hold; rows are made anew from the samples."""

    value: int | float | tuple[int, int]
    measured_mbps: list[float] | None
    samples: list[Sample]
    differences: list[Difference]


class _File(BaseModel):
    """What a sweep's file must hold."""

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
    published: Figures | None

    @model_validator(mode="after")
    def _values_suit_the_axis(self) -> _File:
        if any(isinstance(point.value, tuple) != (self.axis == "depth") for point in self.points):
            raise ValueError(f"a point's value is none of the axis {self.axis}")
        return self


def load_sweep(path: Path) -> Sweep:
    """What :meth:`Sweep.save` wrote; any other file is a UsageError that says what is amiss."""
    data = read_json(path)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path} is no sweep of flowspec sweep ({first_fault(error)}); "
                         "write one with: flowspec sweep bandwidth --json OUT") from error
    names = _File.model_fields.keys() - {"kind", "points"}
    sweep = Sweep(**{name: getattr(file, name) for name in names})
    for read in file.points:
        point = sweep.point(read.value)
        point.measured_mbps = read.measured_mbps
        point.report.samples, point.report.differences = read.samples, read.differences
    return sweep
