"""What a stage tells D0 about itself: Hello, heartbeats, figures of ended sessions, failures.

Best effort: a message that does not fit into the queue is dropped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from flowspec_edge.drivers.observe.power import SessionEnergy
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Failed, Heartbeat, Hello, SessionReport
from flowspec_edge.stage.counters import StageCounters
from flowspec_edge.transport.zmq_links import ZmqClientLink, ZmqLink

if TYPE_CHECKING:
    from flowspec_edge.stage.engine import StageEngine


class StatusSender:
    """What tells D0 of a stage; ``due_at``: when the next heartbeat is due (time.monotonic)."""

    def __init__(self, config: WorkerConfig, control: ZmqClientLink, previous: ZmqLink,
                 following: ZmqClientLink, engine: StageEngine, counters: StageCounters, hello: Hello,
                 system_stats: SystemStats, energy: SessionEnergy) -> None:
        """Take the links ``control`` to D0, and ``previous`` and ``following``, to the devices beside this one."""
        self._config = config
        self._control = control
        self._previous = previous
        self._following = following
        self._engine = engine
        self._counters = counters
        self._hello = hello
        self._system_stats = system_stats
        self._energy = energy
        self._greeted = 0  # disconnects of the control link before the last Hello
        self.due_at = 0.0

    def send_hello(self) -> None:
        disconnects = self._control.disconnects()
        hello = replace(self._hello, newest=self._counters.newest)
        if self._control.send(hello):  # else the queue is full of old heartbeats: try again
            self._greeted = disconnects

    def send_hello_again(self) -> None:
        """Send Hello if the connection to D0, or to a new D0, is back."""
        if self._control.disconnects() > self._greeted and not self._control.disconnected_for():
            self.send_hello()

    def send_heartbeat(self) -> None:
        self.due_at = time.monotonic() + self._config.heartbeat_s
        self._energy.update()
        counters = {**self._engine.counters, **self._counters.total.counters(), "since": self._counters.since,
                    "dropped_frames": self._control.dropped + self._previous.dropped,
                    "cache_bytes": self._engine.cache_bytes, "graph_sizes": self._engine.graph_sizes,
                    **self._system_stats.read()}
        self._control.send(Heartbeat(self._config.instance, self._config.stage, counters,
                                     isolated=bool(self._following.disconnected_for())))

    def send_session_report(self, session: int) -> None:
        """Send the final figures, energy included, of an open session that is about to be closed."""
        counters = {**self._engine.counters_of(session), **self._counters.counters(session),
                    **self._energy.close(session)}
        self._control.send(SessionReport(self._config.instance, self._config.stage, session, counters))

    def send_failure(self, reason: str) -> None:
        """Tell D0 that the open sessions cannot continue."""
        self._control.send(Failed(self._config.instance, self._config.stage, reason))


def format_error(error: BaseException) -> str:
    """Format an error as one line; unexpected ones with their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FlowspecError) else f"{type(error).__name__}: {text}"
