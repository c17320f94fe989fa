"""Rows of a benchmark's figures, always computed from its samples, never read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from flowspec_edge.bench import estimates
from flowspec_edge.bench.samples import Cell, ConcurrencyFigures, Sample, figures_of, mean_figures

BASELINE = "chunk_pp"
MEAN = "mean"

@dataclass(frozen=True)
class ReportRow:
    """One strategy on one task at one temperature: all prompts, all repeats.

    draft                 what the strategy drafted with, such as "eagle2+ngram", or "none"
    tokens_per_second     mean over prompts and repeats, without answers of at most one token
    tokens_per_second_se  its standard error over the prompts; None for a single one
    tokens_per_second_sd  standard deviation over repeats of the prompts' mean; None if run once
    speedup               ratio to chunk_pp's tokens_per_second; None if chunk_pp was not run
    alt, alr              sums divided by sums: tokens after the first over turns, and over rounds
    tokens                sum of all generated tokens
    itl_mean_s            decode time over tokens after the first, sums divided by sums
    itl_p50_s, itl_p95_s  means of the requests' own percentiles
    identical             whether all texts are plain decoding's, except for near ties in 16 bits
    near_ties             texts in which near ties were decided differently
    energy_j              sum over all boards; None unless measured for all requests
    energy_above_idle_j   without the boards' idle power
    joules_per_token      energy_j over tokens, the prefill included
    answers, repeating    texts, and those of them that repeat themselves; None if it is not known
    tokens_per_second_repeating, tokens_per_second_other
                          of the texts that repeat themselves and of all others; None without such texts
    speedup_other         ratio to chunk_pp's tokens_per_second_other
    concurrency           None if requests ran one by one
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
    energy_j: float | None = None
    energy_above_idle_j: float | None = None
    joules_per_token: float | None = None
    joules_per_token_above_idle: float | None = None
    answers: int = 0
    repeating: int | None = None
    tokens_per_second_repeating: float | None = None
    tokens_per_second_other: float | None = None
    speedup_other: float | None = None
    concurrency: ConcurrencyFigures | None = None
    draft: str = ""
    tokens_per_second_se: float | None = None


