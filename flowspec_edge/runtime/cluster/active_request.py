"""A request in the event loop: its session's state, its losses, and its result with the stages' figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from flowspec_edge.runtime.draft_device.coordinator import Coordinator
from flowspec_edge.runtime.observe.counters import HeartbeatCounters
from flowspec_edge.runtime.observe.power import cluster_energy
from flowspec_edge.runtime.request import RequestHandle, Result

log = logging.getLogger(__name__)

_LATE_SHARE = 0.02  # of the decode time: how late an emulation may be without a warning


class SessionState(Enum):
    OPEN = auto()
    CLOSING = auto()  # the request is over; waiting for the stages' reports
    SUSPENDED = auto()  # the stages are lost; the request will resume in another session
    PAUSED = auto()  # the request gave way to others; it will resume in another session


@dataclass(eq=False)
class ActiveRequest:
    handle: RequestHandle
    coordinator: Coordinator = field(init=False)
    state: SessionState = SessionState.OPEN
    watched: bool = False  # the observer wants the stages' times
    overrun_s: float = 0.0  # by how much D0's own work exceeded the emulated time
    report_deadline: float = 0.0  # of the stages, while closing
    interrupted: bool = False  # the reports of its earlier sessions are not counted
    losses: int = 0  # of stages, in a row without a new token
    tokens_before: int = 0  # at the last loss

    @property
    def session(self) -> int:
        return self.coordinator.builder.session

    def suspend(self) -> None:
        """The stages are lost."""
        self.state = SessionState.SUSPENDED
        self.interrupted = True
        made = len(self.coordinator.tokens)
        self.losses = self.losses + 1 if made == self.tokens_before else 1
        self.tokens_before = made

    def result(self, slot_s: float, bytes_sent: int, stages: Sequence[HeartbeatCounters],
               energy: HeartbeatCounters) -> Result:
        """slot_s      time of one segment in the slowest stage; 0: as the stages report
        bytes_sent  by D0, and received over the control channel
        stages      the stages' final counters of the session
        energy      D0's own (``SessionEnergy.close``)
        """
        total = bytes_sent + sum(
            int(counters.get(kind, 0)) for counters in stages for kind in ("bytes_out", "collective_bytes"))
        slot_s = slot_s or max(counters.get("slot_s", 0.0) for counters in stages)
        result = self.coordinator.result(slot_s, total, tuple(stages))
        if not self.interrupted:  # a lost stage never reported its part
            joules, above_idle = cluster_energy([energy, *stages])
            result = replace(result, stats=replace(result.stats, energy_j=joules,
                                                   energy_above_idle_j=above_idle))
        late = self.overrun_s + sum(counters.get("late_s", 0.0) for counters in stages)
        if len(result.tokens) > 1 and late > _LATE_SHARE * result.stats.decode_s:
            log.warning("emulation: this machine was too slow or too busy by %.2f s in %.2f s of decoding; "
                        "figures are too low", late, result.stats.decode_s)
        return result
