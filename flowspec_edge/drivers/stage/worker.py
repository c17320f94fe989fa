"""A stage's loop: control messages first, then segments, reports and connection checks.

Knows the order of a stage's steps and when it must end by itself; does not know sockets or segments.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowspec_edge.drivers.observe.power import PowerMeter, SessionEnergy
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.stage.release_link import ReleaseLink
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.drivers.stage.status_sender import StatusSender, format_error
from flowspec_edge.errors import (
    FlowspecError,
    KeyRefused,
    OtherRelease,
    PeerFault,
    PeerLost,
    ProtocolError,
)
from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Hello,
    Message,
    Open,
    Output,
    Prune,
    Refusal,
    Segment,
    Shutdown,
    Tap,
    parts_of,
)
from flowspec_edge.stage.core import (
    Arrived,
    Charged,
    Emit,
    Idle,
    Outgoing,
    Pass,
    Passed,
    Reject,
    StageCore,
)
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import ZmqClientLink, ZmqLink, ZmqTransport

if TYPE_CHECKING:
    from flowspec_edge.stage.engine import StageEngine

log = logging.getLogger(__name__)

_FAULT_S = 1.0  # between two reports to D0 while no session is open
_CHECK_S = 0.25  # between checks of the links and the parent process
_FAILED_HANDSHAKES = 5  # in a row, until D0's key is taken for another one: a D0 that ends may cause one


class Stopped(BaseException):
    """D0 or a signal asked the process to end.

    A BaseException, because code that polls between layers must not handle it.
    """


@dataclass
class Links:
    transport: ZmqTransport
    control: ZmqClientLink  # to and from D0
    previous: ZmqLink  # segments in
    next: ZmqClientLink  # segments or outputs out


def connect(config: WorkerConfig, transport: ZmqTransport) -> Links:
    name = f"V{config.stage}"
    control_key, next_key, previous_key = (
        [keys.parse_public(key)] if config.key_file else []
        for key in (config.control_key, config.next_key, config.previous_key))
    return Links(
        transport,
        transport.control(config.control, f"{name} control", config.instance, control_key),
        transport.pull(config.listen, f"{name} data in", previous_key, config.listen_fd),
        transport.push(config.next, f"{name} data out", next_key),
    )


class Worker:
    def __init__(self, config: WorkerConfig, links: Links, engine: StageEngine, hello: Hello,
                 notifier: Notifier | None = None, meter: PowerMeter | None = None,
                 stopping: Callable[[], bool] = lambda: False, release: ReleaseLink | None = None,
                 charge: Charge | None = None) -> None:
        """Set up the loop of a stage.

        notifier  the service manager's
        meter     of the board's power
        stopping  whether a signal has asked the process to end
        release   as for ``process.serve``
        charge    the emulated time of a pass
        """
        self._config = config
        self._links = links
        self._stopping = stopping
        self._release = release
        self._charge = charge
        self._core = StageCore(engine, config.stage, charge.layers if charge else 1.0, config.open_within_s)
        self._counters = self._core.counters
        self._energy = SessionEnergy(meter)
        self._status = StatusSender(config, links.control, links.previous, links.next, engine, self._counters,
                                    hello, SystemStats(meter=meter), self._energy)
        self._fault: PeerFault | None = None  # the latest of the data link, not handled yet
        self._bytes_in = 0  # of the data link, counted so far
        self._check_at = 0.0
        self._gave_up_at = 0.0
        # When the first of the open sessions began: seconds, and disconnects of the links to D0 and the next
        self._open_at = 0.0
        self._disconnects = (0, 0)
        self._isolated = False  # no connection to the next device at the last check
        self._notifier = notifier or Notifier({})
        self._title = f"V{hello.stage} of {hello.stages}, layers [{hello.layers[0]}, {hello.layers[1]})"

    def run(self) -> None:
        """Serve until Shutdown or a signal; raises FlowspecError when the stage cannot continue."""
        try:
            self._status.send_hello()
            self._notifier.ready(self._title)
            while True:
                self._tick()
                self._step()
        except Stopped:
            return
        except KeyRefused as error:
            if error.link == self._links.control.name:
                self._refused(str(error))
            raise

    # ---- data ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what the data link has, while there is room, so that the peer's connection never stands still.

        Wait for nothing and raise nothing.
        """
        link = self._links.previous
        try:
            while self._core.has_room and (message := link.receive()) is not None:
                parts = parts_of(message) if isinstance(message, Segment | Batch) else ()
                segments = [part for part in parts if isinstance(part, Segment)]
                if not segments:
                    link.reject(f"a {type(message).__name__} is not a segment")
                    continue
                size = link.bytes_in - self._bytes_in  # since the last one: emulated links delay
                self._bytes_in += size
                self._core.feed(Arrived(segments, size), time.monotonic())
        except PeerFault as error:
            self._fault = error

    def _step(self) -> None:
        """Do what the core says.

        Results leave before anything is read, and the data link is read before a pass and while there is nothing to
        do.
        """
        try:
            if self._fault:
                fault, self._fault = self._fault, None
                raise fault
            action = self._core.next(time.monotonic())
            if isinstance(action, Reject):
                self._links.previous.reject(action.reason)
        except (PeerFault, ProtocolError) as error:  # such as a gap: a segment before it was lost
            self._give_up(error)
            return
        match action:
            case Emit(messages):
                self._emit(messages)
            case Pass():
                self._read()
                self._work(action)
            case Idle() if self._core.has_room:
                self._sleep()

    def _work(self, running: Pass) -> None:
        start = time.monotonic()
        self._energy.work_for(*(segment.session for segment in running.segments))
        try:
            running.compute(self._tick)
            if self._charge:
                self._wait_for(running, self._charge, start)
        except (KeyRefused, OtherRelease, PeerLost):
            raise
        except FlowspecError as error:  # rows that contradict each other, or do not fit
            self._give_up(error)
            if not running.results:
                return
        finally:
            self._energy.work_for()
        end = time.monotonic()
        self._core.feed(Passed(start, end), end)
        self._step()  # before control messages are read: a Close's report counts this pass, so its times go first

    def _wait_for(self, running: Pass, charge: Charge, start: float) -> None:
        """Wait until the emulated pass ends; a cancel may end it early."""
        seconds = charge.seconds(running.admitted_rows, running.context, running.alike)
        self._core.feed(Charged(start, seconds), time.monotonic())
        if all(running.cancelled):
            return
        self._counters.add_late(max(0.0, time.monotonic() - running.end), running.segments)
        while (remaining := running.end - time.monotonic()) > 0:
            self._tick(remaining)

    def _emit(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            match message:
                case Computed():  # best effort, as all reports
                    self._links.control.send(replace(message, sent=round(time.monotonic() * 1e6)))
                case Credit() | Tap():
                    self._send(self._links.control, message)
                case Segment() | Output() | Batch():
                    before = self._links.next.bytes_out
                    self._send(self._links.next, message)
                    self._counters.add_bytes("bytes_out", self._links.next.bytes_out - before,
                                             parts_of(message))

    def _send(self, link: ZmqClientLink, message: Outgoing) -> None:
        """Send ``message``, without the data of ended sessions; serve control messages while the peer has no room."""
        while (unsent := self._core.left_of(message)) is not None and not link.send(unsent):
            self._sleep(room=link)
            self._tick()

    def _sleep(self, room: ZmqLink | None = None, computing_s: float = math.inf) -> None:
        """Wait for a message, for room on ``room``, or until a heartbeat or check is due; then read the data link.

        ``computing_s``: seconds that an emulated segment has left. They count as computing, not as waiting, and
        segments
        that come meanwhile are left where they are.
        """
        start, waits = time.monotonic(), computing_s == math.inf
        data = waits and self._core.has_room
        incoming = [self._links.control, self._links.previous] if data else [self._links.control]
        wait_s = max(0.0, min(self._status.due_at - start, self._check_at - start, computing_s))
        self._links.transport.wait(incoming, [room] if room else [], wait_s)
        if waits:
            self._read()
            self._counters.add_wait(time.monotonic() - start)

    # ---- control -------------------------------------------------------------------------------

    def _tick(self, wait: float = 0.0) -> None:
        """Handle control messages, checks and heartbeats; also called between layers."""
        if wait > 0:
            self._sleep(computing_s=wait)
        if self._stopping():
            raise Stopped
        try:
            while (message := self._links.control.receive()) is not None:
                self._handle_control(message)
        except ProtocolError as error:
            self._abandon_sessions(format_error(error), tell=True)
        self._notifier.alive()
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            self._check()
        if now >= self._status.due_at:
            self._status.send_heartbeat()

    def _handle_control(self, message: Message) -> None:
        match message:
            case Open():
                if message.session not in self._counters:
                    self._check_order(message.session)
                since = self._counters.since
                self._core.feed(message, time.monotonic())
                self._energy.open(message.session, self._counters.sessions)
                if self._counters.since != since:  # the first of the open sessions
                    self._open_at = time.monotonic()
                    self._disconnects = self._links.control.disconnects(), self._links.next.disconnects()
            case Close():
                if message.session in self._counters:
                    self._status.send_session_report(message.session)
                    self._status.send_heartbeat()  # the totals, with the end of this session
                self._core.feed(message, time.monotonic())
            case Prune() | Cancel():
                self._core.feed(message, time.monotonic())
            case Shutdown():
                log.info("V%d ends: %s", self._config.stage, message.reason)
                raise Stopped
            case Refusal():
                self._refused("D0 knows this device under another instance id")
            case _:
                self._links.control.reject(f"D0 sent a {type(message).__name__}")

    def _check_order(self, session: int) -> None:
        """Raise ProtocolError if D0 does not know how far this stage's session numbers have come.

        A segment that overtook its Open would have been taken for a stale one. The Hello tells D0.
        """
        if session <= self._counters.newest:
            self._status.send_hello()
            raise ProtocolError(f"D0 opens session {session} after session {self._counters.newest}")

    def _refused(self, reason: str) -> None:
        """OtherRelease if a restart may mend it; otherwise the stage waits for another D0."""
        if self._release is not None and self._release.is_open:
            raise OtherRelease(f"{reason}: the draft device belongs to another release")

    def _check(self) -> None:
        """End, or abandon the sessions, if a peer that they need is gone."""
        config, links = self._config, self._links
        d0 = multiprocessing.parent_process()  # of a forked worker, which outlives its fork server
        if not d0.is_alive() if d0 else config.parent and os.getppid() != config.parent:
            raise PeerLost("the process that started this stage is gone")
        d0_lost_s = links.control.disconnected_for()
        if links.control.failed_handshakes() >= _FAILED_HANDSHAKES:
            self._refused("D0 has another key")
        if d0_lost_s > config.lost_after_s:
            reason = f"{links.control.name}: no connection to D0 for {config.lost_after_s:g} s"
            if config.parent:
                raise PeerLost(reason)
            if self._counters:  # a stage that is a service waits for another D0
                self._abandon_sessions(reason)
        self._notifier.status(f"{self._title}: {'waiting for D0' if d0_lost_s else 'connected to D0'}")
        self._status.send_hello_again()
        next_lost_s = links.next.disconnected_for()
        if bool(next_lost_s) != self._isolated:
            self._isolated = not self._isolated
            self._status.due_at = 0.0  # D0 waits for this heartbeat after a loss
        reason = self._next_outage(min(next_lost_s, time.monotonic() - self._open_at))
        if self._counters and reason:
            self._abandon_sessions(reason)

    def _next_outage(self, lost_s: float) -> str:
        """Why the open sessions cannot continue, if their link to the next device has been down for ``lost_s`` seconds.

        "" if they can, or if D0 may still find out which device is to blame.
        """
        config, link = self._config, self._links.next
        broken = link.disconnects() != self._disconnects[1]
        if broken and (not lost_s or lost_s > config.broken_after_s):
            return f"{link.name}: the connection broke during a session; messages may be lost"
        if lost_s > config.lost_after_s:
            return f"{link.name}: no connection to the next device for {config.lost_after_s:g} s"
        return ""

    def _give_up(self, error: FlowspecError) -> None:
        """Abandon the sessions: the previous device broke the protocol, or a session cannot continue."""
        now = time.monotonic()
        if self._counters or now >= self._gave_up_at + _FAULT_S:  # a flood must fill neither log nor queue
            self._gave_up_at = now
            self._abandon_sessions(format_error(error), tell=not self._counters)

    def _abandon_sessions(self, reason: str, tell: bool = False) -> None:
        """Close the open sessions but keep the stage running.

        Tell D0, unless D0 itself was disconnected since they began. ``tell``: in any case.
        """
        log.warning("V%d abandons its sessions: %s", self._config.stage, reason)
        for session in self._counters.sessions:
            self._energy.close(session)
            self._core.feed(Close(session), time.monotonic())
        if tell or self._links.control.disconnects() == self._disconnects[0]:
            self._status.send_failure(reason)
