"""Figures for the page, of requests and of boards.

Requests' are defined in docs/explained/method.md. Boards' are taken from heartbeats and the growth of their counters.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from flowspec_edge.d0.counters import HeartbeatCounters, increase
from flowspec_edge.d0.energy import once_per_board
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.run_events import (
    DraftDeviceWork,
    HeartbeatArrived,
    RunEvent,
    SegmentSent,
    SessionEnded,
    SessionOpened,
    StagesBack,
    StagesLost,
    StagesMissing,
)
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.serving.admission import WaitingRequest
from flowspec_edge.strategies.tree_strategy import TreeStrategy

_ROUNDS = 200  # newest rounds, for the acceptance per depth
DEPTHS = 12  # depths that are shown
_GAPS = 1000  # newest gaps between a request's tokens, for the percentiles
_SHARE_S = 5.0  # a request's share of the rows is taken over this time
_SEGMENTS = 2048  # segments of that time, at most
_MOST_WAITING = 20  # waiting requests that are listed


@dataclass(eq=False)
class _Progress:
    """A running request.

    Times are seconds of time.monotonic(); ``number`` counts requests from 1, without the server's probes.
    """

    number: int
    strategy: str
    drafts: bool  # whether it guesses at all
    tree: bool  # whether it guesses in a tree, which the page shows
    priority: int
    begun_at: float
    tokens_before: int  # this session
    tokens: int
    first_at: float | None = None  # when the first token of this session came
    newest_at: float = 0.0
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))  # between tokens, seconds
    accepted: int = 0  # draft tokens in the rounds that ended

    def add_tokens(self, tokens: int, at: float) -> None:
        """Note that the answer has ``tokens`` tokens now."""
        self.gaps.extend(([at - self.newest_at] if self.first_at is not None else [])
                         + [0.0] * (tokens - self.tokens - 1))
        self.tokens, self.newest_at = tokens, at

    def tokens_per_second(self, now: float) -> float | None:
        """Tokens per second after the first token, as in ``Stats``; None before the second token.

        The figure falls while no token comes.
        """
        generated = self.tokens - self.tokens_before - 1
        if self.first_at is None or generated < 1 or now <= self.first_at:
            return None
        return generated / (now - self.first_at)

    def event(self, now: float, session: int, share: float | None) -> dict[str, Any]:
        at = np.percentile(list(self.gaps), (50, 95, 99)).tolist() if self.gaps else [None] * 3
        ttft = None  # also of an answer that began before a loss, in another session
        if self.first_at is not None and not self.tokens_before:
            ttft = self.first_at - self.begun_at
        return {"number": self.number, "session": session, "strategy": self.strategy, "tree": self.tree,
                "priority": self.priority, "tokens": self.tokens,
                "tokens_per_second": self.tokens_per_second(now), "ttft_s": ttft,
                "itl_p50_s": at[0], "itl_p95_s": at[1], "itl_p99_s": at[2], "share": share}


def with_tree(draft_session: DraftSession) -> TreeStrategy | None:
    """Return a request's strategy if the page shows its draft tree.

    None if it has no tree, and for a probe of one token, after which the page goes on showing the last answer.
    """
    strategy = draft_session.strategy
    if not isinstance(strategy, TreeStrategy) or draft_session.request.max_new_tokens < 2:
        return None
    return strategy


class RequestStats(Observer):
    """Statistics of each running request, and more of the oldest one, or else of the last.

    Requests of one token, such as the server's own probes, are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Progress] = {}
        self._rounds: dict[str, deque[int]] = {}  # strategy -> draft tokens accepted in each round
        self._guessing: str | None = None  # the strategy whose rounds are shown
        self._slot_s = 0.0
        self._shown_figures: dict[str, float | None] = {}
        self._joules: float | None = None  # per token of the newest answer
        self._total = {"requests": 0, "tokens": 0, "drafted": 0, "accepted": 0}
        self._sent_segments: deque[tuple[float, int, int]] = deque(maxlen=_SEGMENTS)  # when, session, rows
        self._last_number = 0  # requests
        self.changes = 0  # beginnings and ends of requests

    def observe(self, event: RunEvent) -> None:
        with self._lock:
            match event:
                case SessionOpened():
                    self._opened(event)
                case SegmentSent():
                    self._sent_segments.append((event.at, event.session, len(event.numbers)))
                case DraftDeviceWork(kind="verify"):
                    self._verified(event)
                case SessionEnded():
                    self._ended(event)
                case StagesLost():  # and with it every open session
                    self._running.clear()

    def _opened(self, event: SessionOpened) -> None:
        request, draft_session = event.request, event.draft_session()
        assert draft_session is not None  # it has just been opened
        number = 0  # of a probe
        if request.max_new_tokens > 1:
            self._last_number += 1
            self.changes += 1
            number = self._last_number
        self._running[event.session] = _Progress(
            number, request.strategy, draft_session.drafter is not None, with_tree(draft_session) is not None,
            request.priority, event.at, event.answer_tokens, event.answer_tokens)

    def _verified(self, event: DraftDeviceWork) -> None:
        session, tokens, at = event.session, event.answer_tokens, event.at
        progress = self._running.get(session)
        if progress is None or tokens == progress.tokens_before:
            return
        if tokens > progress.tokens:
            progress.add_tokens(tokens, at)
        if progress.first_at is None:
            progress.first_at = at
            if not progress.tokens_before and not event.finished and self._is_shown(session):
                self._shown_figures = {"ttft_s": at - progress.begun_at}
        elif event.accepted is not None:
            self._add_round(progress, event.accepted, self._is_shown(session))
            progress.accepted += event.accepted
        seconds = at - progress.first_at
        generated = tokens - progress.tokens_before - 1
        if generated > 0 and seconds > 0 and self._is_shown(session):
            self._shown_figures["tokens_per_second"] = generated / seconds
            self._shown_figures["alr"] = generated / (event.rounds + 1)
            if self._slot_s:
                self._shown_figures["alt"] = generated * self._slot_s / seconds

    def _ended(self, event: SessionEnded) -> None:
        is_shown, result = self._is_shown(event.session), event.result
        progress = self._running.pop(event.session, None)
        self.changes += 1
        if result is None:
            return
        stats = result.stats
        self._slot_s = stats.slot_s
        if len(result.tokens) < 2:
            return
        if progress is not None and not progress.tokens_before:
            # The end of the text ends a round.
            self._add_round(progress, stats.accepted - progress.accepted, is_shown)
        if is_shown:
            self._shown_figures = {"tokens_per_second": stats.tokens_per_second, "alt": stats.alt,
                                   "alr": stats.alr, "ttft_s": stats.ttft_s}
        self._joules = None if stats.energy_j is None else stats.energy_j / len(result.tokens)
        self._total["requests"] += 1
        self._total["tokens"] += len(result.tokens)
        self._total["drafted"] += stats.drafted
        self._total["accepted"] += stats.accepted

    def _add_round(self, progress: _Progress, accepted: int, is_shown: bool) -> None:
        """Add a round that ended to those of its strategy, because strategies differ in how often guesses are right.

        ``is_shown``: whether the figures shown are this request's.
        """
        if progress.drafts:
            self._rounds.setdefault(progress.strategy, deque(maxlen=_ROUNDS)).append(accepted)
            if is_shown:
                self._guessing = progress.strategy

    def fairness(self) -> float | None:
        """Return tokens/s of the slowest running request over those of the fastest; None unless two have some."""
        with self._lock:
            return _fairness(self._speeds(time.monotonic()))

    def event(self, waiting: Sequence[WaitingRequest], now: float) -> dict[str, Any]:
        """Return the event of docs/reference/metrics.md; unknown figures are None.

        ``now`` is a time of time.monotonic().
        """
        with self._lock:
            newest_rounds = self._rounds.get(self._guessing or "", ())
            rounds = len(newest_rounds)
            depths = [sum(n >= depth for n in newest_rounds) / rounds for depth in range(1, DEPTHS + 1)] \
                if rounds else []
            newest = {name: self._shown_figures.get(name) for name in ("tokens_per_second", "alt", "alr", "ttft_s")}
            speeds = self._speeds(now)
            return {**newest, "joules_per_token": self._joules, "acceptance": depths, "rounds": rounds,
                    "rounds_of": self._guessing,
                    "running": len(self._running), "waiting": len(waiting), "total": dict(self._total),
                    "requests": self._requests(now),
                    "queue": [asdict(request) for request in waiting[:_MOST_WAITING]],
                    "together": {"tokens_per_second": sum(speeds) if speeds else None,
                                 "fairness": _fairness(speeds)}}

    def _speeds(self, now: float) -> list[float]:
        return [speed for progress in self._running.values() if (speed := progress.tokens_per_second(now))]

    def _requests(self, now: float) -> list[dict[str, Any]]:
        """Return the running requests, the oldest first."""
        while self._sent_segments and self._sent_segments[0][0] < now - _SHARE_S:
            self._sent_segments.popleft()
        rows = dict.fromkeys(self._running, 0)
        for _, session, count in self._sent_segments:
            if session in rows:
                rows[session] += count
        total = sum(rows.values())
        return [progress.event(now, session, rows[session] / total if total else None)
                for session, progress in self._running.items() if progress.number]

    def _is_shown(self, session: int) -> bool:
        """Return whether no older request runs."""
        return session == next(iter(self._running), session)


