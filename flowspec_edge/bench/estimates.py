"""Means and ratios over prompts with their standard errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from flowspec_edge.bench.samples import Sample

METHOD = ("±: standard error over the prompts (repeats of a prompt are averaged first; a ratio's by "
          "linearisation)")


@dataclass(frozen=True)
class Estimate:
    """``error``: the standard error; None for a single prompt."""

    value: float
    error: float | None = None

    def text(self, digits: int = 2) -> str:
        spread = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{spread}"


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Σ over / Σ under of pairs, one a prompt, as in Cochran's ratio estimator."""
    total, n = sum(under), len(over)
    if not total:
        return Estimate(0.0)
    value = sum(over) / total
    if n < 2:
        return Estimate(value)
    squares = sum((a - value * b) ** 2 for a, b in zip(over, under, strict=True))
    return Estimate(value, sqrt(n / (n - 1) * squares) / abs(total))


def mean(values: Sequence[float]) -> Estimate:
    return ratio(values, [1.0] * len(values))


def average(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, such as those of tasks."""
    errors = [part.error for part in parts if part.error is not None]
    whole = sqrt(sum(error ** 2 for error in errors)) / len(parts) if len(errors) == len(parts) else None
    return Estimate(fmean(part.value for part in parts), whole)


def by_prompt(samples: Iterable[Sample], figure: Callable[[Sample], float]) -> dict[int, float]:
    """A prompt's mean over its repeats."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.prompt, []).append(figure(sample))
    return {prompt: fmean(values) for prompt, values in found.items()}


def speed(samples: Sequence[Sample]) -> Estimate:
    """Mean tokens/s; answers of at most one token, which have none, are left out."""
    return mean(list(_speeds(samples).values()))


def speedup(samples: Sequence[Sample], base: Sequence[Sample]) -> Estimate:
    """The ratio of the means, on the same prompts; without an error to itself."""
    if samples and base and samples[0].cell == base[0].cell:
        return Estimate(1.0)
    ours, theirs = _speeds(samples), _speeds(base)
    both = [prompt for prompt in ours if prompt in theirs]
    return ratio([ours[prompt] for prompt in both], [theirs[prompt] for prompt in both])


def per_turn(samples: Sequence[Sample]) -> Estimate:
    return _rate(samples, lambda s: s.turns)


def per_round(samples: Sequence[Sample]) -> Estimate:
    return _rate(samples, lambda s: s.rounds)


def _rate(samples: Sequence[Sample], unit: Callable[[Sample], float]) -> Estimate:
    return ratio(list(by_prompt(samples, lambda s: max(0, s.tokens - 1)).values()),
                 list(by_prompt(samples, unit).values()))


def _speeds(samples: Sequence[Sample]) -> dict[int, float]:
    decoded = [sample for sample in samples if sample.tokens > 1]
    return by_prompt(decoded or samples[:1], lambda s: s.tokens_per_second)
