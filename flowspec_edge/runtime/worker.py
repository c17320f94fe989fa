"""A verification device's process: one shard, one loop.

Knows in which order a stage does things and when it must end by itself.  Does not know sockets
(``transport``), the meaning of a segment (``stage``), what reports say (``worker_reports``) or the tree.

    python -m flowspec_edge.runtime.worker --config FILE
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

from flowspec_edge.errors import FlowspecError, PeerLost, ProtocolError
from flowspec_edge.messages import (
    Cancel,
    Close,
    Credit,
    Failed,
    Hello,
    Message,
    Open,
    Output,
    Prune,
    Segment,
    Shutdown,
    Tap,
)
from flowspec_edge.runtime.emulated_links import EmulatedTransport
from flowspec_edge.runtime.emulation import Emulation
from flowspec_edge.runtime.engine import Engine
from flowspec_edge.runtime.notify import Notifier
from flowspec_edge.runtime.worker_books import Books
from flowspec_edge.runtime.worker_reports import Reports
from flowspec_edge.runtime.workerconfig import WorkerConfig
from flowspec_edge.transport import keys
from flowspec_edge.transport.base import ClientLink, Link, Transport
from flowspec_edge.transport.zmq_links import ZmqTransport

log = logging.getLogger(__name__)

_CHECK_S = 0.25  # how often the links and the parent are looked at


class Stopped(BaseException):
    """D0, or the system, asked the process to end.

    It may come in the midst of anything, such as a library's loading of a file: no error that whoever is
    at work may take for his own.
    """


@dataclass
class Links:
    """A stage's connections."""

    transport: Transport
    control: ClientLink  # to and from D0
    previous: Link  # segments come in
    next: ClientLink  # segments or outputs go out; from a rank but the last, segments as they came


