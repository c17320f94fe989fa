"""Request statistics for the page; docs/turns-and-rounds.md defines them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from flowspec_edge.runtime.draft_device.coordinator import Coordinator
from flowspec_edge.runtime.observe.timeline import AcceptanceTracker
from flowspec_edge.runtime.request import Result

_ROUNDS = 200  # newest ones, for the acceptance per depth
DEPTHS = 12  # that are shown


@dataclass(eq=False)
class _Progress:
    """Times are seconds of time.monotonic()."""

    begun_at: float
    tokens_before: int  # this session
    first_at: float | None = None  # when the first token of this session came
    accepted: int = 0  # draft tokens in the rounds that ended


class RequestStats:
    """Statistics of the oldest running request, or else of the last one. Requests of one token, such as the
    server's own probes, are not counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Progress] = {}
        self._acceptance = AcceptanceTracker()
        self._rounds: deque[int] = deque(maxlen=_ROUNDS)  # draft tokens accepted in each
        self._slot_s = 0.0
        self._shown: dict[str, float] = {}
        self._joules: float | None = None  # per token of the newest answer
        self._total = {"requests": 0, "tokens": 0, "drafted": 0, "accepted": 0}
        self.ends = 0  # requests that ended, of any length

    def opened(self, coordinator: Coordinator, at: float) -> None:
        """A request begins, or continues in another session."""
        with self._lock:
            self._running[coordinator.builder.session] = _Progress(at, len(coordinator.tokens))
            self._acceptance.begin(coordinator)

    def verified(self, coordinator: Coordinator, at: float) -> None:
        with self._lock:
            session, tokens = coordinator.builder.session, len(coordinator.tokens)
            progress = self._running.get(session)
            accepted = self._acceptance.verified(coordinator)
            if progress is None or tokens == progress.tokens_before:
                return
            if progress.first_at is None:
                progress.first_at = at
                if not progress.tokens_before and not coordinator.finished and self._is_shown(session):
                    self._shown = {"ttft_s": at - progress.begun_at}
            elif accepted is not None:
                self._rounds.append(accepted)
                progress.accepted += accepted
            seconds = at - progress.first_at
            generated = tokens - progress.tokens_before - 1
            if generated > 0 and seconds > 0 and self._is_shown(session):
                self._shown["tokens_per_second"] = generated / seconds
                self._shown["alr"] = generated / (coordinator.strategy.counters.rounds + 1)
                if self._slot_s:
                    self._shown["alt"] = generated * self._slot_s / seconds

    def settled(self, coordinator: Coordinator, result: Result) -> None:
        with self._lock:
            shown = self._is_shown(coordinator.builder.session)
            progress = self._end(coordinator)
            self.ends += 1
            stats = result.stats
            self._slot_s = stats.slot_s
            if len(result.tokens) < 2:
                return
            if progress is not None and not progress.tokens_before:
                self._rounds.append(stats.accepted - progress.accepted)  # the end of the text ends a round
            if shown:
                self._shown = {"tokens_per_second": stats.tokens_per_second, "alt": stats.alt,
                               "alr": stats.alr, "ttft_s": stats.ttft_s}
            self._joules = None if stats.energy_j is None else stats.energy_j / len(result.tokens)
            self._total["requests"] += 1
            self._total["tokens"] += len(result.tokens)
            self._total["drafted"] += stats.drafted
            self._total["accepted"] += stats.accepted

    def failed(self, coordinator: Coordinator) -> None:
        with self._lock:
            self._end(coordinator)

    def lost(self) -> None:
        """A stage was lost, and with it every open session."""
        with self._lock:
            self._running.clear()
            self._acceptance.clear()

    def event(self, waiting: int) -> dict[str, Any]:
        """Return the event of docs/serving.md; unknown figures are None."""
        with self._lock:
            rounds = len(self._rounds)
            depths = [sum(n >= depth for n in self._rounds) / rounds for depth in range(1, DEPTHS + 1)] \
                if rounds else []
            newest = {name: self._shown.get(name) for name in ("tokens_per_second", "alt", "alr", "ttft_s")}
            return {**newest, "joules_per_token": self._joules, "acceptance": depths, "rounds": rounds,
                    "running": len(self._running), "waiting": waiting, "total": dict(self._total)}

    def _end(self, coordinator: Coordinator) -> _Progress | None:
        self._acceptance.end(coordinator.builder.session)
        return self._running.pop(coordinator.builder.session, None)

    def _is_shown(self, session: int) -> bool:
        """Return whether no older request runs."""
        return session == next(iter(self._running), session)
