"""Rows of a benchmark's figures, always computed from its samples, never read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from flowspec_edge.lab.bench import estimates
from flowspec_edge.lab.bench.estimates import Estimate
from flowspec_edge.lab.bench.exactness import Exactness, exactness
from flowspec_edge.lab.bench.samples import (
    Cell,
    ConcurrencyFigures,
    Sample,
    figures_of,
    is_short,
    mean_figures,
)

BASELINE = "chunk_pp"
MEAN = "mean"

@dataclass(frozen=True)
class ReportRow:
    """One strategy on one task at one temperature: all prompts, all repeats.

    A figure of no answer at all is None: answers of at most one token have no speed, and are in none of the
    rates and latencies.

    draft                 what the strategy drafted with, such as "eagle2+ngram", or "none"
    tokens_per_second     mean over prompts and repeats
    tokens_per_second_se  its standard error over the prompts; None for a single one
    tokens_per_second_median  median over the prompts; None for a single one
    tokens_per_second_sd  standard deviation over repeats of the prompts' mean; None if run once
    speedup               ratio to chunk_pp's tokens_per_second; None if chunk_pp was not run
    speedup_se            its standard error over the prompts
    speedup_median        median of the prompts' own ratios; None for a single one
    alt, alr              sums divided by sums: tokens after the first over turns, and over rounds
    tokens                sum of all generated tokens
    ttft_s                of the answers that have a token
    itl_mean_s            decode time over tokens after the first, sums divided by sums
    itl_p50_s, itl_p95_s  means of the requests' own percentiles
    identical             whether all texts are plain decoding's, token for token
    different_answers     texts that are not
    different_tokens      places at which their tokens are not plain decoding's; None if it is not known
    near_ties             of the different texts, those that near ties in 16 bits explain
    energy_j              sum over all boards; None unless measured for all requests
    energy_above_idle_j   without the boards' idle power
    joules_per_token      energy_j over tokens, the prefill included
    answers, repeating    texts, and those of them that repeat themselves; None if it is not known
    short                 texts of at most one token
    tokens_per_second_repeating, tokens_per_second_other
                          of the texts that repeat themselves and of all others; None without such texts
    speedup_other         ratio to chunk_pp's tokens_per_second_other
    concurrency           None if requests ran one by one
    """

    strategy: str
    task: str
    temperature: float
    tokens_per_second: float | None
    tokens_per_second_sd: float | None
    speedup: float | None
    alt: float | None
    alr: float | None
    turns: float
    rounds: int
    tokens: int
    ttft_s: float | None
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
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
    tokens_per_second_median: float | None = None
    speedup_se: float | None = None
    speedup_median: float | None = None
    short: int = 0
    different_answers: int = 0
    different_tokens: int | None = 0

    @property
    def speed(self) -> Estimate | None:
        """Return tokens/s."""
        return _estimate(self.tokens_per_second, self.tokens_per_second_se, self.tokens_per_second_median)

    @property
    def ratio(self) -> Estimate | None:
        """Return the speedup."""
        return _estimate(self.speedup, self.speedup_se, self.speedup_median)

    @property
    def exactness(self) -> Exactness:
        return Exactness(self.answers, self.different_answers, self.tokens, self.different_tokens,
                         self.near_ties)


def rows_of(samples: Iterable[Sample]) -> list[ReportRow]:
    """Return the rows by temperature, task and strategy, each in the order of its first sample."""
    cells: dict[Cell, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(sample.cell, []).append(sample)
    if not cells:
        return []
    strategies, tasks, temperatures = _axes(cells)
    rows = [_row(cells[cell], cells.get((BASELINE, task, temperature), []))
            for temperature in temperatures for task in tasks for name in strategies
            if (cell := (name, task, temperature)) in cells]
    return _with_speedup(rows)


def task_means(samples: Sequence[Sample]) -> list[ReportRow]:
    """Return a row for each strategy and temperature with all tasks: means of rates and times, sums of counts."""
    single = rows_of(samples)
    if not single:
        return []
    strategies, tasks, temperatures = _axes(sample.cell for sample in samples)
    means = []
    for temperature in temperatures:
        for name in strategies:
            parts = [row for row in single if (row.strategy, row.temperature) == (name, temperature)]
            if len(parts) == len(tasks):
                selected, base = ([s for s in samples if (s.strategy, s.temperature) == (strategy, temperature)]
                                  for strategy in (name, BASELINE))
                means.append(_mean(parts, selected, base))
    return _with_speedup(means)


def _row(samples: Sequence[Sample], base: Sequence[Sample]) -> ReportRow:
    """Make the row of one strategy; ``base``: Chunk-PP's samples of the same task and temperature."""
    first, repeats = samples[0], _repeats(samples)
    decoded = [s for s in samples if not is_short(s)]
    turns, rounds = sum(s.turns for s in decoded), sum(s.rounds for s in decoded)
    after_first = sum(s.tokens - 1 for s in decoded)
    timings = [s.concurrent for s in samples if s.concurrent]
    exact = exactness(samples)
    energy, above_idle = _sum(s.energy_j for s in samples), _sum(s.energy_above_idle_j for s in samples)
    return ReportRow(
        strategy=first.strategy, task=first.task, temperature=first.temperature,
        tokens_per_second=_mean_of(s.tokens_per_second for s in decoded),
        tokens_per_second_sd=_deviation([_repeat_speed(samples, r) for r in repeats]),
        speedup=None,
        alt=after_first / turns if turns else None,
        alr=after_first / rounds if rounds else None,
        turns=sum(s.turns for s in samples), rounds=sum(s.rounds for s in samples),
        tokens=exact.tokens,
        ttft_s=_mean_of(s.ttft_s for s in samples if s.tokens),
        itl_mean_s=sum(s.decode_s for s in decoded) / after_first if after_first else None,
        itl_p50_s=_mean_of(s.itl_p50_s for s in decoded),
        itl_p95_s=_mean_of(s.itl_p95_s for s in decoded),
        repeats=len(repeats),
        identical=not exact.different_answers, near_ties=exact.near_ties,
        different_answers=exact.different_answers, different_tokens=exact.different_tokens,
        energy_j=energy, energy_above_idle_j=above_idle,
        joules_per_token=_over(energy, exact.tokens),
        joules_per_token_above_idle=_over(above_idle, exact.tokens),
        answers=len(samples), short=len(samples) - len(decoded), draft=first.draft,
        **_apart(samples, decoded),
        **_over_prompts(samples, base),
        concurrency=figures_of(timings) if timings else None,
    )


