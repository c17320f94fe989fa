"""The results of a benchmark, the report of a run or a sweep along an axis, and their JSON files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.axes import AXES, Axis, PaperFigures, Value, axis_named
from flowspec_edge.lab.bench.rows import ReportRow, rows_of, task_means
from flowspec_edge.lab.bench.samples import Cell, Sample
from flowspec_edge.lab.first_token import FirstToken
from flowspec_edge.util.bounded_read import read_json
from flowspec_edge.util.files import write_output

Links = Literal["virtual", "namespaces", "cluster"]
Clock = Literal["virtual", "wall"]
File = TypeVar("File")
ENERGY = "measured by the boards' INA3221, without carrier boards"  # what a report's joules include


@dataclass(frozen=True)
class Difference:
    """The first token at which a text differs from plain decoding's; None is the end of a text."""

    strategy: str
    prompt: int
    position: int
    expected: int | None
    got: int | None
    task: str = ""
    temperature: float = 0.0
    repeat: int = 0

    def __str__(self) -> str:
        origin = f"{self.task} at T = {self.temperature:g}, repeat {self.repeat}, " if self.task else ""
        return (f"{self.strategy}, {origin}prompt {self.prompt}: token {self.position} is {_token(self.got)}, "
                f"plain decoding gives {_token(self.expected)}")


@dataclass
class Results(ABC):
    """What a command measures, writes to a JSON file and reads again.

    profile   None if no time comes from a profile
    settings  everything that the figures depend on, except for the machine and what an axis sets
    date      a day, so that two runs in virtual time give the same file
    complete  whether everything that was asked for has been measured
    """

    profile: str | None
    clock: str
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    complete: bool = False

    @property
    def emulated(self) -> bool:
        """Whether processes took a profile's time instead of their own."""
        return self.clock == "wall" and self.profile is not None

    @abstractmethod
    def point(self, value: Value | None) -> Point:
        """Return the report at a value of the axis, created if necessary."""

    @abstractmethod
    def measured_points(self) -> Sequence[Point]:
        """Return the points with samples, in order."""

    @abstractmethod
    def label_of(self, value: Value | None) -> str:
        """Write the value as text; "" without an axis."""

    def different_texts(self) -> list[str]:
        """Return a line for each text that is not plain decoding's."""
        labelled_reports = [(self.label_of(point.value), point.report) for point in self.measured_points()]
        return [f"at {label}: {difference}" if label else str(difference)
                for label, report in labelled_reports for difference in report.differences]

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the whole file as JSON."""

    def save(self, path: Path) -> None:
        """Replace ``path`` atomically; UsageError if that fails."""
        write_output(path, json.dumps(self.as_json(), indent=1) + "\n")


@dataclass
class BenchReport(Results):
    """The results of a run."""

    samples: list[Sample] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)  # of --prompt-lengths

    @property
    def concurrent(self) -> bool:
        """Whether requests shared the devices."""
        return any(sample.concurrent for sample in self.samples)

    @property
    def cells(self) -> set[Cell]:
        return {sample.cell for sample in self.samples}

    @property
    def rows(self) -> list[ReportRow]:
        """Rows by temperature, task and strategy, each in the order of its first sample."""
        return rows_of(self.samples)

    @property
    def means(self) -> list[ReportRow]:
        """A row for each strategy and temperature that has been measured on every task."""
        return task_means(self.samples)

    def point(self, value: Value | None) -> Point:
        return Point(value, self)

    def measured_points(self) -> Sequence[Point]:
        return [Point(None, self)]

    def label_of(self, value: Value | None) -> str:
        return ""

    def as_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile, "clock": self.clock, "emulated": self.emulated, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            **self.figures_json(),
        }

    def figures_json(self) -> dict[str, Any]:
        """Return the figures without the settings."""
        return {
            "energy": ENERGY if any(row.energy_j is not None for row in self.rows) else None,
            "rows": [_row_json(row) for row in self.rows], "means": [_row_json(row) for row in self.means],
            "differences": [asdict(d) for d in self.differences],
            "samples": [_sample_json(sample) for sample in self.samples],
            **({"first_tokens": [*map(asdict, self.first_tokens)]} if self.first_tokens else {}),
        }


@dataclass
class Point:
    """One value of a sweep.

    ``measured_mbps``: of each device's link; None in virtual time or without traffic shaping.
    """

    value: Value | None
    report: BenchReport
    measured_mbps: list[float] | None = None


@dataclass
class Sweep(Results):
    """The same benchmark at several values of an axis, at a single temperature.

    links  virtual, network namespaces on this machine, or a cluster's own
    """

    axis: Axis = AXES["bandwidth"]
    links: Links = "virtual"
    points: list[Point] = field(default_factory=list)
    published: PaperFigures | None = None

    def point(self, value: Value | None) -> Point:
        """Points ascend, or descend on the axis "bandwidth"."""
        for point in self.points:
            if point.value == value:
                return point
        new_point = Point(value, BenchReport(self.profile, self.clock))
        self.points.append(new_point)
        self.points.sort(key=lambda point: point.value, reverse=self.axis.falls)  # type: ignore[arg-type, return-value]
        return new_point

    def measured_points(self) -> Sequence[Point]:
        return [point for point in self.points if point.report.samples]

    def label_of(self, value: Value | None) -> str:
        return "" if value is None else self.axis.text(value)

    def speeds(self) -> dict[str, dict[Value, ReportRow]]:
        """Strategy → value → the row, or with several tasks their mean."""
        rows: dict[str, dict[Value, ReportRow]] = {}
        for point in self.points:
            assert point.value is not None
            for row in point.report.means:
                rows.setdefault(row.strategy, {})[point.value] = row
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the ``flowspec sweep … --json`` object, without values that have not been measured yet."""
        return {
            "kind": "sweep", "axis": self.axis.name, "unit": self.axis.unit, "links": self.links,
            "emulated": self.emulated, "profile": self.profile, "clock": self.clock, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            "points": [{"value": point.value, "measured_mbps": point.measured_mbps,
                        **point.report.figures_json()} for point in self.measured_points()],
            "published": self.published.model_dump() if self.published else None,
        }


