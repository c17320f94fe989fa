"""The report of a benchmark run, and its JSON file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from flowspec_edge.bench.results.rows import ReportRow, rows_of, task_means
from flowspec_edge.bench.results.samples import Cell, Sample
from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import read_json
from flowspec_edge.util.files import write_output

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
        where = f"{self.task} at T = {self.temperature:g}, repeat {self.repeat}, " if self.task else ""
        return (f"{self.strategy}, {where}prompt {self.prompt}: token {self.position} is {_token(self.got)}, "
                f"plain decoding gives {_token(self.expected)}")


class JsonResults(ABC):
    """What a command writes to a JSON file and reads again."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The whole file."""

    def save(self, path: Path) -> None:
        """Replace ``path`` atomically; UsageError if that fails."""
        write_output(path, json.dumps(self.as_json(), indent=1) + "\n")


@dataclass
class BenchReport(JsonResults):
    """The results of a run.

    settings  everything that the figures depend on, except for the machine
    date      a day, so that two runs in virtual time give the same file
    complete  whether everything that was asked for has been measured
    """

    profile: str | None
    clock: str
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    samples: list[Sample] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    complete: bool = False

    @property
    def emulated(self) -> bool:
        """Whether processes took a profile's time instead of their own."""
        return self.clock == "wall" and self.profile is not None

    @property
    def concurrent(self) -> bool:
        """Whether requests shared the devices."""
        return any(sample.concurrent for sample in self.samples)

    @property
    def cells(self) -> set[Cell]:
        return {sample.cell for sample in self.samples}

    @property
    def rows(self) -> list[ReportRow]:
        """By temperature, task and strategy, each in the order of its first sample."""
        return rows_of(self.samples)

    @property
    def means(self) -> list[ReportRow]:
        """A row for each strategy and temperature that has been measured on every task."""
        return task_means(self.samples)

    def as_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile, "clock": self.clock, "emulated": self.emulated, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            "energy": ENERGY if any(row.energy_j is not None for row in self.rows) else None,
            "rows": [_row_json(row) for row in self.rows], "means": [_row_json(row) for row in self.means],
            "differences": [asdict(d) for d in self.differences],
            "samples": [_sample_json(sample) for sample in self.samples],
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
    clock: Literal["virtual", "wall"]
    date: str
    complete: bool
    machine: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample]
    differences: list[Difference]


def _parse(data: Any) -> _File:
    file = _File.model_validate(data)
    _Settings.model_validate(file.settings)
    return file


def load_report(path: Path) -> BenchReport:
    """Read a file that :meth:`BenchReport.save` wrote; UsageError with the first fault for any other file."""
    file = read_results(path, _parse, "report of flowspec bench run", "flowspec bench run --json OUT")
    return BenchReport(**{name: getattr(file, name) for name in _File.model_fields})


def read_results(path: Path, parse: Callable[[Any], File], what: str, command: str) -> File:
    """UsageError if the file cannot be read or parsed, or is no ``what``, which ``command`` writes."""
    data = read_json(path)
    try:
        return parse(data)
    except ValidationError as error:
        raise UsageError(f"{path} is no {what} ({_first_fault(error)}); write one with: {command}") from error


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if not key and first["type"] != "value_error":
        return "not a JSON object"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message.lower()}" if key else message


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
