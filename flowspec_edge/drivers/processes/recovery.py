"""Recovery after a lost stage: restart the processes started here, and wait until all stages are back.

A stage is back when it has said Hello, perhaps before the loss, and a heartbeat after the loss says that it can
reach the next device.
Processes started here that are silent or have ended are restarted. Stages on other machines are restarted by
their service manager, or reconnect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import ClusterState, ClusterStatus
from flowspec_edge.d0.run_events import StagesBack, StagesLost, StagesMissing
from flowspec_edge.drivers.processes.membership import StageBroken, StageState
from flowspec_edge.drivers.processes.stage_links import ADVICE, StageLinks
from flowspec_edge.drivers.processes.subprocesses import WorkerProcesses
from flowspec_edge.errors import PeerLost

log = logging.getLogger(__name__)

_POLL_S = 0.05
_MAX_STARTS = 5  # restarts of a stage after one loss
_PAUSE_S = 0.5  # before the second start; doubled every time
_LATE_S = 1.5  # a stage without a heartbeat for so long after a loss is missing; three were due


class Recovery:
    """Runs in the thread that drives the cluster; any thread may read ``status`` (RUNNING or RECOVERING)."""

    def __init__(self, links: StageLinks, workers: WorkerProcesses, within: float, observer: Observer,
                 why_ended: Callable[[], str | None]) -> None:
        """Set up the recovery of lost stages.

        within     seconds until all stages must be back; 0: every loss is final
        why_ended  returns why a stage that was started elsewhere has ended for good, or None
        """
        self.status = ClusterStatus(ClusterState.RUNNING)
        self._links = links
        self._workers = workers
        self._within = within
        self._observer = observer
        self._why_ended = why_ended
        self._lost_at = 0.0
        self._deadline = 0.0
        self._missing: set[int] = set()  # the stages that the observer was told of
        self._starts: dict[int, int] = {}  # since the loss, by stage
        self._start_at: dict[int, float] = {}  # earliest time of the next restart, by stage
        self._failed_start = ""  # how the last restarted process ended, if it has

    def begin(self, error: PeerLost) -> None:
        """Wait for all stages from now on; also called for a second loss during recovery.

        Raises ``error`` if no recovery is possible.
        """
        now = time.monotonic()
        if self.status.state is ClusterState.RUNNING:
            self._lost_at, self._deadline = now, now + self._within
            self._starts.clear()
            self._start_at.clear()
            self._failed_start = ""
        silent = self._links.members.silent(now)
        self._note_missing({*silent, *([error.stage] if isinstance(error, StageBroken) else ())})
        if now >= self._deadline or self._why_ended() is not None:
            raise error
        outage = str(error).removesuffix(ADVICE)
        self.status = ClusterStatus(ClusterState.RECOVERING, outage)
        log.warning("%s; waiting up to %.0f s for all stages to be back", outage, self._deadline - now)
        self._observer.observe(StagesLost(now, outage))
        self._links.members.expect_all()
        if isinstance(error, StageBroken) and self._workers.pids:
            self._restart({error.stage: outage})

    def poll(self) -> bool:
        """Check the stages once, briefly; return whether all are back.

        PeerLost, naming the missing stages, at the deadline or when a stage ends repeatedly.
        """
        members = self._links.members
        silent: list[int] = []
        broken: dict[int, str] = {}
        try:
            self._links.collect(lambda message: None)
            silent = members.silent(time.monotonic())
        except PeerLost as error:  # wait for the stage's next heartbeat, or its end
            log.info("%s", error)
            if isinstance(error, StageBroken):  # more of its faults may be queued before valid messages
                broken[error.stage] = str(error)
                members.expect_all()
        if self._workers.pids:
            self._restart({**{stage: f"V{stage} is silent" for stage in silent}, **broken,
                           **self._workers.ended()})
        self._note_missing({*silent, *broken})
        if (reason := self._why_ended()) is not None:
            raise PeerLost(reason + ADVICE)
        absent = members.absent()
        if not absent and self._links.reaches_v1 and not self._workers.ended():
            return True
        if time.monotonic() >= self._deadline:
            missing = ", ".join(absent) if absent else "V1 (D0 cannot reach it)"
            raise PeerLost(f"{self.status.outage}; not back within {self._within:g} s: "
                           f"{missing}{self._failed_start}")
        self._links.wait(_POLL_S)
        return False

    def end(self) -> None:
        self.status = ClusterStatus(ClusterState.RUNNING)
        now = time.monotonic()
        self._missing = set()
        log.warning("all stages are back after %.1f s", now - self._lost_at)
        self._observer.observe(StagesBack(now))

    def _note_missing(self, lost: Collection[int]) -> None:
        """Tell the observer which stages are missing, if this has changed.

        Missing are stages that were lost, until their heartbeat says that they are ready, and stages that have been
        silent
        since the loss.
        """
        now, members = time.monotonic(), self._links.members
        late = members.in_state(StageState.ABSENT) if now > self._lost_at + _LATE_S else set()
        back = members.in_state(StageState.READY)
        missing = (self._missing - back) | {*lost, *self._workers.ended()} | late
        if missing != self._missing:
            self._missing = missing
            self._observer.observe(StagesMissing(now, sorted(missing)))

    def _restart(self, causes: Mapping[int, str]) -> None:
        """Restart these stages' processes, with exponential backoff."""
        now = time.monotonic()
        due_causes = {stage: cause for stage, cause in causes.items() if now >= self._start_at.get(stage, 0.0)}
        if not due_causes:
            return
        for stage, cause in due_causes.items():
            starts = self._starts.get(stage, 0)
            if starts == _MAX_STARTS:
                self._deadline = now
                raise PeerLost(f"{cause}; restarted {starts} times without success")
            if starts:
                self._failed_start = f" ({cause})"
            log.warning("%s: restarting it", cause)
        stages = sorted(due_causes)
        for stage in stages:
            self._start_at[stage] = now + _PAUSE_S * 2 ** self._starts.get(stage, 0)
            self._starts[stage] = self._starts.get(stage, 0) + 1
            self._links.members.forget(stage)
        self._workers.restart(stages, self._deadline - now)
