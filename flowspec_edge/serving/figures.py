"""Figures of the requests: pace, ALT, ALR, how deep drafts are right, how long a first token takes.

Knows how each is counted (docs/turns-and-rounds.md).  Does not know who is shown them.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.request import Result

_ROUNDS = 200  # the newest, that acceptance per depth is of
DEPTHS = 12  # that are told


@dataclass(eq=False)
class _Progress:
    """A request that is being answered; moments in seconds of time.monotonic()."""

    begun_at: float
    had: int  # tokens that an earlier life of it had
    first_at: float | None = None  # when the first token was seen
    rounds: int = 0  # ended
    round_began: int = 0  # tokens when the round began
    accepted: int = 0  # draft tokens in the rounds that ended


class Figures:
    """Of the oldest request that runs; while none does, of the one that ran last.

    Requests of one token, the server's own probes among them, have none and are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Progress] = {}
        self._rounds: deque[int] = deque(maxlen=_ROUNDS)  # draft tokens accepted in each
        self._slot_s = 0.0
        self._shown: dict[str, float] = {}
        self._total = {"requests": 0, "tokens": 0, "drafted": 0, "accepted": 0}
        self.ends = 0  # requests that ended, of whatever length

    def begun(self, coordinator: Coordinator, at: float) -> None:
        """A request begins, or goes on in another session."""
        with self._lock:
            self._running[coordinator.ledger.session] = _Progress(at, len(coordinator.tokens))

    def moved(self, coordinator: Coordinator, at: float) -> None:
        """Something of it came back and was verified."""
        with self._lock:
            session = coordinator.ledger.session
            progress = self._running.get(session)
            tokens, rounds = len(coordinator.tokens), coordinator.strategy.counters.rounds
            if progress is None or tokens == progress.had:
                return
            if progress.first_at is None:
                progress.first_at, progress.round_began = at, tokens
                if not progress.had and not coordinator.finished and self._is_shown(session):
                    self._shown = {"ttft_s": at - progress.begun_at}
            elif rounds > progress.rounds and not coordinator.finished:
                accepted = tokens - progress.round_began - 1  # what missed was not drafted
                self._rounds.append(accepted)
                progress.accepted += accepted
                progress.rounds, progress.round_began = rounds, tokens
            seconds = at - progress.first_at
            generated = tokens - progress.had - 1
            if generated > 0 and seconds > 0 and self._is_shown(session):
                self._shown["tokens_per_second"] = generated / seconds
                self._shown["alr"] = generated / (rounds + 1)
                if self._slot_s:
                    self._shown["alt"] = generated * self._slot_s / seconds

    def ended(self, coordinator: Coordinator, result: Result) -> None:
        """It is answered; from here its own figures count."""
        with self._lock:
            shown = self._is_shown(coordinator.ledger.session)
            progress = self._running.pop(coordinator.ledger.session, None)
            self.ends += 1
            stats = result.stats
            self._slot_s = stats.slot_s
            if len(result.tokens) < 2:
                return
            if progress is not None and not progress.had:
                self._rounds.append(stats.accepted - progress.accepted)  # the end of the text ends a round
            if shown:
                self._shown = {"tokens_per_second": stats.tokens_per_second, "alt": stats.alt,
                                "alr": stats.alr, "ttft_s": stats.ttft_s}
            self._total["requests"] += 1
            self._total["tokens"] += len(result.tokens)
            self._total["drafted"] += stats.drafted
            self._total["accepted"] += stats.accepted

    def failed(self, coordinator: Coordinator) -> None:
        """It gets no answer, and there are no figures of it."""
        with self._lock:
            self._running.pop(coordinator.ledger.session, None)

    def _is_shown(self, session: int) -> bool:
        """Whether no older one runs."""
        return session == next(iter(self._running), session)

    def lost(self) -> None:
        """What ran has no stages any more."""
        with self._lock:
            self._running.clear()

    def event(self, waiting: int) -> dict[str, Any]:
        """See docs/serving.md; a figure that nothing is known of is None."""
        with self._lock:
            rounds = len(self._rounds)
            depths = [sum(n >= depth for n in self._rounds) / rounds for depth in range(1, DEPTHS + 1)] \
                if rounds else []
            newest = {name: self._shown.get(name) for name in ("tokens_per_second", "alt", "alr", "ttft_s")}
            return {**newest, "acceptance": depths, "rounds": rounds, "running": len(self._running),
                    "waiting": waiting, "total": dict(self._total)}