def connect(config: WorkerConfig, transport: Transport) -> Links:
    """Make the stage's links."""
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
    """The loop of one stage; :meth:`run` returns when D0 says so."""

    def __init__(self, config: WorkerConfig, links: Links, engine: Engine, hello: Hello,
                 notifier: Notifier | None = None) -> None:
        """``notifier``: is told how the stage is, and that the loop goes on."""
        self._config = config
        self._links = links
        self._engine = engine
        self._bytes_in = 0  # of the data link, that are booked
        self._books = Books()
        self._reports = Reports(config, links.control, links.next, engine, self._books, hello)
        self._breaks = (0, 0)  # of the links to D0 and to the next device, when the first of the open
        self._check_at = 0.0   # sessions began
        self._open_at = 0.0  # when that was, of time.monotonic()
        self._apart = False  # whether the next device was out of reach when last looked
        self._notifier = notifier or Notifier({})
        self._about = f"V{hello.stage} of {hello.stages}, layers [{hello.layers[0]}, {hello.layers[1]})"

    def run(self) -> None:
        """Serve until Shutdown; raises FlowspecError when the stage cannot go on."""
        self._reports.greet()
        self._notifier.ready(self._about)
        try:
            while True:
                self._tick()
                segment = self._next_segment()
                if segment is not None:
                    self._work(segment)
        except Stopped:
            return

    # ---- data ----------------------------------------------------------------------------------

    def _next_segment(self) -> Segment | None:
        message = self._links.previous.receive()
        if message is None:
            self._sleep()
            return None
        if not isinstance(message, Segment):
            raise ProtocolError(f"{self._links.previous.name}: a {type(message).__name__} is no segment")
        # The two channels are not ordered: a session's first segment may overtake its Open.
        deadline = time.monotonic() + self._config.open_within_s
        while self._books.expected(message.session, message.epoch):
            if time.monotonic() > deadline:
                raise ProtocolError(f"a segment of session {message.session} came, but in "
                                    f"{self._config.open_within_s:g} s no Open for it")
            self._sleep(data=False)
            self._tick()
        came = self._links.previous.bytes_in - self._bytes_in  # an emulated link may have held it back
        self._bytes_in += came
        for share in self._books.shares(message.session):
            share.bytes_in += came
        return message

    def _work(self, segment: Segment) -> None:
        start, before = time.monotonic(), self._rows(segment.session)
        try:
            admitted = self._engine.admit(segment)
        except ProtocolError as error:  # as when a segment before it was lost on its way
            if self._config.tensor_parallel:
                raise
            self._give_up(one_line(error))
            admitted = None
        if admitted is None:
            self._credit(segment)  # it took a slot all the same
            return
        hands_on = self._config.tensor_parallel and self._config.stage < self._config.stages
        if hands_on:  # first, for nobody can begin without the next rank
            self._send_on(segment)
        try:
            taps, result = self._engine.compute(admitted, self._tick)
        except PeerLost:
            self._linger()
            raise
        end = time.monotonic()
        seconds = end - start
        rows = max(0, self._rows(segment.session) - before)  # a session that ended meanwhile has none
        for share in self._books.shares(segment.session):
            share.compute_s += seconds
            share.tokens += len(segment.committed)
            share.rows += rows
            if len(admitted.numbers):
                share.slots.append(seconds)
        self._credit(segment)  # first, for this stage may have nothing else to do
        for tap in taps:
            self._send(self._links.control, tap)
        if not hands_on:
            self._send_on(result)
        self._reports.computed(segment, rows, start, end)

    def _rows(self, session: int) -> int:
        """How many of a session's went through the layers so far."""
        return int(self._engine.counters_of(session).get("rows", 0))

    def _credit(self, segment: Segment) -> None:
        """V1 tells D0 that it has room again."""
        if self._config.stage == 1:
            self._send(self._links.control, Credit(segment.session, segment.epoch, segment.run))

    def _send_on(self, message: Segment | Output) -> None:
        """To the next device."""
        before = self._links.next.bytes_out
        self._send(self._links.next, message)
        for share in self._books.shares(message.session):
            share.bytes_out += self._links.next.bytes_out - before

    def _linger(self) -> None:
        """Another rank is lost: go on answering until D0 has found out which, or had time to."""
        deadline = time.monotonic() + self._config.broken_after_s
        while time.monotonic() < deadline:
            self._tick()
            self._sleep(data=False)

    def _send(self, link: ClientLink, message: Message) -> None:
        """Hand ``message`` over, living on while the peer has no room.

        What a session computed is of no use once it is over, and may not reach the next life of a
        peer that is gone; but ranks must all see the same segments.
        """
        data = isinstance(message, Segment | Output | Tap) and not self._config.tensor_parallel
        while not link.send(message):
            self._sleep(data=False, room=link)
            self._tick()
            if data and cast(Segment | Output | Tap, message).session not in self._books:
                return

    def _sleep(self, data: bool = True, room: Link | None = None, most: float = math.inf) -> None:
        """Until something comes, or the next heartbeat or check is due.

        ``most``: seconds that an emulated segment has left; they count as computing, not as waiting.
        """
        start = time.monotonic()
        incoming = [self._links.control, self._links.previous] if data else [self._links.control]
        due = max(0.0, min(self._reports.due_at - start, self._check_at - start, most))
        self._links.transport.wait(incoming, [room] if room else [], due)
        if most == math.inf:
            self._books.waited(time.monotonic() - start)

    # ---- control -------------------------------------------------------------------------------

    def _tick(self, wait: float = 0.0) -> None:
        """What cannot wait for the end of a segment; called between layers, too."""
        if wait > 0:
            self._sleep(data=False, most=wait)
        while (message := self._links.control.receive()) is not None:
            self._obey(message)
        self._notifier.alive()
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            self._check()
        if now >= self._reports.due_at:
            self._reports.beat()

    def _obey(self, message: Message) -> None:
        match message:
            case Prune():
                self._engine.prune(message)
            case Cancel():
                self._engine.cancel(message)
            case Open():
                self._engine.open(message)
                if self._books.open(message.session, message.epoch, message.beside, message.timed):
                    self._breaks = self._links.control.breaks(), self._links.next.breaks()
                    self._open_at = time.monotonic()
            case Close():
                if message.session in self._books:
                    self._reports.last_beat(message.session)
                    self._books.close(message.session)
                    self._reports.beat()  # what this session's end adds to the stage's line
                else:
                    self._books.skip(message.session)
                self._engine.close(message)
            case Shutdown():
                log.info("V%d ends: %s", self._config.stage, message.reason)
                raise Stopped
            case _:
                raise ProtocolError(f"{self._links.control.name}: D0 sent a {type(message).__name__}")

    def _check(self) -> None:
        """Nobody may be left waiting for somebody who is gone."""
        config, links = self._config, self._links
        if config.parent and os.getppid() != config.parent:
            raise PeerLost("the process that started this stage is gone")
        if links.control.lost_for() > config.lost_after_s:
            gone = f"{links.control.name}: no connection to D0 for {config.lost_after_s:g} s"
            if config.parent:
                raise PeerLost(gone)
            if self._books:  # a stage that nobody here started waits for another D0
                self._give_up(gone)
        d0 = "waiting for D0" if links.control.lost_for() else "D0 is there"
        self._notifier.status(f"{self._about}: {d0}")
        self._reports.greet_again()
        apart = links.next.lost_for()
        if bool(apart) != self._apart:
            self._apart = not self._apart
            self._reports.due_at = 0.0  # D0 waits for nothing but this after a loss
        if self._books and (lost := self._lost(min(apart, time.monotonic() - self._open_at))):
            if config.tensor_parallel:
                raise PeerLost(lost)
            self._give_up(lost)

    def _lost(self, apart: float) -> str:
        """What the open sessions have lost with the link to the next device, which has been down for
        ``apart`` seconds of theirs; empty if nothing, or if D0 may still name the device that is to blame."""
        config, name = self._config, self._links.next.name
        broken = self._links.next.breaks() != self._breaks[1]
        if broken and (not apart or apart > config.broken_after_s):
            return f"{name}: the connection broke during a session; messages may be lost"
        if apart > config.lost_after_s:
            return f"{name}: no connection to the next device for {config.lost_after_s:g} s"
        return ""

    def _give_up(self, reason: str) -> None:
        """The open sessions cannot go on, though the stage can: D0 is told, unless it went away itself."""
        log.warning("V%d gives its sessions up: %s", self._config.stage, reason)
        for session in self._books.sessions:
            self._books.close(session)
            self._engine.close(Close(session))
        if self._links.control.breaks() == self._breaks[0]:
            self._reports.failed(reason)


