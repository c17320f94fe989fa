"""Means, medians and ratios over prompts with their standard errors.

A figure of no prompt at all does not exist: it is None, never 0.  So an answer of at most one token, which
prefill yields, has no speed and is in none of these figures (``samples.is_short``); tables count it apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median

from flowspec_edge.lab.bench.samples import Sample, is_short

SPEEDUP = "×chunk_pp: the speedup over chunk_pp, the ratio of their tokens/s"
METHOD = ("±: standard error over the prompts (repeats of a prompt are averaged first; a ratio's by "
          "linearisation)")
MEDIAN = ("median: over the prompts, that of ×chunk_pp over the prompts' own ratios; a few answers that are "
          "drafted almost without a miss do not carry it")

PromptKey = tuple[str, int]  # a task and the number of a prompt in it


@dataclass(frozen=True)
class Estimate:
    """A figure over prompts, with its uncertainty.

    error   the standard error; None for a single prompt
    median  of the prompts, for a ratio of their own ratios; None for a single prompt, and for a figure that has
            no median
    """

    value: float
    error: float | None = None
    median: float | None = None

    def text(self, digits: int = 2) -> str:
        """Write the mean ± standard error (median)."""
        spread = "" if self.error is None else f" ± {self.error:.{digits}f}"
        middle = "" if self.median is None else f" ({self.median:.{digits}f})"
        return f"{self.value:.{digits}f}{spread}{middle}"


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate | None:
    """Σ over / Σ under of pairs, one a prompt, as in Cochran's ratio estimator; None if Σ under is 0."""
    total, n = sum(under), len(over)
    if not total:
        return None
    value = sum(over) / total
    if n < 2:
        return Estimate(value)
    squares = sum((a - value * b) ** 2 for a, b in zip(over, under, strict=True))
    return Estimate(value, sqrt(n / (n - 1) * squares) / abs(total))


def mean(values: Sequence[float]) -> Estimate | None:
    return ratio(values, [1.0] * len(values))


def average(parts: Sequence[Estimate | None]) -> Estimate | None:
    """Return the mean of independent estimates, such as those of several tasks.

    A task without an estimate does not count.
    """
    estimates = [part for part in parts if part is not None]
    if not estimates:
        return None
    errors = [part.error for part in estimates if part.error is not None]
    error = sqrt(sum(error ** 2 for error in errors)) / len(estimates) if len(errors) == len(estimates) else None
    return Estimate(fmean(part.value for part in estimates), error)


def by_prompt(samples: Iterable[Sample], figure: Callable[[Sample], float]) -> dict[PromptKey, float]:
    """Average each prompt over its repeats."""
    values_by_prompt: dict[PromptKey, list[float]] = {}
    for sample in samples:
        values_by_prompt.setdefault((sample.task, sample.prompt), []).append(figure(sample))
    return {key: fmean(values) for key, values in values_by_prompt.items()}


def speeds(samples: Iterable[Sample]) -> dict[PromptKey, float]:
    """Tokens/s of each prompt whose answers have some."""
    return by_prompt((s for s in samples if not is_short(s)), lambda s: s.tokens_per_second or 0.0)


def speed(samples: Sequence[Sample]) -> Estimate | None:
    """Return the mean tokens/s."""
    values = list(speeds(samples).values())
    return _with_median(mean(values), values)


def speedup(samples: Sequence[Sample], base: Sequence[Sample]) -> Estimate | None:
    """Return the ratio of the means, on the same prompts; without an error to itself."""
    rates, base_rates = speeds(samples), speeds(base)
    if rates and base_rates and samples[0].cell == base[0].cell:
        return Estimate(1.0)
    return paired_ratio([(rates[key], base_rates[key]) for key in rates if key in base_rates])


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the ratio of the means of pairs, one a prompt, and the median of their own ratios."""
    return _with_median(ratio([a for a, _ in pairs], [b for _, b in pairs]), [a / b for a, b in pairs if b])


def _with_median(estimate: Estimate | None, values: Sequence[float]) -> Estimate | None:
    return replace(estimate, median=median(values)) if estimate and len(values) > 1 else estimate


def per_turn(samples: Sequence[Sample]) -> Estimate | None:
    return _rate(samples, lambda s: s.turns)


def per_round(samples: Sequence[Sample]) -> Estimate | None:
    return _rate(samples, lambda s: s.rounds)


def _rate(samples: Sequence[Sample], unit: Callable[[Sample], float]) -> Estimate | None:
    decoded = [sample for sample in samples if not is_short(sample)]
    return ratio(list(by_prompt(decoded, lambda s: s.tokens - 1).values()),
                 list(by_prompt(decoded, unit).values()))
