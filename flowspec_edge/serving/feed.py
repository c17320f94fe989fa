"""What the page is told of: an observer that notes, in the thread that drives the cluster.

Knows what is worth noting and how little of it while nobody watches.  Does not know who watches, HTTP,
or what the page looks like; what is made of the notes is made in another thread (``live``).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from flowspec_edge.messages import Cancel, Computed, Credit, Heartbeat, Output, Prune, Segment, Tap
from flowspec_edge.runtime.coordinator import Coordinator, Draft
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.request import Result
from flowspec_edge.runtime.sessions import Job
from flowspec_edge.runtime.stage_clocks import StageClocks
from flowspec_edge.serving.boards import Boards
from flowspec_edge.serving.figures import Figures
from flowspec_edge.serving.snapshots import Snapshot, take_snapshot

_MOST_FLOW = 8192  # notes of a tenth of a second; more are not looked at by anybody
_MOST_TREES = 64
_TREE_S = 0.2  # between two snapshots
_DRIFT_S = 1e-5  # that a stage's clock may gain on D0's from one message to the next


class Feed(Observer):
    """Notes for any number of viewers.

    ``watched`` is set from outside; while it is False nothing but what lasts is noted: heartbeats, how
    many tokens and rounds there are, losses.  The other thread takes notes with :meth:`take_flow` and
    :meth:`take_trees`, and reads ``boards``, ``figures`` and ``lost_why``.
    """

    def __init__(self) -> None:
        self.watched = False
        self.boards = Boards()
        self.figures = Figures()
        self.lost_why: str | None = None  # why the stages cannot go on, while they cannot
        self._clocks = StageClocks(_DRIFT_S)
        self._flow: deque[dict[str, Any]] = deque(maxlen=_MOST_FLOW)
        self._trees: deque[Snapshot] = deque(maxlen=_MOST_TREES)
        self._open: dict[int, Coordinator] = {}  # by session, the oldest first
        self._seen: tuple[int, int] | None = None  # session and root's position of the newest snapshot
        self._due = 0.0  # when the next one is

    # ---- in the thread that drives ----------------------------------------------------------------

    @property
    def wants_times(self) -> bool:
        return self.watched

    def opened(self, coordinator: Coordinator, at: float) -> None:
        self._open[coordinator.ledger.session] = coordinator
        self.figures.begun(coordinator, at)

    def sent(self, message: Segment | Prune | Cancel, at: float) -> None:
        if not self.watched:
            return
        note: dict[str, Any] = {"session": message.session, "at": at}
        if isinstance(message, Segment):
            note |= {"kind": "sent", "run": message.run, "rows": len(message.numbers)}
            self.boards.sent(len(message.numbers))
        elif isinstance(message, Prune):
            note |= {"kind": "pruned", "kept": len(message.keep)}
        else:
            note |= {"kind": "cancelled", "runs": list(message.runs)}
        self._flow.append(note)
        self._look(at)

    def arrived(self, message: Output | Credit | Tap | Computed, at: float) -> None:
        if not self.watched:
            return
        if isinstance(message, Output):
            self._flow.append({"kind": "returned", "session": message.session, "run": message.run,
                               "rows": len(message.numbers), "at": at})
        elif isinstance(message, Computed):
            self._clocks.learn(message, at)
            start, end = self._clocks.times(message)
            self._flow.append({"kind": "computed", "session": message.session, "run": message.run,
                               "place": message.stage, "rows": message.rows, "start": start, "end": end})

    def worked(self, job: Job, start: float, end: float) -> None:
        kind = "draft" if isinstance(job.task, Draft) else "verify"
        if kind == "verify":
            self.figures.moved(job.coordinator, end)
        if not self.watched:
            return
        self._flow.append({"kind": kind, "session": job.coordinator.ledger.session, "start": start,
                           "end": end})
        self.boards.computed(end - start)
        self._look(end)

    def settled(self, coordinator: Coordinator, result: Result, at: float) -> None:
        self.figures.ended(coordinator, result)
        if self.watched:
            self._flow.append({"kind": "ended", "session": coordinator.ledger.session, "at": at})
            if coordinator is self._oldest():
                self._snap(coordinator, at, over=True)
        self._open.pop(coordinator.ledger.session, None)

    def failed(self, coordinator: Coordinator, at: float) -> None:
        self.figures.failed(coordinator)
        self._open.pop(coordinator.ledger.session, None)

    def heard(self, beat: Heartbeat, at: float) -> None:
        if "closed" not in beat.counters:  # of one session alone
            self.boards.heard(beat.stage, beat.counters, at)

    def lost(self, reason: str, at: float) -> None:
        self.lost_why = reason
        self._clocks = StageClocks(_DRIFT_S)
        self._open.clear()  # those that go on are opened again
        self.figures.lost()

    def back(self, at: float) -> None:
        self.lost_why = None

    def _oldest(self) -> Coordinator | None:
        return next(iter(self._open.values()), None)

    def _look(self, at: float) -> None:
        """Take a snapshot of the oldest request's tree if one is due."""
        if at >= self._due and (oldest := self._oldest()) is not None:
            self._snap(oldest, at)

    def _snap(self, coordinator: Coordinator, at: float, over: bool = False) -> None:
        session = coordinator.ledger.session
        since = self._seen[1] if self._seen and self._seen[0] == session else None
        snapshot = take_snapshot(coordinator, at, since, over)
        if snapshot is not None:
            self._due = at + _TREE_S
            self._seen = (session, snapshot.root.position)
            self._trees.append(snapshot)

    # ---- in any other ------------------------------------------------------------------------------

    def take_flow(self) -> list[dict[str, Any]]:
        """What has moved since the last call, in the order in which D0 saw it."""
        return _drain(self._flow)

    def take_trees(self) -> list[Snapshot]:
        """The snapshots since the last call."""
        return _drain(self._trees)


def _drain(notes: deque[Any]) -> list[Any]:
    """Everything that is there now; another thread may go on appending."""
    return [notes.popleft() for _ in range(len(notes))]
