"""What was measured: a sample for each request, the rows they add up to, and the file they live in.

Knows how samples become figures; rows are always made anew from the samples, in memory and from a
file alike.  Does not know how anything is run or printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from flowspec_edge.bench.output import write
from flowspec_edge.errors import UsageError

BASELINE = "chunk_pp"
MEAN = "mean"

Cell = tuple[str, str, float]  # strategy, task, temperature: what is measured in one go


@dataclass(frozen=True)
class Sample:
    """One request: ``prompt`` is its index in the task, ``repeat`` what was added to the seed.

    ``tokens`` counts every generated token; times are in seconds, ``bytes`` is all that was sent.
    ``near_ties``: in 16 bits, that the text counts as identical although near ties came out otherwise
    (``bench.near_ties``).
    """

    strategy: str
    task: str
    temperature: float
    repeat: int
    prompt: int
    tokens: int
    turns: float
    rounds: int
    tokens_per_second: float
    decode_s: float
    ttft_s: float
    itl_p50_s: float
    itl_p95_s: float
    drafted: int
    verified: int
    accepted: int
    bytes: int
    identical: bool
    near_ties: bool = False

    @property
    def cell(self) -> Cell:
        return self.strategy, self.task, self.temperature


@dataclass(frozen=True)
class Row:
    """One strategy on one task at one temperature: all prompts, all repeats.

    tokens_per_second     mean over prompts and repeats; an answer of at most one token, which comes with
                          the prompt, has no speed and is not counted
    tokens_per_second_sd  standard deviation over repeats of the prompts' mean; None if run once
    speedup               ratio to chunk_pp's tokens_per_second; None without it
    alt, alr              sums divided by sums: tokens after the first (it comes with the prompt)
                          over turns, and over rounds
    turns, rounds, tokens sums; tokens counts every generated token
    ttft_s                time to the first token, mean
    itl_mean_s            decode time over tokens after the first, sums divided by sums
    itl_p50_s, itl_p95_s  means of the requests' own percentiles
    identical             whether all texts are plain decoding's, near ties of 16 bits aside
    near_ties             texts in which those came out otherwise
    """

    strategy: str
    task: str
    temperature: float
    tokens_per_second: float
    tokens_per_second_sd: float | None
    speedup: float | None
    alt: float
    alr: float
    turns: float
    rounds: int
    tokens: int
    ttft_s: float
    itl_mean_s: float
    itl_p50_s: float
    itl_p95_s: float
    repeats: int
    identical: bool
    near_ties: int = 0


@dataclass(frozen=True)
class Difference:
    """The first place where a strategy's text left plain decoding's; None is the end of a text."""

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


@dataclass
class Report:
    """What a run showed.

    ``settings`` is everything that the figures depend on but for the machine; ``date`` is a day, so
    that two runs in virtual time give the same file.  ``complete`` says that nothing is missing of
    what was asked.
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
        """Whether processes took the profile's time, rather than their own."""
        return self.clock == "wall" and self.profile is not None

    @property
    def cells(self) -> set[Cell]:
        """What has been measured."""
        return {sample.cell for sample in self.samples}

    @property
    def rows(self) -> list[Row]:
        """By temperature, task and strategy, each in the order first met."""
        return rows(self.samples)

    @property
    def means(self) -> list[Row]:
        """A row for each strategy and temperature that has been measured on every task."""
        return means(self.samples)

    def as_json(self) -> dict[str, Any]:
        """The ``bench run --json`` object."""
        return {
            "profile": self.profile, "clock": self.clock, "emulated": self.emulated, "date": self.date,
            "complete": self.complete, "machine": self.machine, "settings": self.settings,
            "rows": [asdict(row) for row in self.rows], "means": [asdict(row) for row in self.means],
            "differences": [asdict(d) for d in self.differences],
            "samples": [asdict(sample) for sample in self.samples],
        }

    def save(self, path: Path) -> None:
        """Replace ``path`` in one step; UsageError if that cannot be done."""
        write(path, json.dumps(self.as_json(), indent=1) + "\n")


def rows(samples: Iterable[Sample]) -> list[Row]:
    """The rows that ``samples`` add up to; see :class:`Report`."""
    cells: dict[Cell, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(sample.cell, []).append(sample)
    if not cells:
        return []
    strategies, tasks, temperatures = _axes(cells)
    found = [_row(cells[cell]) for temperature in temperatures for task in tasks for name in strategies
             if (cell := (name, task, temperature)) in cells]
    return _with_speedup(found)


def means(samples: Sequence[Sample]) -> list[Row]:
    """Over the tasks, each with the same weight: means of rates and times, sums of counts."""
    single = rows(samples)
    if not single:
        return []
    strategies, tasks, temperatures = _axes(sample.cell for sample in samples)
    found = []
    for temperature in temperatures:
        for name in strategies:
            parts = [row for row in single if (row.strategy, row.temperature) == (name, temperature)]
            if len(parts) == len(tasks):
                mine = [s for s in samples if (s.strategy, s.temperature) == (name, temperature)]
                found.append(_mean(parts, _deviation([_repeat_speed(mine, r) for r in _repeats(mine)])))
    return _with_speedup(found)


class _Task(BaseModel):
    name: str
    prompts: int


class _Settings(BaseModel):
    """The settings that a reader of a report relies on; there are more."""

    model: str
    tasks: list[_Task]
    stages: int
    draft: str
    pipedec_width: int
    max_new_tokens: int
    dtype: str
    seed: int


class _File(BaseModel):
    """What a report's file must hold."""

    profile: str | None
    clock: Literal["virtual", "wall"]
    date: str
    complete: bool
    machine: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample]
    differences: list[Difference]


