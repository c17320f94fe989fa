"""A table's or a figure's values as flat records, measured and published alike: what the CSV holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowspec_edge.lab.bench.axes import Value, label
from flowspec_edge.lab.bench.estimates import (
    Estimate,
    average,
    by_prompt,
    per_round,
    per_turn,
    ratio,
    speed,
    speedup,
)
from flowspec_edge.lab.bench.exactness import exactness, mark_of
from flowspec_edge.lab.bench.paper_results import PaperResults
from flowspec_edge.lab.bench.results import BenchReport, Results
from flowspec_edge.lab.bench.rows import BASELINE, MEAN
from flowspec_edge.lab.bench.samples import Sample, is_short
from flowspec_edge.lab.reproduce.catalogue import Artefact, Kind, Measurement
from flowspec_edge.model.opened import DEMO

MEASURED = "measured"
HEAD_ACCEPTANCE = "the head's acceptance"
DRAFTS = {False: "all with the head alone", True: "all with the head and n-grams"}
Quantity = Literal["tokens_per_second", "speedup", "tokens_per_second_other", "speedup_other", "alt", "alr",
                   "over_autoregressive", "over_stpp", "acceptance", "acceptance_length", "law"]


@dataclass(frozen=True)
class Record:
    """One figure of a reproduced table, measured or published.

    source     "measured", or the model of a published figure
    acceptance  "the head's", or how drafts were calibrated, of this figure or of those it stands beside
    draft      what the method drafted with (``registry.draft_label``); "" if published
    task       "mean" of all tasks
    looks_up   whether every method that drafts also looks up n-grams in the text
    axis, at   what a sweep changes, and its value; for tree depths "d0,d_exp"
    figure     None if no answer has one
    median     over the prompts; None for a single one, and for a mean over tasks
    short      of ``answers``, those of at most one token, which are in no figure
    repeating  of ``answers``, those that repeat themselves
    identical  whether all texts are those of plain decoding, token for token
    different_answers, different_tokens, near_ties  as in ``exactness.Exactness``
    """

    source: str
    profile: str
    stages: int
    temperature: float
    method: str
    task: str
    axis: str
    at: str
    quantity: Quantity
    figure: float | None
    standard_error: float | None = None
    median: float | None = None
    prompts: int | None = None
    answers: int | None = None
    short: int | None = None
    repeating: int | None = None
    identical: bool | None = None
    different_answers: int | None = None
    tokens: int | None = None
    different_tokens: int | None = None
    near_ties: int | None = None
    acceptance: str = ""
    draft: str = ""
    looks_up: bool = False

    @property
    def estimate(self) -> Estimate | None:
        return None if self.figure is None else Estimate(self.figure, self.standard_error, self.median)

    @property
    def mark(self) -> str:
        return mark_of(self.different_answers, self.near_ties)

    @property
    def conditions(self) -> tuple[str, str, bool, float]:
        """Figures of one panel share them: profile, acceptance, look-up, temperature."""
        return self.profile, self.acceptance, self.looks_up, self.temperature


@dataclass(frozen=True)
class Measured:
    """A measurement and its results: one report, or one for each value of its axis."""

    measurement: Measurement
    results: Results

    @property
    def settings(self) -> dict[str, Any]:
        return self.results.settings

    @property
    def looks_up(self) -> bool:
        """Whether every method also looked up in the text."""
        return bool(self.settings.get("ngram"))

    @property
    def acceptance(self) -> str:
        """0.65 was fitted to the demonstration model: with another it makes no paper's acceptance."""
        share = self.settings.get("acceptance", 1.0)
        if share == 1:
            return HEAD_ACCEPTANCE
        fitted = self.settings.get("model") == DEMO
        return f"acceptance calibrated to the paper's ({share:g})" if fitted else f"acceptance {share:g}"

    def points(self) -> list[tuple[Value | None, int, BenchReport]]:
        """(value, stages, report)."""
        return [(p.value, int(str(p.value)) if self.measurement.axis == "stages" else self.settings["stages"],
                 p.report) for p in self.results.measured_points()]


