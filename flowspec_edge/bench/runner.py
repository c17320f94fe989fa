"""Methods × prompts on one cluster, checked token by token against plain decoding.

Knows how single results become a row of the table.  Does not know what kind of cluster it
measures, nor how a table is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flowspec_edge.runtime.request import Cluster, Request, Result

BASELINE = "chunk_pp"

Plain = Callable[[Request], tuple[list[int], str]]  # plain decoding: tokens and finish reason
Advance = Callable[[str], None]  # called before each piece of work with what it is


@dataclass(frozen=True)
class Row:
    """One strategy over all prompts.

    tokens_per_second is the mean over prompts; speedup the ratio to chunk_pp's, None without it;
    alt and alr are sums divided by sums: tokens after the first (it comes with the prompt) over
    turns, and over rounds; tokens counts every generated token.
    """

    strategy: str
    tokens_per_second: float
    speedup: float | None
    alt: float
    alr: float
    turns: float
    rounds: int
    tokens: int
    identical: bool


@dataclass(frozen=True)
class Difference:
    """The first place where a strategy's text left plain decoding's; None is the end of a text."""

    strategy: str
    prompt: int
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return (f"{self.strategy}, prompt {self.prompt}: token {self.position} is {_token(self.got)}, "
                f"plain decoding gives {_token(self.expected)}")


@dataclass(frozen=True)
class Report:
    """What a run showed; ``settings`` is everything that the figures depend on."""

    profile: str | None
    clock: str
    rows: list[Row]
    differences: list[Difference] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The ``bench run --json`` object."""
        return {"profile": self.profile, "clock": self.clock, "rows": [asdict(row) for row in self.rows],
                "differences": [asdict(d) for d in self.differences], "settings": self.settings}


def run(cluster: Cluster, plain: Plain, requests: Sequence[Request], strategies: Sequence[str],
        advance: Advance = lambda _: None) -> tuple[list[Row], list[Difference]]:
    """Every strategy on every request; a request's own ``strategy`` is ignored.

    ``advance`` is called ``len(requests) * (1 + len(strategies))`` times.
    """
    expected = []
    for request in requests:
        advance("plain decoding")
        expected.append(plain(request))
    results: dict[str, list[Result]] = {}
    differences: list[Difference] = []
    for strategy in strategies:
        results[strategy] = []
        for index, request in enumerate(requests):
            advance(strategy)
            result = cluster.generate(replace(request, strategy=strategy))
            results[strategy].append(result)
            difference = _compare(strategy, index, expected[index], result)
            if difference:
                differences.append(difference)
    wrong = {d.strategy for d in differences}
    rows = [_row(name, done, name not in wrong) for name, done in results.items()]
    base = next((row.tokens_per_second for row in rows if row.strategy == BASELINE), 0.0)
    if base > 0:
        rows = [replace(row, speedup=row.tokens_per_second / base) for row in rows]
    return rows, differences


def _row(strategy: str, results: list[Result], identical: bool) -> Row:
    stats = [result.stats for result in results]
    turns, rounds = sum(s.turns for s in stats), sum(s.rounds for s in stats)
    after_first = sum(max(0, len(result.tokens) - 1) for result in results)
    return Row(
        strategy=strategy,
        tokens_per_second=sum(s.tokens_per_second for s in stats) / len(stats),
        speedup=None,
        alt=after_first / turns if turns else 0.0,
        alr=after_first / rounds if rounds else 0.0,
        turns=turns, rounds=rounds,
        tokens=sum(len(result.tokens) for result in results),
        identical=identical,
    )


def _compare(strategy: str, prompt: int, expected: tuple[list[int], str],
             result: Result) -> Difference | None:
    tokens, reason = expected
    if result.tokens == tokens and result.finish_reason == reason:
        return None
    got = result.tokens
    unequal = (i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b)
    at = next(unequal, min(len(tokens), len(got)))
    return Difference(strategy, prompt, at, tokens[at] if at < len(tokens) else None,
                      got[at] if at < len(got) else None)


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
