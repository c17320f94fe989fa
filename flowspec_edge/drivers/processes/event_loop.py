"""Drives D0's core in real time: sends over the links, computes, receives, waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from flowspec_edge.d0.core import DraftCore, Outgoing
from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import RequestHandle
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

    def start(self, handle: RequestHandle) -> None:
        """Start a request, or continue one that gave way."""
        if not self.core.sessions:
            self._links.members.drop_reports()
            self._links.expect_outputs_from_now()
        self.core.start(handle)
        self._send(self.core.take_control())

    def give_way(self) -> list[RequestHandle]:
        leaving = self.core.give_way()
        self._send(self.core.take_control())
        return leaving

    def answer_cancelled(self) -> None:
        self.core.end_cancelled()
        self._settle()

    def listen_again(self) -> None:
        """Read what came while no thread drove the cluster, and count silence from now."""
        self._links.collect(self.core.receive)
        self._links.expect_from_now()

    # ---- losses --------------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """A stage is lost: requests wait for :meth:`resume`; finished ones are answered."""
        sessions = self.core.suspend(reason)
        self._settle(overdue=True)  # the reports that have not come are lost
        self._links.close_all(sessions)
        for session in sessions:
            self._links.members.take_reports(session)

    def resume(self) -> None:
        """The stages are back, without sessions. PeerLost if one is lost again."""
        self._links.close_all([self.core.newest_session])
        self._links.reset()
        self.core.resume()
        self._send(self.core.take_control())

    def abandon(self, error: BaseException) -> None:
        """End every request: finished ones with their results, the others with ``error``."""
        self._settle(overdue=True)
        self.core.abandon(error)
        for message in self.core.take_control():
            with suppress(FlowspecError):
                self._links.send(message)

    # ---- one step ------------------------------------------------------------------------------

    def step(self, idle_s: float) -> None:
        """Send, do the most urgent work, receive; with nothing to do, wait up to ``idle_s`` s for a message.
        PeerLost or ProtocolError if the stages cannot continue."""
        self.core.end_cancelled()
        self._send(self.core.take_messages())
        job = self.core.next_job()
        if job is not None:
            self._send(self.core.take_ahead(job))
            self._work(job)
        received = self._links.collect(self.core.receive)
        if wrong := self._links.take_dropped():
            self._observer.dropped("frame", wrong)
        self._settle()
        self._send(self.core.take_control())
        if not received and job is None:
            self._links.sleep(idle_s)
            self._energy.update()
        self._links.check()
        if self.core.is_decoding and time.monotonic() - self._links.output_at > _STALL_S:
            raise PeerLost(f"no output for {_STALL_S:g} s, though every stage answers: a segment "
                           "was lost; start the cluster again")

    def _send(self, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._energy.open(message.session, self.core.sessions)
            self._links.send(message)
        self._links.flush()

    def _work(self, job: Job) -> None:
        self._energy.work_for(*job.sessions)
        start, began = time.perf_counter(), time.monotonic()
        done = self.core.compute(job)
        self._energy.work_for()
        late = self._emulator.finish(job, start) if self._emulator else 0.0
        self.core.worked(job, done, began, time.monotonic(), late)

    def _settle(self, overdue: bool = False) -> None:
        """Answer the requests whose reports are complete or overdue."""
        for active in self.core.closing():
            late = overdue or time.monotonic() > active.report_deadline
            if late or self._links.members.all_reported(active.session):
                self.core.settle(active, self._links.members.take_reports(active.session),
                                 self._timing.slot_s, self._energy.close(active.session))
