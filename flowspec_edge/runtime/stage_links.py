"""D0's ends of the links to its stages, and who of them still answers.

Knows what goes over which link, what each session's messages weigh, and when a silence, an exit or a
broken connection is the end.  Does not know requests or what messages are for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from flowspec_edge.errors import PeerLost, ProtocolError
from flowspec_edge.messages import (
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
    Shutdown,
    Tap,
)
from flowspec_edge.runtime.local import Addresses, Site
from flowspec_edge.runtime.members import Members
from flowspec_edge.transport.zmq_links import ZmqTransport

ADVICE = "; start the cluster again"  # at the end of a loss, for those who can
_CHECK_S = 0.1  # how often exits and silences are looked for
_EXIT_S = 3.0  # how much later than its links a process that dies may be seen to exit


class StageLinks:
    """To V1…VN; only one thread may use them at a time.

    bytes     what D0 has sent for each session that is entered here, and got over the control channel
    moved_at  when the newest output came (time.monotonic)
    """

    def __init__(self, transport: ZmqTransport, addresses: Addresses, place: Site, members: Members,
                 exited: Callable[[float], str | None],
                 heard: Callable[[Heartbeat, float], None]) -> None:
        """``exited`` says, if a stage is known to have ended, why; it may wait so many seconds.
        ``heard`` is told of every heartbeat, and when it came (time.monotonic)."""
        self.members = members
        self.bytes: dict[int, int] = {}
        self.moved_at = 0.0
        self._transport = transport
        self._exited = exited
        self._heard = heard
        self._outbox: deque[Segment] = deque()
        self._breaks = 0  # of the link to V1 that are made good
        self._check_at = 0.0
        allowed = addresses.worker_keys
        with place.entered(0):  # ZeroMQ's own thread stays where it was made
            self._hub = transport.hub(addresses.control, "D0 control", allowed)
            self._output = transport.pull(addresses.output, "D0 data in", allowed[-1:])
            self._first = transport.push(addresses.first, "D0 data out", allowed[:1])

    @property
    def control_endpoint(self) -> str:
        """Where stages find D0's control channel."""
        return self._hub.endpoint

    @property
    def output_endpoint(self) -> str:
        """Where the last stage sends outputs."""
        return self._output.endpoint

    # ---- messages ------------------------------------------------------------------------------

    def send(self, message: Segment | Open | Close | Prune | Cancel) -> None:
        """A segment to V1, as soon as there is room (:meth:`flush`); anything else to all stages.

        PeerLost if a stage takes nothing any more.
        """
        if isinstance(message, Segment):
            self._outbox.append(message)
            return
        before = self._hub.bytes_out
        for stage, instance in enumerate(self.members.instances, start=1):
            try:
                taken = self._hub.send(instance, message)
            except PeerLost as error:
                self._blame_exit(within=_EXIT_S)
                raise PeerLost(f"V{stage} has left the control channel{ADVICE}") from error
            if not taken:
                raise PeerLost(f"V{stage} takes no control messages any more{ADVICE}")
        self._count(message.session, self._hub.bytes_out - before)

    def shut_down(self, instance: str) -> None:
        """Ask a stage to end; PeerLost if it is not connected."""
        self._hub.send(instance, Shutdown("D0 closed the cluster"))

    def flush(self) -> None:
        """Hand over the segments that V1's link has room for."""
        before = self._first.bytes_out
        while self._outbox and self._first.send(self._outbox[0]):
            self._count(self._outbox.popleft().session, self._first.bytes_out - before)
            before = self._first.bytes_out

    def collect(self, take: Callable[[Output | Credit | Tap | Computed], None]) -> bool:
        """Take everything that has arrived; whether anything has."""
        found = False
        while (output := self._output.receive()) is not None:
            found = True
            self.moved_at = time.monotonic()
            if not isinstance(output, Output):
                raise ProtocolError(f"{self._output.name}: a {type(output).__name__} is no output")
            take(output)
        before = self._hub.bytes_in
        while (item := self._hub.receive()) is not None:
            found = True
            sender, message = item
            match message:
                case Hello() | Heartbeat() | Failed():
                    self.members.heard(sender, message, time.monotonic())
                    if isinstance(message, Heartbeat):
                        self._heard(message, time.monotonic())
                case Credit() | Tap() | Computed():
                    self._count(message.session, self._hub.bytes_in - before)
                    take(message)
                case _:
                    raise ProtocolError(f"{self._hub.name}: {sender} sent a {type(message).__name__}")
            before = self._hub.bytes_in
        return found

    def sleep(self, most: float = _CHECK_S) -> None:
        """Until something comes, or the next check is due, or ``most`` seconds."""
        due = max(0.0, min(most, self._check_at - time.monotonic()))
        self._transport.wait([self._output, self._hub], [self._first] if self._outbox else [], due)

    def _count(self, session: int, size: int) -> None:
        if session in self.bytes:
            self.bytes[session] += size

    # ---- life and death ------------------------------------------------------------------------

    def expect_from_now(self) -> None:
        """Silence and standstill count from now."""
        self.moved_at = time.monotonic()
        self.members.expect_from(self.moved_at)

    def check(self) -> None:
        """PeerLost if a stage has exited, fallen silent or lost its link."""
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        self._blame_exit()
        self.members.check(now)
        if self._first.breaks() != self._breaks:
            self._blame_exit(within=_EXIT_S)
            raise PeerLost(f"{self._first.name}: the connection to V1 broke, segments may be lost{ADVICE}")

    def close_all(self, sessions: Iterable[int]) -> None:
        """After a loss: nothing that was to be sent is, and the stages that can be told give ``sessions``
        up, and wait for no session before the last of them."""
        self._outbox.clear()
        for instance in self.members.instances:
            for session in sessions:
                with suppress(PeerLost):
                    self._hub.send(instance, Close(session))

    @property
    def reaches_v1(self) -> bool:
        """Whether the link for segments is up."""
        return not self._first.lost_for()

    def begin_anew(self) -> None:
        """All stages are there again: silence, standstill and broken links count from now."""
        self._breaks = self._first.breaks()
        self.expect_from_now()

    def wait(self, seconds: float) -> None:
        """Until something comes, for at most so long; nothing is sent."""
        self._transport.wait([self._output, self._hub], [], seconds)

    def _blame_exit(self, within: float = 0.0) -> None:
        cause = self._exited(within)
        if cause is not None:
            raise PeerLost(cause + ADVICE)