def run_worker(config: WorkerConfig, notifier: Notifier | None = None) -> None:
    """Load the shard and serve until Shutdown or SIGTERM; ``notifier`` is told when it is loaded.

    Whatever goes wrong is told to D0 (Failed), then raised.
    """
    emulation = Emulation.load(Path(config.emulate)) if config.emulate else None
    pair = keys.load(Path(config.key_file)) if config.key_file else None
    transport = (EmulatedTransport(emulation, config.stage, keys=pair, unencrypted=config.unencrypted)
                 if emulation else ZmqTransport(pair, unencrypted=config.unencrypted))
    try:
        links = connect(config, transport)
        try:
            from flowspec_edge.runtime.worker_load import load_engine  # now: it imports torch

            Worker(config, links, *load_engine(config, emulation), notifier).run()
        except Stopped:
            return
        except Exception as error:
            links.control.send(Failed(config.instance, config.stage, one_line(error)))
            raise
    finally:
        transport.close()


def one_line(error: BaseException) -> str:
    """An error as one line; an unexpected one with its type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FlowspecError) else f"{type(error).__name__}: {text}"


def _on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; the way out must not be cut short
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stopped


def serve(path: Path, verbose: bool = False, changes: Mapping[str, Any] | None = None,
          notifier: Notifier | None = None) -> int:
    """Be the worker of a configuration file, with ``changes`` to it; returns the exit code.

    ``notifier`` is told when the shard is loaded, and how the stage is.  An error is one line on stderr.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    try:
        run_worker(WorkerConfig.load(path).model_copy(update=changes or {}), notifier)
    except Stopped:
        return 0
    except Exception as error:
        if not isinstance(error, FlowspecError):
            log.exception("V: unexpected error")
        print(f"flowspec worker: {one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, FlowspecError) else 1
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="One verification device of a flowspec cluster.")
    parser.add_argument("--config", type=Path, required=True, help="a worker's TOML file")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    arguments = parser.parse_args()
    return serve(arguments.config, arguments.verbose)


if __name__ == "__main__":
    sys.exit(main())