Others = Callable[[str], Sequence[Sample]]  # another method's samples of the same task and temperature
Estimates = dict[Quantity, Estimate | None]  # None: no answer has one
Figures = Callable[[Sequence[Sample], Others, int], Estimates]  # the number of stages last


def records_of(artefact: Artefact, results: Sequence[Measured], paper: PaperResults) -> list[Record]:
    records: list[Record] = []
    for measured in results:
        for value, stages, report in measured.points():
            point = _Point(measured, value, stages, report)
            records += point.records(_FIGURES[artefact.kind])
        records += _published(artefact.kind, measured, paper)
    return records


def position(axis: str | None, value: Value | None) -> str:
    if axis is None or value is None:
        return ""
    return ",".join(map(label, value)) if isinstance(value, tuple) else label(value)


@dataclass(frozen=True)
class _Point:
    measured: Measured
    value: Value | None
    stages: int
    report: BenchReport

    def records(self, figures: Figures) -> Iterator[Record]:
        samples = self.report.samples
        tasks = list(dict.fromkeys(s.task for s in samples))
        methods = [m for m in self.measured.measurement.strategies if any(s.strategy == m for s in samples)]
        for temperature in dict.fromkeys(s.temperature for s in samples):
            for method in methods:
                parts: list[Estimates] = []
                method_samples = [s for s in samples if (s.strategy, s.temperature) == (method, temperature)]
                for task in tasks:
                    task_samples = [s for s in method_samples if s.task == task]
                    if not task_samples:
                        continue

                    def others(name: str, task: str = task, temperature: float = temperature) -> list[Sample]:
                        return [s for s in samples if s.cell == (name, task, temperature)]

                    parts.append(figures(task_samples, others, self.stages))
                    yield from self._records_of(temperature, method, task, task_samples, parts[-1])
                if len(tasks) > 1 and len(parts) == len(tasks):
                    means: Estimates = {name: average([part[name] for part in parts]) for name in parts[0]
                                        if all(name in part for part in parts)}
                    yield from self._records_of(temperature, method, MEAN, method_samples, means)

    def _records_of(self, temperature: float, method: str, task: str, samples: Sequence[Sample],
                    figures: Estimates) -> Iterator[Record]:
        all_judged = all(s.repeating is not None for s in samples)
        exact = exactness(samples)
        axis = self.measured.measurement.axis
        for quantity, estimate in figures.items():
            yield Record(
                MEASURED, self.report.profile or "", self.stages, temperature, method, task, axis or "",
                position(axis, self.value), quantity, estimate.value if estimate else None,
                estimate.error if estimate else None, estimate.median if estimate else None,
                prompts=len({(s.task, s.prompt) for s in samples}), answers=len(samples),
                short=sum(map(is_short, samples)),
                repeating=sum(bool(s.repeating) for s in samples) if all_judged else None,
                identical=not exact.different_answers, different_answers=exact.different_answers,
                tokens=exact.tokens, different_tokens=exact.different_tokens, near_ties=exact.near_ties,
                acceptance=self.measured.acceptance, draft=samples[0].draft,
                looks_up=self.measured.looks_up)


def _speeds(samples: Sequence[Sample], others: Others, stages: int) -> Estimates:
    base = others(BASELINE)
    figures: Estimates = {"tokens_per_second": speed(samples)}
    if base:
        figures["speedup"] = speedup(samples, base)
    not_repeating, base_not_repeating = _not_repeating(samples), _not_repeating(base)
    if not_repeating and any(s.repeating for s in samples):
        figures["tokens_per_second_other"] = speed(not_repeating)
        if base_not_repeating:
            figures["speedup_other"] = speedup(not_repeating, base_not_repeating)
    return figures


def _not_repeating(samples: Sequence[Sample]) -> list[Sample]:
    return [s for s in samples if s.repeating is False and not is_short(s)]


def _acceptance(samples: Sequence[Sample], others: Others, stages: int) -> Estimates:
    return {"alt": per_turn(samples), "alr": per_round(samples)}


