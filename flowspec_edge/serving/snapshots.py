"""The draft tree of one moment, and what became of the tree of the moment before.

Knows trees and the text.  Does not know when a snapshot is due or who is shown it.

Two snapshots and the text between their roots say it all: of the nodes that were there before, those
that spell the text were accepted, and of the others those that are gone were pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node


class Leaf(NamedTuple):  # made by the hundred in the thread that drives: the cheapest of its kind
    """A node as it was: ``parent`` is an id, -1 for the root's."""

    id: int
    parent: int
    token: int
    position: int
    score: float
    sent: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tree at a moment.

    text    tokens that are text and come after the root of the snapshot before, up to the text's end
    nodes   the living ones without the root, parents first
    over    the request has ended: nothing of the tree will be text
    """

    session: int
    at: float
    root: Leaf
    nodes: tuple[Leaf, ...]
    text: tuple[int, ...]
    over: bool


def take_snapshot(coordinator: Coordinator, at: float, since: int | None, over: bool) -> Snapshot | None:
    """None if the strategy has no tree, or none yet.  A hundred nodes take a fraction of a millisecond.

    ``since``: the position of the root in the snapshot before; None if there was none.
    """
    strategy = coordinator.strategy
    if coordinator.request.max_new_tokens < 2:
        return None  # a probe: the picture of the last answer is worth more
    if coordinator.finished and not over:
        return None  # its last step may have gone beyond the end; the end's own snapshot tells
    tree = getattr(strategy, "tree", None) if isinstance(strategy, TreeStrategy) else None
    if tree is None:
        return None
    first = tree.root.position if since is None else since
    text = coordinator.tokens[first + 1 - len(coordinator.request.prompt) :]
    return Snapshot(coordinator.ledger.session, at, _leaf(tree.root), tuple(map(_leaf, tree.nodes())),
                    tuple(text), over)


def _leaf(node: Node) -> Leaf:
    parent = -1 if node.parent is None else node.parent.id
    return Leaf(node.id, parent, node.token, node.position, node.score, node.number >= 0)


class TreeEvents:
    """Makes events of snapshots; remembers the last one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: the text of token ids."""
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._last: Snapshot | None = None

    def forget(self) -> None:
        """Begin anew: the next snapshot does not follow on the last one."""
        self._last = None

    def event(self, now: Snapshot) -> dict[str, Any]:
        """The tree with what has gone since the snapshot before.

        nodes: id, parent (-1: the node that the picture begins with), token, text, depth (0: the newest
        root), score (log), state: "drafted", "sent", "accepted", "pruned".  The accepted ones are one
        chain, from the last root to the newest.
        """
        last = self._last if self._last and self._last.session == now.session else None
        self._last = None if now.over else now
        trunk = _trunk(last, now)
        root = trunk[-1]
        alive = () if now.over else now.nodes
        shown = {leaf.id for leaf in (*trunk, *alive)}
        pruned = []
        for leaf in (*(last.nodes if last else ()), *(now.nodes if now.over else ())):  # parents first
            if leaf.id not in shown and leaf.parent in shown:
                shown.add(leaf.id)
                pruned.append(leaf)
        nodes = [self._node(leaf, root, "accepted") for leaf in trunk]
        nodes += [self._node(leaf, root, "pruned") for leaf in pruned]
        nodes += [self._node(leaf, root, "sent" if leaf.sent else "drafted") for leaf in alive]
        return {"session": now.session, "at": now.at, "position": root.position, "root": root.id,
                "root_text": self._text(root.token), "over": now.over, "nodes": nodes}

    def _node(self, leaf: Leaf, root: Leaf, state: str) -> dict[str, Any]:
        return {"id": leaf.id, "parent": leaf.parent, "token": leaf.token, "text": self._text(leaf.token),
                "depth": leaf.position - root.position, "score": round(leaf.score, 3), "state": state}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]


def _trunk(last: Snapshot | None, now: Snapshot) -> list[Leaf]:
    """The text from the root before to the root now, as nodes; the first has no parent.

    A token that was drafted and accepted between the two snapshots is in neither: it gets an id that
    no node has.  What a request's last step accepted beyond its end is not text.
    """
    if last is None:
        return [now.root]
    trunk = [Leaf(last.root.id, -1, last.root.token, last.root.position, last.root.score, True)]
    seen = {(leaf.parent, leaf.token): leaf for leaf in (*last.nodes, *(now.nodes if now.over else ()))}
    for token in now.text:
        before = trunk[-1]
        position = before.position + 1
        if position > now.root.position:
            break
        leaf = seen.get((before.id, token)) or Leaf(-1 - position, before.id, token, position, 0.0, True)
        if position == now.root.position:
            leaf = Leaf(now.root.id, before.id, token, position, now.root.score, True)
        trunk.append(leaf)
    return trunk
