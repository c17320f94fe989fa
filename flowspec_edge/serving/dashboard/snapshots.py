"""Snapshots of the draft tree, and the differences between consecutive ones.

Two snapshots and the text between their roots suffice: nodes of the earlier one that spell the text were
accepted; others that are missing from the later one were pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec_edge.runtime.draft_device.coordinator import Coordinator
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node


class NodeState(NamedTuple):  # a hundred a snapshot, in the cluster's thread: has to be cheap
    """``parent`` is an id, -1 for the root's."""

    id: int
    parent: int
    token: int
    position: int
    score: float
    sent: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """text   tokens of the answer since the previous snapshot's root
    nodes  the living ones without the root, parents first
    over   the request has ended: no node of the tree will become text
    """

    session: int
    at: float
    root: NodeState
    nodes: tuple[NodeState, ...]
    text: tuple[int, ...]
    over: bool


def take_snapshot(coordinator: Coordinator, at: float, since: int | None, over: bool) -> Snapshot | None:
    """Return None if the strategy has no tree, or none yet. ``since``: position of the previous snapshot's
    root; None: there was none."""
    strategy = coordinator.strategy
    if coordinator.request.max_new_tokens < 2:
        return None  # a probe: the page goes on showing the last answer
    if coordinator.finished and not over:
        return None  # its last step may have gone beyond the end; the final snapshot shows it
    if not isinstance(strategy, TreeStrategy) or strategy.tree.root.position < 0:
        return None  # below 0 until the prompt is read
    tree = strategy.tree
    first = tree.root.position if since is None else since
    text = coordinator.tokens[first + 1 - len(coordinator.request.prompt) :]
    return Snapshot(coordinator.builder.session, at, _state_of(tree.root),
                    tuple(map(_state_of, tree.nodes())), tuple(text), over)


def _state_of(node: Node) -> NodeState:
    parent = -1 if node.parent is None else node.parent.id
    return NodeState(node.id, parent, node.token, node.position, node.score, node.number >= 0)


class TreeEvents:
    """Converts snapshots to the page's ``tree`` events."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: the text of token ids."""
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
        shown = {node.id for node in (*trunk, *alive)}
        pruned = []
        for node in (*(last.nodes if last else ()), *(now.nodes if now.over else ())):  # parents first
            if node.id not in shown and node.parent in shown:
                shown.add(node.id)
                pruned.append(node)
        nodes = [self._node(node, root, "accepted") for node in trunk]
        nodes += [self._node(node, root, "pruned") for node in pruned]
        nodes += [self._node(node, root, "sent" if node.sent else "drafted") for node in alive]
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
    """Return the text between the two roots as nodes; the first has no parent.

    A token that was drafted and accepted between the snapshots is in neither: it gets an unused id. Tokens
    that a request's last step accepted beyond its end are not text.
    """
    if last is None:
        return [now.root]
    trunk = [NodeState(last.root.id, -1, last.root.token, last.root.position, last.root.score, True)]
    seen = {(node.parent, node.token): node for node in (*last.nodes, *(now.nodes if now.over else ()))}
    for token in now.text:
        before = trunk[-1]
        position = before.position + 1
        if position > now.root.position:
            break
        node = seen.get((before.id, token)) or NodeState(-1 - position, before.id, token, position, 0.0, True)
        if position == now.root.position:
            node = NodeState(now.root.id, before.id, token, position, now.root.score, True)
        trunk.append(node)
    return trunk
