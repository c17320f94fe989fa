"""D0's ends of the links to its stages; detects broken links and ended processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from flowspec_edge.drivers.processes.addresses import Placement
from flowspec_edge.drivers.processes.membership import Membership, StageBroken
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.errors import PeerFault, PeerLost, ProtocolError
from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Failed,
    Heartbeat,
    Hello,
    Open,
    Output,
    Prune,
    Segment,
    SessionReport,
    Shutdown,
    Tap,
    parts_of,
    shares,
)
from flowspec_edge.transport.zmq_links import ZmqTransport

ADVICE = "; start the cluster again"  # ends the message of a PeerLost
_CHECK_S = 0.1  # between checks for exits and silence
_EXIT_S = 3.0  # between the close of a dying process' links and its exit


class StageLinks:
    """Links to V1…VN. Not thread-safe.

    output_at  when the last output came (time.monotonic)
    """

    def __init__(self, transport: ZmqTransport, addresses: Addresses, placement: Placement, members: Membership,
                 exited: Callable[[float], str | None], on_heartbeat: Callable[[Heartbeat, float], None],
                 is_open: Callable[[int], bool], charge: Callable[[int, int], None]) -> None:
        """Set up the links without connecting them.

        exited        waits up to that many seconds for a stage to end; returns why one has, or None
        on_heartbeat  gets every heartbeat and its time of arrival (time.monotonic)
        is_open       whether a session's reports are wanted
        charge        gets a session, and the bytes that D0 sent or received (over the control channel) for it
        """
        self.members = members
        self.output_at = 0.0
        self._transport = transport
        self._exited = exited
        self._on_heartbeat = on_heartbeat
        self._is_open, self._charge = is_open, charge
        self._outbox: deque[Segment | Batch] = deque()
        self._disconnects = 0  # of the link to V1, already handled
        self._check_at = 0.0
        self._strangers = 0  # control messages of processes that are no stage of this cluster
        self._dropped = 0  # messages, at the last ``take_dropped``
        allowed = addresses.worker_keys
        with placement.entered(0):  # ZeroMQ's I/O thread keeps the namespace it was created in
            self._hub = transport.hub(addresses.control, "D0 control",
                                      dict(zip(addresses.instances, allowed, strict=False)))
            self._output = transport.pull(addresses.output, "D0 data in", allowed[-1:])
            self._first = transport.push(addresses.first, "D0 data out", allowed[:1])

    @property
    def control_endpoint(self) -> str:
        return self._hub.endpoint

    @property
    def output_endpoint(self) -> str:
        return self._output.endpoint

    # ---- messages ------------------------------------------------------------------------------

    def wait_for_hello(self, within: float, waiting: Callable[[list[str]], None]) -> None:
        """Wait until every stage has said Hello; PeerLost if one ends, or after ``within`` seconds.

        ``waiting`` is called repeatedly with the missing stages: ["V1", …].
        """
        deadline = time.monotonic() + within
        while missing := self.members.missing():
            waiting(missing)
            if time.monotonic() > deadline:
                raise PeerLost(f"no Hello from {', '.join(missing)} within {within:g} s: check that they "
                               f"run, can reach D0 at {self.control_endpoint} and have the right keys")
            self.reset()  # a broken link is no loss yet, because nothing was sent
            self.check()
            self.sleep()
            self.collect(lambda message: None)

    def send(self, message: Segment | Batch | Open | Close | Prune | Cancel) -> None:
        """Queue a segment or batch for V1 (:meth:`flush`); send anything else to all stages.

        PeerLost if a stage is disconnected or its queue is full.
        """
        if isinstance(message, Segment | Batch):
            self._outbox.append(message)
            return
        before = self._hub.bytes_out
        for stage, instance in enumerate(self.members.instances, start=1):
            try:
                accepted = self._hub.send(instance, message)
            except PeerLost as error:
                self._blame_exit(stage)
                raise PeerLost(f"V{stage} left the control channel{ADVICE}") from error
            if not accepted:
                raise PeerLost(f"V{stage} no longer takes control messages{ADVICE}")
        self._charge(message.session, self._hub.bytes_out - before)

    def shut_down(self, instance: str) -> None:
        self._hub.send(instance, Shutdown("D0 closed the cluster"))

    def flush(self) -> None:
        """Send the queued segments that fit into V1's link."""
        before = self._first.bytes_out
        while self._outbox and self._first.send(self._outbox[0]):
            parts = parts_of(self._outbox.popleft())
            for part, share in zip(parts, shares(self._first.bytes_out - before, parts), strict=True):
                self._charge(part.session, share)
            before = self._first.bytes_out

    def collect(self, take: Callable[[Output | Credit | Tap | Computed], None]) -> bool:
        """Pass all arrived messages to ``take``, which raises ProtocolError for impossible ones, or to ``members``.

        Return whether any had arrived. PeerLost if a stage failed or broke the protocol.
        """
        try:
            any_outputs = self._collect_outputs(take)
        except PeerFault as error:  # of VN, because the socket admits its key alone
            raise StageBroken(len(self.members.instances), str(error)) from None
        try:
            return self._collect_control(take) or any_outputs
        except PeerFault as error:
            raise StageBroken(self.members.instances.index(error.peer) + 1, str(error)) from None

    def _collect_outputs(self, take: Callable[[Output], None]) -> bool:
        any_messages = False
        while (message := self._output.receive()) is not None:
            any_messages = True
            parts = parts_of(message) if isinstance(message, Output | Batch) else ()
            outputs = [part for part in parts if isinstance(part, Output)]
            if not outputs:
                self._output.reject(f"a {type(message).__name__} is not an output")
                continue
            self.output_at = time.monotonic()
            try:
                for output in outputs:
                    take(output)
            except ProtocolError as error:
                self._output.reject(str(error))
        return any_messages

    def _collect_control(self, take: Callable[[Credit | Tap | Computed], None]) -> bool:
        any_messages = False
        before = self._hub.bytes_in
        while (item := self._hub.receive()) is not None:
            any_messages = True
            sender, message = item
            size, before = self._hub.bytes_in - before, self._hub.bytes_in
            if sender not in self.members.instances:  # such as a process that was replaced
                self._strangers += 1
                continue
            if objection := self.members.objection(sender, message):
                self._hub.reject(objection, sender)
                continue
            match message:
                case SessionReport() if not self._is_open(message.session):
                    pass  # the session was open before a loss
                case Hello() | Heartbeat() | SessionReport() | Failed():
                    self.members.receive(sender, message, time.monotonic())
                    if isinstance(message, Heartbeat):
                        self._on_heartbeat(message, time.monotonic())
                case Credit() | Tap() | Computed():
                    self._charge(message.session, size)
                    try:
                        take(message)
                    except ProtocolError as error:
                        self._hub.reject(str(error), sender)
        return any_messages

    def take_dropped(self) -> int:
        """Return the number of messages since the last call that no stage of this cluster may have sent."""
        before, self._dropped = self._dropped, self._strangers + self._hub.dropped + self._output.dropped
        return self._dropped - before

    def sleep(self, max_s: float = _CHECK_S) -> None:
        """Wait up to ``max_s`` seconds for a message, room for a queued segment, or the next check."""
        wait_s = max(0.0, min(max_s, self._check_at - time.monotonic()))
        self._transport.wait([self._output, self._hub], [self._first] if self._outbox else [], wait_s)

    # ---- losses --------------------------------------------------------------------------------

    def expect_outputs_from_now(self) -> None:
        self.output_at = time.monotonic()

    def expect_from_now(self) -> None:
        self.expect_outputs_from_now()
        self.members.reset_silence(self.output_at)

    def check(self) -> None:
        """Raise PeerLost if a stage has ended or is silent, or the link to V1 broke."""
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        self._blame_exit()
        self.members.check(now)
        if self._first.disconnects() != self._disconnects:
            self._blame_exit(1)
            raise PeerLost(f"{self._first.name}: the connection to V1 broke, segments may be lost{ADVICE}")

    def close_all(self, sessions: Iterable[int]) -> None:
        """Drop the queue after a loss, and close ``sessions`` at the connected stages.

        These stages then no longer wait for the Open of any session up to the last of ``sessions``.
        """
        self._outbox.clear()
        for instance in self.members.instances:
            for session in sessions:
                with suppress(PeerLost):
                    self._hub.send(instance, Close(session))

    @property
    def reaches_v1(self) -> bool:
        return not self._first.disconnected_for()

    def reset(self) -> None:
        """Count silence, standstill and disconnects from now, such as when all stages are back."""
        self._disconnects = self._first.disconnects()
        self.expect_from_now()

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for a message, without sending."""
        self._transport.wait([self._output, self._hub], [], seconds)

    def _blame_exit(self, stage: int = 0) -> None:
        """Raise PeerLost if a stage has ended.

        ``stage``: its link broke, so it may also end in a moment, or be silent because it was stopped.
        """
        deadline = time.monotonic() + (_EXIT_S if stage else 0.0)
        while True:
            cause = self._exited(min(_CHECK_S, max(0.0, deadline - time.monotonic())))
            if cause is not None:
                raise PeerLost(cause + ADVICE)
            now = time.monotonic()
            if now >= deadline:
                return
            self.members.check(now, [stage])
