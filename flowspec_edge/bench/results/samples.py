"""Benchmark samples, one a request: all that a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec_edge.bench.results.concurrency import ConcurrentTiming

Cell = tuple[str, str, float]  # (strategy, task, temperature), measured together


@dataclass(frozen=True)
class Sample:
    """One request; times in seconds.

    repeat     what was added to the seed
    bytes      all that was sent
    draft     what it drafted with (``Stats.draft``); "" in files from before this field
    near_ties  whether the text counts as identical in 16 bits although near ties were decided differently
    repeating  whether the text repeats itself (``run.repetition``); None in files from before this field
    energy_j, energy_above_idle_j  as in a request's ``Stats``
    concurrent  None if the request ran alone
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
    energy_j: float | None = None
    energy_above_idle_j: float | None = None
    repeating: bool | None = None
    concurrent: ConcurrentTiming | None = None
    draft: str = ""

    @property
    def cell(self) -> Cell:
        return self.strategy, self.task, self.temperature