def _row_json(row: ReportRow) -> dict[str, Any]:
    data = asdict(row)
    figures = data.pop("concurrency") or {}
    return {**data, **figures}


def _sample_json(sample: Sample) -> dict[str, Any]:
    data = asdict(sample)
    if sample.concurrent is None:
        del data["concurrent"]
    return data


class _Task(BaseModel):
    name: str
    prompts: int


class _Settings(BaseModel):
    """The settings that readers of a report rely on; a file has more."""

    model: str
    tasks: list[_Task]
    stages: int
    draft: str
    pipedec_width: int
    max_new_tokens: int
    dtype: str
    seed: int


class _File(BaseModel):
    profile: str | None
    clock: Clock
    date: str
    complete: bool
    machine: dict[str, Any]
    settings: dict[str, Any]


def _upgrade_samples(samples: list[Sample]) -> list[Sample]:
    """They call texts identical that near ties explain, and give an answer of one token a speed of 0."""
    return [replace(s, identical=s.identical and not s.near_ties,
                    tokens_per_second=None if s.tokens <= 1 else s.tokens_per_second,
                    different_tokens=0 if s.identical and not s.near_ties else s.different_tokens)
            for s in samples]


_Samples = Annotated[list[Sample], AfterValidator(_upgrade_samples)]


class _ReportFile(_File):
    samples: _Samples
    differences: list[Difference]
    first_tokens: list[FirstToken] = []


class _Point(BaseModel):
    value: Value
    measured_mbps: list[float] | None
    samples: _Samples
    differences: list[Difference]


def _canonical_axis(name: str) -> str:
    try:
        return axis_named(name).name
    except UsageError as error:
        raise ValueError(str(error)) from error


class _SweepFile(_File):
    kind: Literal["sweep"]
    axis: Annotated[str, AfterValidator(_canonical_axis)]
    links: Links
    points: list[_Point]
    published: PaperFigures | None

    @model_validator(mode="after")
    def _values_suit_the_axis(self) -> _SweepFile:
        pairs = axis_named(self.axis).grid is not None
        if any(isinstance(point.value, tuple) != pairs for point in self.points):
            raise ValueError(f"a point's value does not suit the axis {self.axis}")
        return self


def _parse_report(data: Any) -> _ReportFile:
    file = _ReportFile.model_validate(data)
    _Settings.model_validate(file.settings)
    return file


def load_report(path: Path) -> BenchReport:
    """Read a file that :meth:`BenchReport.save` wrote; UsageError with the first fault for any other file."""
    file = _read(path, _parse_report, "report of flowspec bench run", "flowspec bench run --json OUT")
    return BenchReport(**{name: getattr(file, name) for name in _ReportFile.model_fields})


def load_sweep(path: Path) -> Sweep:
    """Read a file that :meth:`Sweep.save` wrote; UsageError with the first fault for any other file."""
    file = _read(path, _SweepFile.model_validate, "sweep of flowspec sweep",
                 "flowspec sweep bandwidth --json OUT")
    shared = {name: getattr(file, name) for name in _File.model_fields}
    sweep = Sweep(**shared, axis=axis_named(file.axis), links=file.links, published=file.published)
    for file_point in file.points:
        point = sweep.point(file_point.value)
        point.measured_mbps = file_point.measured_mbps
        point.report.samples, point.report.differences = file_point.samples, file_point.differences
    return sweep


def _read(path: Path, parse: Callable[[Any], File], file_kind: str, command: str) -> File:
    """Raise UsageError if the file cannot be read or parsed, or is no ``file_kind``, which ``command`` writes."""
    data = read_json(path)
    try:
        return parse(data)
    except ValidationError as error:
        raise UsageError(f"{path} is no {file_kind} ({_first_fault(error)}); write one with: {command}") from error


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if not key and first["type"] != "value_error":
        return "not a JSON object"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message.lower()}" if key else message


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
