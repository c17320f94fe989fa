"""A reader of the events that takes notes for the page in the cluster's thread; the event loop's thread takes them.

Two snapshots of the draft tree and the text between their roots suffice to show what became of its nodes.
Nodes of the earlier snapshot that spell the text were accepted; its other nodes that are missing from the
later snapshot were pruned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.run_events import (
    Cancelled,
    DraftDeviceWork,
    OutputArrived,
    Pruned,
    RunEvent,
    SegmentSent,
    SessionEnded,
    SessionEvent,
    SessionOpened,
    StagesBack,
    StagesLost,
    StageTimes,
)
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.drivers.observe.timeline import StageClocks
from flowspec_edge.serving.dashboard.stats import Boards, RequestStats, with_tree
from flowspec_edge.tree.draft_tree import Node


class NodeState(NamedTuple):  # cheap, because the cluster's thread makes a hundred a snapshot
    """A node of a snapshot. ``parent`` is an id; the root's is -1."""

    id: int
    parent: int
    token: int
    position: int
    score: float
    is_sent: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the page shows of a request at one moment.

    text   tokens of the answer since the previous snapshot's root
    nodes  the tree's nodes without the root, parents first
    over   whether the request has ended, so that no node of the tree will become text
    """

    session: int
    at: float
    root: NodeState
    nodes: tuple[NodeState, ...]
    text: tuple[int, ...]
    over: bool


def take_snapshot(draft_session: DraftSession, at: float, since: int | None, over: bool) -> Snapshot | None:
    """Return a snapshot of the request's tree; None if there is no tree yet, or none to show.

    ``since``: position of the previous snapshot's root; None if there was no snapshot.
    """
    strategy = with_tree(draft_session)
    if draft_session.finished and not over:
        return None  # its last step may have gone beyond the end; the final snapshot shows it
    if strategy is None or strategy.tree.root.position < 0:
        return None  # below 0 until the prompt is read
    tree = strategy.tree
    first = tree.root.position if since is None else since
    text = draft_session.tokens[first + 1 - len(draft_session.request.prompt) :]
    return Snapshot(draft_session.builder.session, at, _state_of(tree.root),
                    tuple(map(_state_of, tree.nodes())), tuple(text), over)


def _state_of(node: Node) -> NodeState:
    parent = -1 if node.parent is None else node.parent.id
    return NodeState(node.id, parent, node.token, node.position, node.score, node.number >= 0)


class TreeEvents:
    """Converts snapshots to the page's ``tree`` events."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Set up without requests; ``decode``: the text of token ids."""
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._last: Snapshot | None = None

    def forget(self) -> None:
        self._last = None

    def event(self, now: Snapshot) -> dict[str, Any]:
        """Return the tree, and the nodes that have left it since the last snapshot.

        nodes: id, parent (-1: the first node shown), token, text, depth (0: the newest root), score (log),
        state: "drafted", "sent", "accepted", "pruned". The accepted ones are one chain between the two roots.
        """
        last = self._last if self._last and self._last.session == now.session else None
        self._last = None if now.over else now
        trunk = _trunk(last, now)
        root = trunk[-1]
        alive = () if now.over else now.nodes
        visible = {node.id for node in (*trunk, *alive)}
        pruned = []
        for node in (*(last.nodes if last else ()), *(now.nodes if now.over else ())):  # parents first
            if node.id not in visible and node.parent in visible:
                visible.add(node.id)
                pruned.append(node)
        nodes = [self._node(node, root, "accepted") for node in trunk]
        nodes += [self._node(node, root, "pruned") for node in pruned]
        nodes += [self._node(node, root, "sent" if node.is_sent else "drafted") for node in alive]
        return {"session": now.session, "at": now.at, "position": root.position, "root": root.id,
                "root_text": self._text(root.token), "over": now.over, "nodes": nodes}

    def _node(self, node: NodeState, root: NodeState, state: str) -> dict[str, Any]:
        return {"id": node.id, "parent": node.parent, "token": node.token, "text": self._text(node.token),
                "depth": node.position - root.position, "score": round(node.score, 3), "state": state}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]


def _trunk(last: Snapshot | None, now: Snapshot) -> list[NodeState]:
    """Return the text from the last root to the present one as nodes; the first node has no parent.

    A token that was both drafted and accepted between the two snapshots is in neither of them; its node gets an id
    that no other node has. Tokens that a request's last step accepted beyond the request's end are left out.
    """
    if last is None:
        return [now.root]
    trunk = [NodeState(last.root.id, -1, last.root.token, last.root.position, last.root.score, True)]
    nodes_by_edge = {(node.parent, node.token): node for node in (*last.nodes, *(now.nodes if now.over else ()))}
    for token in now.text:
        before = trunk[-1]
        position = before.position + 1
        if position > now.root.position:
            break
        node = nodes_by_edge.get((before.id, token)) or NodeState(-1 - position, before.id, token, position, 0.0, True)
        if position == now.root.position:
            node = NodeState(now.root.id, before.id, token, position, now.root.score, True)
        trunk.append(node)
    return trunk