def load_report(path: Path) -> Report:
    """What :meth:`Report.save` wrote; any other file is a UsageError that says what is amiss."""
    data = read_json(path)
    try:
        file = _File.model_validate(data)
        _Settings.model_validate(file.settings)
    except ValidationError as error:
        raise UsageError(f"{path} is no report of flowspec bench run ({first_fault(error)}); "
                         "write one with: flowspec bench run --json OUT") from error
    return Report(**{name: getattr(file, name) for name in _File.model_fields})


def read_json(path: Path) -> Any:
    """What a JSON file holds; UsageError if it cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error


def first_fault(error: ValidationError) -> str:
    """The first thing that is amiss in a file, for its error."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if not key and first["type"] != "value_error":
        return "not a JSON object"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message.lower()}" if key else message


def _row(samples: Sequence[Sample]) -> Row:
    first, repeats = samples[0], _repeats(samples)
    turns, rounds = sum(s.turns for s in samples), sum(s.rounds for s in samples)
    decoded = _decoded(samples)
    after_first = sum(max(0, s.tokens - 1) for s in samples)
    return Row(
        strategy=first.strategy, task=first.task, temperature=first.temperature,
        tokens_per_second=fmean(s.tokens_per_second for s in decoded),
        tokens_per_second_sd=_deviation([_repeat_speed(samples, r) for r in repeats]),
        speedup=None,
        alt=after_first / turns if turns else 0.0,
        alr=after_first / rounds if rounds else 0.0,
        turns=turns, rounds=rounds, tokens=sum(s.tokens for s in samples),
        ttft_s=fmean(s.ttft_s for s in samples),
        itl_mean_s=sum(s.decode_s for s in decoded) / after_first if after_first else 0.0,
        itl_p50_s=fmean(s.itl_p50_s for s in decoded),
        itl_p95_s=fmean(s.itl_p95_s for s in decoded),
        repeats=len(repeats),
        identical=all(s.identical for s in samples), near_ties=sum(s.near_ties for s in samples),
    )


def _decoded(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those that have a speed and latencies between tokens; one that has neither if there are no others."""
    return [s for s in samples if s.tokens > 1] or samples[:1]


def _mean(parts: Sequence[Row], deviation: float | None) -> Row:
    averaged = ("tokens_per_second", "alt", "alr", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p95_s")
    summed = ("turns", "rounds", "tokens", "near_ties")
    figures: dict[str, Any] = {name: fmean(getattr(row, name) for row in parts) for name in averaged}
    figures |= {name: sum(getattr(row, name) for row in parts) for name in summed}
    return replace(parts[0], task=MEAN, tokens_per_second_sd=deviation,
                   identical=all(row.identical for row in parts), **figures)


def _with_speedup(found: Sequence[Row]) -> list[Row]:
    base = {(row.task, row.temperature): row.tokens_per_second for row in found if row.strategy == BASELINE}

    def ratio(row: Row) -> float | None:
        slow = base.get((row.task, row.temperature))
        return row.tokens_per_second / slow if slow else None

    return [replace(row, speedup=ratio(row)) for row in found]


def _axes(cells: Iterable[Cell]) -> tuple[list[str], list[str], list[float]]:
    """Strategies, tasks and temperatures, each in the order first met."""
    strategies, tasks, temperatures = zip(*cells, strict=True)
    return list(dict.fromkeys(strategies)), list(dict.fromkeys(tasks)), list(dict.fromkeys(temperatures))


def _repeats(samples: Iterable[Sample]) -> list[int]:
    return sorted({sample.repeat for sample in samples})


def _repeat_speed(samples: Iterable[Sample], repeat: int) -> float:
    """Tokens/s in one repeat: the mean over tasks of the mean over prompts."""
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.repeat == repeat:
            tasks.setdefault(sample.task, []).append(sample)
    return fmean(fmean(s.tokens_per_second for s in _decoded(mine)) for mine in tasks.values())


def _deviation(speeds: Sequence[float]) -> float | None:
    return stdev(speeds) if len(speeds) > 1 else None


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