def _fairness(speeds: Sequence[float]) -> float | None:
    return min(speeds) / max(speeds) if len(speeds) > 1 else None


_WINDOW_S = 1.0  # over which rates are averaged, approximately
_SILENT_S = 3.0  # after which a board's rates are shown as 0
_NEWEST = 8  # heartbeats

SYSTEM_STATS = ("memory_total", "memory_available", "resident", "cache_bytes", "temperature_c", "load",
                "cpus", "watts")
RATES = {"busy": "compute_s", "bytes_in_s": "bytes_in", "bytes_out_s": "bytes_out", "rows_s": "rows"}


@dataclass
class Losses:
    """How often a place was lost.

    since   when it was lost, in seconds of time.monotonic(); None: it is not lost
    away_s  seconds that its last loss took
    """

    count: int = 0
    since: float | None = None
    away_s: float | None = None

    def event(self) -> dict[str, Any]:
        return {"lost": self.since is not None, "losses": self.count, "away_s": self.away_s}


class Boards(Observer):
    """The newest heartbeats and the losses of each place; place 0 is D0, place i is Vi."""

    def __init__(self) -> None:
        self._losses: dict[int, Losses] = {}
        self._beats: dict[int, deque[tuple[float, HeartbeatCounters]]] = {}
        self._lock = threading.Lock()
        self._computed_s, self._rows = 0.0, 0  # D0's own
        self._computed_until = 0.0

    def observe(self, event: RunEvent) -> None:
        match event:
            case HeartbeatArrived():
                self._add_heartbeat(event.beat.stage, event.beat.counters, event.at)
            case StagesMissing():
                self._note_missing(event.stages, event.at)
            case StagesBack():
                self._note_missing((), event.at)
            case SegmentSent():
                self._rows += len(event.numbers)
            case DraftDeviceWork():  # requests whose work is done together have the same time
                self._computed_s += event.at - max(event.start, self._computed_until)
                self._computed_until = event.at

    def _add_heartbeat(self, rank: int, counters: HeartbeatCounters, at: float) -> None:
        with self._lock:
            self._beats.setdefault(rank, deque(maxlen=_NEWEST)).append((at, counters))

    def _note_missing(self, ranks: Collection[int], at: float) -> None:
        """Note that these places are lost now, and no others."""
        with self._lock:
            for rank in ranks:
                losses = self._losses.setdefault(rank, Losses())
                if losses.since is None:
                    losses.count, losses.since = losses.count + 1, at
            for rank, losses in self._losses.items():
                if losses.since is not None and rank not in ranks:
                    losses.away_s, losses.since = at - losses.since, None

    def losses(self, rank: int) -> dict[str, Any]:
        """Return whether a place is ``lost`` now, its ``losses`` since the start, and ``away_s``.

        ``away_s`` is the seconds that the last loss took, or None.
        """
        with self._lock:
            return self._losses.get(rank, Losses()).event()

    def sample(self, system_stats: HeartbeatCounters, at: float) -> None:
        """Record D0's own state, because D0 sends no heartbeats."""
        self._add_heartbeat(0, {**system_stats, "compute_s": self._computed_s, "rows": self._rows}, at)

    def event(self, now: float) -> dict[str, Any]:
        """Return each place's system stats, None where unknown, and its rates per second.

        D0's links are measured at their other ends: what V1 receives and what VN sends.

        host  the first place on the same machine
        """
        with self._lock:
            beats = {rank: list(newest) for rank, newest in self._beats.items()}
        boards = {rank: _board(rank, newest, now) for rank, newest in sorted(beats.items())}
        distinct_counters = once_per_board({rank: beats[rank][-1][1] for rank in boards})
        hosts: dict[float, int] = {}
        for rank, board in boards.items():
            board["watts"] = distinct_counters[rank].get("watts")
            machine = beats[rank][-1][1].get("machine")
            board["host"] = rank if machine is None else hosts.setdefault(machine, rank)
        if 0 in boards and len(boards) > 1:
            boards[0]["bytes_out_s"] = boards[min(set(boards) - {0})]["bytes_in_s"]
            boards[0]["bytes_in_s"] = boards[max(boards)]["bytes_out_s"]
        return {"at": now, "boards": list(boards.values())}


def _board(rank: int, beats: list[tuple[float, HeartbeatCounters]], now: float) -> dict[str, Any]:
    at, newest = beats[-1]
    first = next((i for i in reversed(range(len(beats))) if at - beats[i][0] >= 0.9 * _WINDOW_S), 0)
    totals, seconds = dict.fromkeys(RATES.values(), 0.0), at - beats[first][0]
    for (_, before), (_, after) in pairwise(beats[first:]):
        for key, amount in increase(before, after, totals).items():
            totals[key] += amount
    current = seconds > 0 and now - at < _SILENT_S
    board: dict[str, Any] = {"place": rank}
    board |= {name: newest.get(name) for name in SYSTEM_STATS}
    board |= {name: totals[key] / seconds if current else 0.0 for name, key in RATES.items()}
    board["busy"] = min(1.0, board["busy"])  # a long segment is counted when it ends
    return board