_MAX_FLOW = 8192  # events between two calls of take_flow, a tenth of a second apart
_MAX_TREES = 64
_TREE_S = 0.2  # between two snapshots
_DRIFT_S = 1e-5  # that a stage's clock may gain on D0's from one message to the next


class Feed(Observer):
    """Records events of the cluster for the page's viewers.

    The thread of the event loop reads the records and sends them to every viewer.  The server sets ``watched`` while
    a viewer is connected.  Without one, the feed records only events for the statistics and the boards' state.
    """

    def __init__(self) -> None:
        self._flow: deque[SessionEvent | StagesLost] = deque(maxlen=_MAX_FLOW)
        self.watched = False
        self.boards = Boards()
        self.stats = RequestStats()
        self.loss_reason: str | None = None  # why the stages cannot continue; None while they can
        self._trees: deque[Snapshot] = deque(maxlen=_MAX_TREES)
        self._open: dict[int, DraftSession] = {}  # by session, the oldest first
        self._newest_root: tuple[int, int] | None = None  # session and root's position of the newest snapshot
        self._next_snapshot_at = 0.0  # when the next snapshot is

    @property
    def wants_times(self) -> bool:
        return self.watched

    def observe(self, event: RunEvent) -> None:
        self.stats.observe(event)
        if self.watched or not isinstance(event, SegmentSent | DraftDeviceWork):
            self.boards.observe(event)
        if self.watched and isinstance(event, SessionEvent | StagesLost):
            self._flow.append(event)
        match event:
            case SessionOpened():
                if (draft_session := event.draft_session()) is not None:
                    self._open[event.session] = draft_session
            case SegmentSent() | Pruned() | Cancelled() | DraftDeviceWork():
                if self.watched:
                    self._snap_if_due(event.at)
            case SessionEnded():
                self._leave_tree(event.session, event.at)
                self._open.pop(event.session, None)
            case StagesLost():
                self.loss_reason = event.reason
                if (displayed := self._displayed_session()) is not None:
                    self._leave_tree(displayed.builder.session, event.at)
                self._open.clear()  # requests that continue are opened again
            case StagesBack():
                self.loss_reason = None

    def _displayed_session(self) -> DraftSession | None:
        """Return the oldest request that has a tree to show: beside it others may guess without one."""
        return next(filter(with_tree, self._open.values()), None)

    def _snap_if_due(self, at: float) -> None:
        if at >= self._next_snapshot_at and (draft_session := self._displayed_session()) is not None:
            self._snap(draft_session, at)

    def _leave_tree(self, session: int, at: float) -> None:
        """Nothing of this session's tree becomes text any more."""
        draft_session = self._displayed_session()
        if self.watched and draft_session is not None and draft_session.builder.session == session:
            self._snap(draft_session, at, over=True)

    def _snap(self, draft_session: DraftSession, at: float, over: bool = False) -> None:
        session = draft_session.builder.session
        since = self._newest_root[1] if self._newest_root and self._newest_root[0] == session else None
        snapshot = take_snapshot(draft_session, at, since, over)
        if snapshot is not None:
            self._next_snapshot_at = at + _TREE_S
            self._newest_root = (session, snapshot.root.position)
            self._trees.append(snapshot)

    # ---- in the event loop's thread ----------------------------------------------------------------

    def take_flow(self) -> list[SessionEvent | StagesLost]:
        """Return the timeline's events since the last call."""
        return _drain(self._flow)

    def take_trees(self) -> list[Snapshot]:
        """Return the snapshots since the last call."""
        return _drain(self._trees)


class FlowEvents:
    """Converts the timeline's events to the page's ``flow`` events (docs/reference/metrics.md)."""

    def __init__(self) -> None:
        self._clocks = StageClocks(_DRIFT_S)

    def event(self, event: SessionEvent | StagesLost) -> dict[str, Any] | None:
        """Return None for an event that the page does not show."""
        match event:
            case StagesLost(at=at):
                self._clocks = StageClocks(_DRIFT_S)
                return {"kind": "lost", "at": at}
            case StageTimes(times=times):
                self._clocks.learn(times, event.at)
                start, end = self._clocks.times(times)
                about: dict[str, Any] = {"kind": "computed", "run": times.run, "place": times.stage,
                                         "rows": times.rows, "start": start, "end": end}
            case DraftDeviceWork():
                about = {"kind": event.kind, "start": event.start, "end": event.at}
            case SegmentSent():
                about = {"kind": "sent", "run": event.run, "rows": len(event.numbers), "at": event.at}
            case OutputArrived():
                about = {"kind": "returned", "run": event.run, "rows": event.rows, "at": event.at}
            case Pruned():
                about = {"kind": "pruned", "kept": len(event.keep), "at": event.at}
            case Cancelled():
                about = {"kind": "cancelled", "runs": list(event.runs), "at": event.at}
            case SessionEnded():
                about = {"kind": "ended", "at": event.at}
            case _:
                return None
        return {"session": event.session, **about}


def _drain(notes: deque[Any]) -> list[Any]:
    """Remove the current items; another thread may keep appending."""
    return [notes.popleft() for _ in range(len(notes))]