def _ratios(samples: Sequence[Sample], others: Others, stages: int) -> Estimates:
    figures: Estimates = {"tokens_per_second": speed(samples)}
    if plain := others("autoregressive"):
        figures["over_autoregressive"] = speedup(samples, plain)
    if static := others("stpp"):
        figures["over_stpp"] = speedup(samples, static)
    return figures


def _law(samples: Sequence[Sample], others: Others, stages: int) -> Estimates:
    """Return n N / K with K counted in time, and what the law says for the counted acceptance a."""
    if samples[0].strategy != "spd":
        return {}

    def cycles(sample: Sample) -> float:
        # A text that ends in a hit leaves a round unfinished, whose filling the law does not know.
        misses = sample.tokens - 1 - sample.accepted
        return sample.turns - (sample.rounds - misses) * (stages - 1)

    decoded = [s for s in samples if not is_short(s)]
    tokens = list(by_prompt(decoded, lambda s: s.tokens - 1).values())
    a = ratio(list(by_prompt(decoded, lambda s: s.accepted).values()), tokens)
    length = ratio([stages * n for n in tokens], list(by_prompt(decoded, cycles).values()))
    return {"acceptance": a, "acceptance_length": length,
            "law": Estimate(law(stages, a.value)) if a else None}


def law(stages: int, acceptance: float) -> float:
    """SPD's equivalent acceptance length n / (n (1 - a) + a)."""
    return stages / (stages * (1 - acceptance) + acceptance)


_FIGURES: dict[Kind, Figures] = {
    "speed": _speeds, "bandwidth": _speeds, "depth": _speeds, "acceptance": _acceptance, "stages": _ratios,
    "law": _law,
}


def _published(kind: Kind, measured: Measured, paper: PaperResults) -> Iterator[Record]:
    """Yield the paper's figures for this testbed.

    There are none for other numbers of stages than the paper's, and none with look-up.
    """
    m, stages = measured.measurement, measured.settings.get("stages", 0)
    if measured.looks_up:
        return  # the papers look up nothing

    def record(source: str, method: str, quantity: Quantity, figure: float, temperature: float = 0.0,
               at: str = "", stages: int = stages) -> Record:
        return Record(source, m.profile if kind != "law" else "", stages, temperature, method, MEAN,
                      m.axis or "", at, quantity, figure, acceptance=measured.acceptance)

    if kind == "speed":
        for temperature in m.temperatures:
            for speeds in paper.speeds(m.profile, stages, temperature):
                for method in (name for name in m.strategies if name in speeds.means):
                    figure = speeds.means[method]
                    yield record(speeds.model, method, "tokens_per_second", figure, temperature)
                    yield record(speeds.model, method, "speedup", figure / speeds.means[BASELINE],
                                 temperature)
    elif kind == "acceptance":
        for accepted in paper.acceptances(m.profile, stages):
            for method in (name for name in m.strategies if name in accepted.alt):
                yield record(accepted.model, method, "alt", accepted.alt[method])
                yield record(accepted.model, method, "alr", accepted.alr[method])
    elif kind == "bandwidth" and (curves := paper.bandwidths(m.profile, stages, m.temperatures[0])):
        for method in m.strategies:
            for mbps, figure in curves.curve(method).items():
                yield record(curves.model, method, "tokens_per_second", figure, at=f"{mbps:g}")
    elif kind == "depth" and (cells := paper.depths(m.profile, stages)):
        for cell in (cells.best, cells.worst):
            yield record(cells.model, cells.strategy, "tokens_per_second", cell.tokens_per_second,
                         at=f"{cell.depth},{cell.expand_depth}")
    elif kind == "stages":
        for r in paper.ratio:
            for figure in (r.lowest, r.highest):
                yield record("Llama-3.1-70B", r.strategy,
                             "over_stpp" if r.over == "stpp" else "over_autoregressive", figure,
                             at=f"{r.stages}", stages=r.stages)
    elif kind == "law":
        for lengths in paper.acceptance_length:
            for n, figure in zip(lengths.stages, lengths.lengths, strict=True):
                yield record(lengths.model, "spd", "acceptance_length", figure, at=f"{n}", stages=n)