def _over_prompts(samples: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """Medians and the errors of the means."""
    no_estimate = estimates.Estimate(0.0)
    speed, speedup = estimates.speed(samples) or no_estimate, estimates.speedup(samples, base) or no_estimate
    return {"tokens_per_second_se": speed.error, "tokens_per_second_median": speed.median,
            "speedup_se": speedup.error, "speedup_median": speedup.median}


def _apart(samples: Sequence[Sample], decoded: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of texts that repeat themselves and of the others."""
    if any(s.repeating is None for s in samples):
        return {}
    return {"repeating": sum(bool(s.repeating) for s in samples),
            "tokens_per_second_repeating": _mean_of(s.tokens_per_second for s in decoded if s.repeating),
            "tokens_per_second_other": _mean_of(s.tokens_per_second for s in decoded if not s.repeating)}


def _mean_of(values: Iterable[float | None]) -> float | None:
    """Average the values that are not None."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _mean(parts: Sequence[ReportRow], samples: Sequence[Sample], base: Sequence[Sample]) -> ReportRow:
    """Average rows of several tasks; ``samples``: of ``parts``; ``base``: Chunk-PP's on the same tasks."""
    averaged = ("tokens_per_second", "alt", "alr", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p95_s")
    summed = ("turns", "rounds", "tokens", "near_ties", "answers", "short", "different_answers")
    figures: dict[str, Any] = {name: _mean_of(getattr(row, name) for row in parts) for name in averaged}
    figures |= {name: sum(getattr(row, name) for row in parts) for name in summed}
    figures |= {name: _sum(getattr(row, name) for row in parts)
                for name in ("energy_j", "energy_above_idle_j")}
    for name in ("joules_per_token", "joules_per_token_above_idle"):
        total = _sum(getattr(row, name) for row in parts)
        figures[name] = None if total is None else total / len(parts)
    for name in ("tokens_per_second_repeating", "tokens_per_second_other"):
        figures[name] = _mean_of(getattr(row, name) for row in parts)
    figures["different_tokens"] = _whole_sum(row.different_tokens for row in parts)
    average = estimates.average([None if row.tokens_per_second is None else estimates.Estimate(
        row.tokens_per_second, row.tokens_per_second_se) for row in parts])
    figures |= _over_prompts(samples, base) | {"tokens_per_second_se": average.error if average else None,
                                               "speedup_se": None}  # a ratio of means over tasks
    loops = [row.repeating for row in parts if row.repeating is not None]
    figures["repeating"] = sum(loops) if len(loops) == len(parts) else None
    shared = [row.concurrency for row in parts if row.concurrency]
    figures["concurrency"] = mean_figures(shared) if shared else None
    deviation = _deviation([_repeat_speed(samples, r) for r in _repeats(samples)])
    return replace(parts[0], task=MEAN, tokens_per_second_sd=deviation,
                   identical=all(row.identical for row in parts), **figures)


def _sum(measured: Iterable[float | None]) -> float | None:
    """Add the values; None if one is missing, because partial sums cannot be compared."""
    total = 0.0
    for value in measured:
        if value is None:
            return None
        total += value
    return total


def _estimate(value: float | None, error: float | None, median: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, error, median)


def _over(total: float | None, count: int) -> float | None:
    return None if total is None or not count else total / count


def _whole_sum(counts: Iterable[int | None]) -> int | None:
    total = _sum(counts)
    return None if total is None else int(total)


def _with_speedup(rows: Sequence[ReportRow]) -> list[ReportRow]:
    base = {(row.task, row.temperature): row for row in rows if row.strategy == BASELINE}

    def ratio(row: ReportRow, name: str) -> float | None:
        fast, slow = getattr(row, name), getattr(base.get((row.task, row.temperature)), name, None)
        return fast / slow if fast is not None and slow else None

    return [replace(row, speedup=ratio(row, "tokens_per_second"),
                    speedup_other=ratio(row, "tokens_per_second_other")) for row in rows]


def _axes(cells: Iterable[Cell]) -> tuple[list[str], list[str], list[float]]:
    strategies, tasks, temperatures = zip(*cells, strict=True)
    return list(dict.fromkeys(strategies)), list(dict.fromkeys(tasks)), list(dict.fromkeys(temperatures))


def _repeats(samples: Iterable[Sample]) -> list[int]:
    return sorted({sample.repeat for sample in samples})


def _repeat_speed(samples: Iterable[Sample], repeat: int) -> float | None:
    """Return the mean over tasks of the mean over prompts."""
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.repeat == repeat:
            tasks.setdefault(sample.task, []).append(sample)
    return _mean_of(_mean_of(s.tokens_per_second for s in task_samples if not is_short(s))
                    for task_samples in tasks.values())


def _deviation(speeds: Iterable[float | None]) -> float | None:
    present = [speed for speed in speeds if speed is not None]
    return stdev(present) if len(present) > 1 else None
