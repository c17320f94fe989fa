"""D0's loop in real time: requests that come and go, over the links to the stages.

Knows in which order D0 sends, computes and listens, and what a request's figures are made of.  Does
not know what the coordinators decide, nor how the stages were started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.messages import Cancel, Computed, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, session_rows
from flowspec_edge.runtime.emulation import Emulation, rest
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.prefixes import RowPool
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.sessions import Job, Sessions
from flowspec_edge.runtime.slot_curve import SlotCurve
from flowspec_edge.runtime.stage_links import StageLinks
from flowspec_edge.runtime.tickets import Ticket

log = logging.getLogger(__name__)

_LATE_SHARE = 0.02  # of the decode time, that all devices together may be late while emulating
_LAST_REPORT_S = 2.0  # how long the stages' final counters are waited for
_STALL_S = 120.0  # without any output while requests run and all stages answer

_MOST_LOSSES = 5  # in a row, without a new token: the stages may be lost because of the request

# For a ticket, a session's number, and the ticket's coordinator that lost its stages, if there was one.
Make = Callable[[Ticket, int, Coordinator | None], Coordinator]


@dataclass(eq=False)
class _Running:
    """A request that is being answered."""

    ticket: Ticket
    coordinator: Coordinator = field(init=False)
    watched: bool = False  # the observer wants the stages' times
    late_s: float = 0.0  # D0's own work took so much longer than it should
    until: float = 0.0  # how long the stages' last counters are waited for, once it is over
    losses: int = 0  # of stages, since it had ``had`` tokens
    had: int = 0

    @property
    def session(self) -> int:
        """Its number."""
        return self.coordinator.ledger.session


class RequestLoop:
    """Any number of requests over one set of links; one thread at a time."""

    def __init__(self, links: StageLinks, make: Make, emulation: Emulation | None,
                 observer: Observer, cache_rows: int | None = None, curve: SlotCurve | None = None) -> None:
        """cache_rows  that the stages may hold at a time; None: any number, and none are kept
        curve       learns from the stages' reports how long segments take; None: it is not needed
        """
        self.slot_s = 0.0  # of a segment in the slowest stage; 0: a request's own segments tell
        self.warming_up = False  # the curve learns from every request, whatever its strategy
        self.pool = RowPool(cache_rows)
        self._observer = observer
        self._curve = curve
        self._links = links
        self._make = make
        self._emulation = emulation
        self._sessions = Sessions(clock=time.monotonic)
        self._running: dict[int, _Running] = {}
        self._closing: dict[int, _Running] = {}
        self._aside: list[_Running] = []  # until the stages are back, the oldest first
        self._session = 0

    @property
    def busy(self) -> bool:
        """Whether any request is not settled."""
        return bool(self._running or self._closing or self._aside)

    @property
    def open(self) -> int:
        """How many requests have a place in the stages."""
        return len(self._running) + len(self._aside)

    def has_room(self, request: Request) -> bool:
        """Whether the stages' memory allows this one to start now."""
        return self.pool.fits(session_rows(request, len(self._links.members.instances)))

    def start(self, ticket: Ticket) -> None:
        """Take in a request; one that cannot be run is settled at once."""
        idle = not self.busy
        opening = self._open(_Running(ticket), None)
        if opening is None:
            return
        if idle:
            self._links.members.forget_closed()
            self._links.collect(self._receive)  # heartbeats since the last request
            self._links.expect_from_now()
        self._links.send(opening)

    def set_aside(self, reason: str) -> None:
        """The stages are lost: what is open is kept as it is, for :meth:`resume`; what is over is
        answered.  Those stages that can be told give all of it up.

        A request that loses its stages again and again ends with PeerLost and ``reason``.
        """
        sessions = [*self._closing, *self._running]
        begun = [*self._closing.values(), *self._running.values()]
        self._closing.clear()
        self._running.clear()
        for running in begun:
            if running.coordinator.finished:
                self._answer(running.session, running)
        # Those that are aside still, from a loss before, are younger than those that went on already.
        self._aside = [running for running in begun if not running.coordinator.finished] + self._aside
        # V1 has nothing of ours any more, and what the stages kept is gone; they may come back on
        # other devices.
        self._sessions = Sessions(clock=time.monotonic)
        self.pool.clear()
        if self._curve is not None:
            self._curve.clear()
        self._links.close_all(sessions)
        for running in self._aside:
            made = len(running.coordinator.tokens)
            running.losses = running.losses + 1 if made == running.had else 1
            running.had = made
        if self._aside and self._aside[0].losses > _MOST_LOSSES:  # the one whose segments go first
            running = self._aside.pop(0)
            self._fail(running, PeerLost(f"stages were lost {running.losses} times, and this request "
                                         f"got no new token meanwhile: {reason}"))
        self.answer_cancelled()

    def answer_cancelled(self) -> None:
        """Those that are set aside and that nobody waits for any more."""
        for running in [running for running in self._aside if running.ticket.cancelled]:
            self._aside.remove(running)
            running.coordinator.cancel()
            self._answer(running.session, running)

    def resume(self) -> None:
        """The stages are back, and hold nothing: what was set aside goes on, each in a new session.

        PeerLost if they are lost again.
        """
        self._links.close_all([self._session])
        self._links.begin_anew()
        while self._aside:
            running = self._aside.pop(0)
            opening = self._open(replace(running), running)
            if opening is not None:
                self._links.send(opening)

    def _open(self, running: _Running, before: _Running | None) -> Open | None:
        """Enter a request, that may have had a session ``before``; what the stages are to be told, or None
        if it cannot be run, and is settled.  From now on the loop answers for it, whatever happens."""
        self._session = max(self._session + 1, int(time.time() * 1e3))  # above those of a former D0
        session, ticket = self._session, running.ticket
        sent = self._links.bytes.pop(before.session) if before else 0
        try:
            running.coordinator = self._make(ticket, session, before.coordinator if before else None)
        except BaseException as error:
            ticket.settle(error)
            if not isinstance(error, Exception):
                raise
            return None
        self._links.bytes[session] = sent
        self._running[session] = running
        opening = self._sessions.add(running.coordinator)
        held = self.pool.begin(opening.session, opening.capacity, opening.after)
        self._observer.opened(running.coordinator, time.monotonic())
        running.watched = self._observer.wants_times
        learns = self._curve is not None and (self.warming_up or running.coordinator.strategy.learns_slot)
        return replace(opening, held=held, timed=running.watched or learns)

    def step(self, idle_s: float) -> None:
        """Send what may be sent, do the most urgent work, take what has come; if there is nothing of
        it, wait for at most ``idle_s`` seconds.

        PeerLost or ProtocolError if the stages cannot go on.
        """
        for session, running in list(self._running.items()):
            if running.ticket.cancelled:
                running.coordinator.cancel()
                self._end(session)
        self._dispatch(self._sessions.take_messages())
        job = self._sessions.next_job()
        if job is not None:
            self._dispatch(self._sessions.take_ahead(job))
            self._work(job)
        heard = self._links.collect(self._receive)
        self._settle()
        if not heard and job is None:
            self._links.sleep(idle_s)
        self._links.check()
        if self._running and time.monotonic() - self._links.moved_at > _STALL_S:
            raise PeerLost(f"no output for {_STALL_S:g} s, though every stage answers: a segment "
                           "was lost; start the cluster again")

    def abandon(self, error: BaseException) -> None:
        """Settle every request with ``error``, but those that are over, which are answered; the stages are
        told, if they can be, and keep nothing."""
        self.pool.clear()
        for session in self._running:
            closing = self._sessions.remove(session)
            with suppress(FlowspecError):
                self._links.send(closing)
        begun, over = [*self._running.values(), *self._aside], list(self._closing.items())
        self._running.clear()
        self._closing.clear()
        self._aside.clear()
        with ExitStack() as each:  # an observer that raises keeps no answer from the others
            for running in begun:
                each.callback(self._fail, running, error)
            for session, running in over:
                each.callback(self._answer, session, running)

    def _fail(self, running: _Running, error: BaseException) -> None:
        """Settle one that cannot go on."""
        self._links.bytes.pop(running.session, None)
        try:
            self._observer.failed(running.coordinator, time.monotonic())
        finally:
            if not running.ticket.done:
                running.ticket.settle(error)

    def _receive(self, message: Output | Credit | Tap | Computed) -> None:
        if isinstance(message, Computed):
            self._learn(message)
            return
        self._observer.arrived(message, time.monotonic())
        self._sessions.receive(message)

    def _learn(self, times: Computed) -> None:
        """How long a segment took a stage: for the curve, and for the observer if it asked."""
        running = self._running.get(times.session) or self._closing.get(times.session)
        if running is None:
            return  # of a session from before a loss
        if running.watched:
            self._observer.arrived(times, time.monotonic())
        if self._curve is not None:
            self._curve.observe(times.stage, times.rows, (times.end - times.start) * 1e-6)

    def _dispatch(self, messages: Sequence[Segment | Prune | Cancel]) -> None:
        for message in messages:
            self._links.send(message)
            self._observer.sent(message, time.monotonic())
        self._links.flush()

    def _work(self, job: Job) -> None:
        session = job.coordinator.ledger.session
        running = self._running[session]
        start, began = time.perf_counter(), time.monotonic()
        job.coordinator.complete(job.task)
        if self._emulation:
            running.late_s += rest(start, self._emulation.devices.task_seconds(job.coordinator, job.task))
        self._sessions.worked(job, time.perf_counter() - start)
        self._observer.worked(job, began, time.monotonic())
        running.ticket.likelihoods += job.coordinator.new_likelihoods()
        if running.ticket.on_tokens and (new := job.coordinator.new_tokens()):
            try:
                running.ticket.on_tokens(new)  # may block; what came meanwhile is read before anybody
            except Exception as error:         # counts as silent
                running.ticket.settle(error)
                job.coordinator.cancel()
        if job.coordinator.finished:
            self._end(session)

    def _end(self, session: int) -> None:
        """Tell the stages; each one's last counters are part of the result."""
        running = self._closing[session] = self._running.pop(session)
        running.until = time.monotonic() + _LAST_REPORT_S
        kept = self.pool.leave(running.coordinator)
        self._links.send(replace(self._sessions.remove(session), kept=kept))

    def _settle(self) -> None:
        """Answer those whose last counters have come, or are late."""
        for session, running in list(self._closing.items()):
            if self._links.members.all_closed(session) or time.monotonic() > running.until:
                del self._closing[session]
                self._answer(session, running)

    def _answer(self, session: int, running: _Running) -> None:
        stages = self._links.members.take_closed(session)
        total = self._links.bytes.pop(session) + sum(
            int(counters.get(kind, 0)) for counters in stages for kind in ("bytes_out", "collective_bytes"))
        slot_s = self.slot_s or max(counters.get("slot_s", 0.0) for counters in stages)
        result = running.coordinator.result(slot_s, total, stages)
        late = running.late_s + sum(counters.get("late_s", 0.0) for counters in stages)
        if len(result.tokens) > 1 and late > _LATE_SHARE * result.stats.decode_s:
            log.warning("emulation: this machine was too slow or too busy by %.2f s in %.2f s of decoding; "
                        "figures are too low", late, result.stats.decode_s)
        try:
            self._observer.settled(running.coordinator, result, time.monotonic())
        finally:  # whoever asked gets an answer, whatever becomes of those who watch
            if not running.ticket.done:
                running.ticket.settle(result)
