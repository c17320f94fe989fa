"""Drives D0's core in real time: carries out what it says over the links, and feeds it what happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.events import (
    Abandoned,
    Back,
    Compute,
    Finish,
    Lost,
    Outgoing,
    Reported,
    Send,
    Wait,
    Worked,
)
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.run_events import MessagesDropped
from flowspec_edge.drivers.observe.power import SessionEnergy
from flowspec_edge.drivers.processes.emulator import Emulator
from flowspec_edge.drivers.processes.stage_links import StageLinks
from flowspec_edge.drivers.processes.timing import ClusterTiming
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.messages import Open

_STALL_S = 120.0  # without any output while requests run and all stages answer


class EventLoop:
    """Not thread-safe."""

    def __init__(self, core: DraftCore, links: StageLinks, emulator: Emulator | None, observer: Observer,
                 energy: SessionEnergy, timing: ClusterTiming) -> None:
        self.core = core
        self._links = links
        self._emulator = emulator
        self._observer = observer
        self._energy = energy
        self._timing = timing

    def listen_again(self) -> None:
        """Read what came while no thread drove the cluster, and count silence from now."""
        self._links.collect(self.core.feed)
        self._links.expect_from_now()

    # ---- losses --------------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """Let requests wait for :meth:`resume`, since a stage is lost; finished ones are answered."""
        sessions = self.core.sessions
        self.core.feed(Lost(reason))
        self.carry_out()
        self._links.close_all(sessions)
        for session in sessions:
            self._links.members.take_reports(session)

    def resume(self) -> None:
        """Go on with the stages, which are back without sessions.

        PeerLost if one is lost again.
        """
        self._links.close_all([self.core.newest_session])
        self._links.reset()
        self.core.feed(Back())
        self.carry_out()

    def abandon(self, error: BaseException) -> None:
        """End every request: finished ones with their results, the others with ``error``."""
        self.core.feed(Abandoned(error))
        while not isinstance(action := self.core.next(), Wait):
            match action:
                case Send(messages):
                    for message in messages:
                        with suppress(FlowspecError):
                            self._links.send(message)
                case Finish(session):
                    self._report(session)
        self._links.members.drop_reports()

    # ---- one step ------------------------------------------------------------------------------

    def step(self, idle_s: float) -> None:
        """Send, do the most urgent work, receive; with nothing to do, wait up to ``idle_s`` s for a message.

        PeerLost or ProtocolError if the stages cannot continue.
        """
        worked = self.carry_out()
        self._links.flush()  # V1 may have connected, or made room, since the core last had something to send
        received = self._links.collect(self.core.feed)
        if dropped_frames := self._links.take_dropped():
            self._observer.observe(MessagesDropped("frame", dropped_frames))
        for session in self.core.closing:
            if self._links.members.all_reported(session):
                self._report(session)
        if not received and not worked:
            self._links.sleep(idle_s)
            self._energy.update()
        self._links.check()
        if self.core.is_decoding and time.monotonic() - self._links.output_at > _STALL_S:
            raise PeerLost(f"no output for {_STALL_S:g} s, though every stage answers: a segment "
                           "was lost; start the cluster again")

    def carry_out(self) -> bool:
        """Do what the core says until it waits, or has had some work done; return whether it has.

        Messages are read before the next work, which they may make less urgent.
        """
        while not isinstance(action := self.core.next(), Wait):
            self._do(action)
            if isinstance(action, Compute):
                return True
        return False

    def _do(self, action: Send | Compute | Finish) -> None:
        match action:
            case Send(messages):
                self._send(messages)
            case Compute():
                self._work(action)
            case Finish(session):
                self._report(session)

    def _send(self, messages: Sequence[Outgoing]) -> None:
        opened = [message.session for message in messages if isinstance(message, Open)]
        if opened and set(self.core.sessions) <= set(opened):  # no output was due before
            self._links.expect_outputs_from_now()
        for message in messages:
            if isinstance(message, Open):
                self._energy.open(message.session, self.core.sessions)
            self._links.send(message)
        self._links.flush()

    def _work(self, run: Compute) -> None:
        self._energy.work_for(*run.job.sessions)
        start, began = time.perf_counter(), time.monotonic()
        run.work()
        self._energy.work_for()
        late = self._emulator.finish(run.job, start) if self._emulator else 0.0
        self.core.feed(Worked(began, time.monotonic(), late))

    def _report(self, session: int) -> None:
        self.core.feed(Reported(session, self._links.members.take_reports(session), self._timing.slot_s,
                                self._energy.close(session)))
