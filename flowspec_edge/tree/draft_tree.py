"""The draft tree: what D0 believes may come next, what of it was sent, and what came back.

Knows tokens, cumulative scores (FlowSpec paper, eq. 1, as log sums), positions, numbers and the
verified successors.  Does not know where scores come from, or the pipeline.

Growing costs time in proportion to the nodes added, cutting in proportion to the nodes removed
(and the path walked), sending in proportion to the nodes sent: what merely lives on costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["score", "layer"]

# A child that the draft model has named and that is no node yet (``tree.guess_tree``): its token, the log
# confidence of the draft model in it, and the log probability that the target takes it, given its parent.
Named = tuple[int, float, float]


@dataclass(slots=True, eq=False)
class Node:
    """One draft token.

    id         unique in the session, larger than its parent's
    position   absolute position in the text
    score      log of the product of confidences from the first root of the round to here
    number     the ledger's number once sent, else -1
    successor  the token that follows it in the target's text once verified, else -1
    drafted    log confidence of the draft model in it, given its parent; -inf if it did not name it
    looked_up  the same of the look-up in the text (both: evidence for ``tree.guess_tree``)
    named      children that are no nodes yet, the likeliest last (``tree.guess_tree``)
    """

    id: int
    parent: Node | None
    token: int
    position: int
    score: float
    number: int = -1
    successor: int = -1
    alive: bool = True
    expanded: bool = False
    drafted: float = -math.inf
    looked_up: float = -math.inf
    named: list[Named] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)

    def __lt__(self, other: Node) -> bool:
        """By age, for queues that hold a node twice under one score."""
        return self.id < other.id


class DraftTree:
    """A tree under one root.  The root is committed text; everything else is a guess."""

    def __init__(self, token: int, position: int, order: Order = "score", first_id: int = 0) -> None:
        self._next_id = first_id + 1
        self._order = order
        self._queue: list[tuple[tuple[int, int], float, int, Node]] = []
        self.sent: dict[int, Node] = {}  # by number: alive, sent (verified or not)
        self.root = Node(first_id, None, token, position, 0.0)
        self.size = 0  # living nodes, root not counted
        self.generation = 0  # expansions begun; in layer order an older one goes first

    @property
    def next_id(self) -> int:
        """The id the next node would get: where the next round's tree goes on counting."""
        return self._next_id

    def add(self, parent: Node, token: int, score: float) -> Node:
        """The child of ``parent`` that carries ``token``, made and queued if it is new.

        A child that exists and was not sent yet takes the new score, since a later expansion
        knows more context (FlowSpec, III-D); one that was sent is returned as it is.
        """
        node = parent.children.get(token)
        if node is None:
            node = Node(self._next_id, parent, token, parent.position + 1, score)
            self._next_id += 1
            self.size += 1
            parent.children[token] = node
            self._push(node)
        elif node.number < 0 and node.score != score:
            node.score = score
            if self._order == "score":
                self._push(node)
        return node

    def _push(self, node: Node) -> None:
        # Falling score, then age: a parent never comes after its child.  In layer order whole
        # expansions queue up, each layer by layer.
        rank = (self.generation, node.position) if self._order == "layer" else (0, 0)
        heapq.heappush(self._queue, (rank, -node.score, node.id, node))

    def take(self, limit: int) -> list[Node]:
        """At most ``limit`` unsent nodes, best first, parents before children; they leave the queue.

        A node whose ancestors are still unsent brings them along: re-scoring may have put a
        parent behind its child.
        """
        taken: list[Node] = []
        chosen: set[int] = set()
        while self._queue and len(taken) < limit:
            _, score, _, node = self._queue[0]
            if not node.alive or node.number >= 0 or node.id in chosen or self._outdated(node, -score):
                heapq.heappop(self._queue)
                continue
            chain: list[Node] = []
            step: Node | None = node
            while step is not None and step is not self.root and step.number < 0 and step.id not in chosen:
                chain.append(step)
                step = step.parent
            chain.reverse()
            room = limit - len(taken)
            taken += chain[:room]
            chosen.update(n.id for n in chain[:room])
            if len(chain) <= room:
                heapq.heappop(self._queue)
        return taken

    def _outdated(self, node: Node, score: float) -> bool:
        """Whether ``node`` was queued again under a newer score."""
        return self._order == "score" and score != node.score

    def mark_sent(self, node: Node, number: int) -> None:
        """``node`` went into the pipeline under ``number``."""
        node.number = number
        self.sent[number] = node

    def record(self, number: int, successor: int) -> bool:
        """The target says that ``successor`` follows ``number``; False if that node is gone."""
        node = self.sent.get(number)
        if node is None:
            return False
        node.successor = successor
        return True

    def walk(self) -> tuple[list[Node], int]:
        """Follow the verified successors from the root: (nodes accepted, the token that missed).

        The child that carries the successor is followed wherever it is: verified, in flight or
        still queued (continuous condition, eq. 2).  -1: no miss, the last node (or the root) is
        not verified yet.
        """
        path: list[Node] = []
        node = self.root
        while node.successor >= 0:
            child = self._child(node, node.successor)
            if child is None:
                return path, node.successor
            path.append(child)
            node = child
        return path, -1

    def _child(self, parent: Node, token: int) -> Node | None:
        return parent.children.get(token)

    def cut(self, path: list[Node]) -> None:
        """Make the end of ``path`` (children of the root, in order) the root; drop all else."""
        for child in path:
            old, self.root = self.root, child
            self.size -= 1
            child.parent = None
            for token, sibling in old.children.items():
                if token != child.token:
                    self._drop(sibling)
            self.sent.pop(old.number, None)
            old.alive = False
            old.children = {}

    def _drop(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            node.alive = False
            self.size -= 1
            if node.number >= 0:
                self.sent.pop(node.number, None)
            stack.extend(node.children.values())

    def discard(self, node: Node) -> None:
        """Drop a node and everything below it."""
        if node.parent is not None and node.alive:
            del node.parent.children[node.token]
            self._drop(node)

    def nodes(self) -> Iterator[Node]:
        """All living nodes, parents before children, root excluded; for selection and tests."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