def rows_of(samples: Iterable[Sample]) -> list[ReportRow]:
    """The rows by temperature, task and strategy, each in the order of its first sample."""
    cells: dict[Cell, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(sample.cell, []).append(sample)
    if not cells:
        return []
    strategies, tasks, temperatures = _axes(cells)
    found = [_row(cells[cell]) for temperature in temperatures for task in tasks for name in strategies
             if (cell := (name, task, temperature)) in cells]
    return _with_speedup(found)


def task_means(samples: Sequence[Sample]) -> list[ReportRow]:
    """A row for each strategy and temperature with all tasks: means of rates and times, sums of counts."""
    single = rows_of(samples)
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


def _row(samples: Sequence[Sample]) -> ReportRow:
    first, repeats = samples[0], _repeats(samples)
    turns, rounds = sum(s.turns for s in samples), sum(s.rounds for s in samples)
    decoded = _decoded(samples)
    after_first = sum(max(0, s.tokens - 1) for s in samples)
    timings = [s.concurrent for s in samples if s.concurrent]
    tokens = sum(s.tokens for s in samples)
    energy, above_idle = _sum(s.energy_j for s in samples), _sum(s.energy_above_idle_j for s in samples)
    return ReportRow(
        strategy=first.strategy, task=first.task, temperature=first.temperature,
        tokens_per_second=fmean(s.tokens_per_second for s in decoded),
        tokens_per_second_sd=_deviation([_repeat_speed(samples, r) for r in repeats]),
        speedup=None,
        alt=after_first / turns if turns else 0.0,
        alr=after_first / rounds if rounds else 0.0,
        turns=turns, rounds=rounds, tokens=tokens,
        ttft_s=fmean(s.ttft_s for s in samples),
        itl_mean_s=sum(s.decode_s for s in decoded) / after_first if after_first else 0.0,
        itl_p50_s=fmean(s.itl_p50_s for s in decoded),
        itl_p95_s=fmean(s.itl_p95_s for s in decoded),
        repeats=len(repeats),
        identical=all(s.identical for s in samples), near_ties=sum(s.near_ties for s in samples),
        energy_j=energy, energy_above_idle_j=above_idle,
        joules_per_token=None if energy is None or not tokens else energy / tokens,
        joules_per_token_above_idle=None if above_idle is None or not tokens else above_idle / tokens,
        answers=len(samples), **_apart(samples, decoded), draft=first.draft,
        tokens_per_second_se=estimates.speed(samples).error,
        concurrency=figures_of(timings) if timings else None,
    )


def _apart(samples: Sequence[Sample], decoded: Sequence[Sample]) -> dict[str, Any]:
    """The figures of texts that repeat themselves and of the others."""
    if any(s.repeating is None for s in samples):
        return {}
    return {"repeating": sum(bool(s.repeating) for s in samples),
            "tokens_per_second_repeating": _mean_of(s.tokens_per_second for s in decoded if s.repeating),
            "tokens_per_second_other": _mean_of(s.tokens_per_second for s in decoded if not s.repeating)}


def _mean_of(values: Iterable[float | None]) -> float | None:
    """Of those that are not None."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _decoded(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples with a speed and inter-token latencies; one without if there are no others."""
    return [s for s in samples if s.tokens > 1] or samples[:1]


def _mean(parts: Sequence[ReportRow], deviation: float | None) -> ReportRow:
    averaged = ("tokens_per_second", "alt", "alr", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p95_s")
    summed = ("turns", "rounds", "tokens", "near_ties", "answers")
    figures: dict[str, Any] = {name: fmean(getattr(row, name) for row in parts) for name in averaged}
    figures |= {name: sum(getattr(row, name) for row in parts) for name in summed}
    figures |= {name: _sum(getattr(row, name) for row in parts)
                for name in ("energy_j", "energy_above_idle_j")}
    for name in ("joules_per_token", "joules_per_token_above_idle"):
        total = _sum(getattr(row, name) for row in parts)
        figures[name] = None if total is None else total / len(parts)
    for name in ("tokens_per_second_repeating", "tokens_per_second_other"):
        figures[name] = _mean_of(getattr(row, name) for row in parts)
    figures["tokens_per_second_se"] = estimates.average(
        [estimates.Estimate(row.tokens_per_second, row.tokens_per_second_se) for row in parts]).error
    loops = [row.repeating for row in parts if row.repeating is not None]
    figures["repeating"] = sum(loops) if len(loops) == len(parts) else None
    shared = [row.concurrency for row in parts if row.concurrency]
    figures["concurrency"] = mean_figures(shared) if shared else None
    return replace(parts[0], task=MEAN, tokens_per_second_sd=deviation,
                   identical=all(row.identical for row in parts), **figures)


def _sum(measured: Iterable[float | None]) -> float | None:
    """None if a value is missing: partial sums cannot be compared."""
    total = 0.0
    for value in measured:
        if value is None:
            return None
        total += value
    return total


def _with_speedup(found: Sequence[ReportRow]) -> list[ReportRow]:
    base = {(row.task, row.temperature): row for row in found if row.strategy == BASELINE}

    def ratio(row: ReportRow, name: str) -> float | None:
        fast, slow = getattr(row, name), getattr(base.get((row.task, row.temperature)), name, None)
        return fast / slow if fast is not None and slow else None

    return [replace(row, speedup=ratio(row, "tokens_per_second"),
                    speedup_other=ratio(row, "tokens_per_second_other")) for row in found]


def _axes(cells: Iterable[Cell]) -> tuple[list[str], list[str], list[float]]:
    strategies, tasks, temperatures = zip(*cells, strict=True)
    return list(dict.fromkeys(strategies)), list(dict.fromkeys(tasks)), list(dict.fromkeys(temperatures))


def _repeats(samples: Iterable[Sample]) -> list[int]:
    return sorted({sample.repeat for sample in samples})


def _repeat_speed(samples: Iterable[Sample], repeat: int) -> float:
    """The mean over tasks of the mean over prompts."""
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.repeat == repeat:
            tasks.setdefault(sample.task, []).append(sample)
    return fmean(fmean(s.tokens_per_second for s in _decoded(mine)) for mine in tasks.values())


def _deviation(speeds: Sequence[float]) -> float | None:
    return stdev(speeds) if len(speeds) > 1 else None
