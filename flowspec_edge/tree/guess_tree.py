"""A draft tree that weighs evidence: every node's score is the log probability that it becomes text.

Knows for each node what the draft model and the look-up say of it, and what an estimate makes of that
(``tree.acceptance``); keeps the unsent nodes and those that nobody has expanded in order of that
probability, over all depths and however often it is changed.  Does not know when either is wanted.

Beside the costs of :class:`DraftTree`: new evidence for a node costs time in proportion to the nodes
below it, and nothing costs time for what merely lives on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from flowspec_edge.tree.acceptance import Acceptance, Evidence
from flowspec_edge.tree.draft_tree import DraftTree, Node

HOPELESS = math.log(1e-4)  # a node less likely than this would never be sent, and is not held
_WORTH_DRAFTING = math.log(1e-3)  # the children of one less likely would hardly ever be sent


class GuessTree(DraftTree):
    """One round's tree; ``score`` counts from the round's first root on."""

    def __init__(self, token: int, position: int, first_id: int, acceptance: Acceptance) -> None:
        super().__init__(token, position, "score", first_id)
        self._acceptance = acceptance
        self._unexpanded: list[tuple[float, int, Node]] = []

    def probability(self, node: Node) -> float:
        """That ``node`` becomes text, as far as is known."""
        return math.exp(node.score - self.root.score)

    def drafted(self, parent: Node, tokens: list[int], scores: list[float], estimates: list[float]) -> None:
        """The draft model has named children of ``parent``, with these log confidences, best first; it
        doubts all others.

        ``estimates`` are ``Acceptance.drafted(scores)``: all that a child is worth of which nothing
        else is known.  Absent children (-inf) are none, and hopeless ones are not held.
        """
        parent.expanded = True
        floor = self.root.score + HOPELESS - parent.score
        here = parent.children
        before = list(here.values())
        for token, score, estimate in zip(tokens, scores, estimates, strict=True):
            if token in here:
                here[token].drafted = score
            elif estimate >= floor and score > -math.inf:
                child = self.add(parent, token, parent.score + estimate)
                child.drafted = score
                self._queue_for_expansion(child)
        for child in before:
            self._reweigh(child)

    def looked_up(self, parent: Node, token: int, score: float) -> Node | None:
        """The text has a child of ``parent``, with this log estimate; None: it is hopeless."""
        child = parent.children.get(token)
        if child is not None:
            child.looked_up = score
            self._reweigh(child)
            return child
        worth = self._log_probability(Evidence(-math.inf, score, parent.expanded))
        if parent.score + worth < self.root.score + HOPELESS:
            return None
        child = self.add(parent, token, parent.score + worth)
        child.looked_up = score
        self._queue_for_expansion(child)
        return child

    def unexpanded(self, limit: int) -> list[Node]:
        """At most ``limit`` nodes that the draft model has not been asked about, the likeliest first.

        They leave the queue (:meth:`ask_again`).  A node is among them only if its parent has been
        expanded and its own children may be worth sending; the root never is.
        """
        floor = self.root.score + _WORTH_DRAFTING
        found: list[Node] = []
        early: list[tuple[float, int, Node]] = []  # whose parents are still to be expanded
        while self._unexpanded and len(found) < limit and -self._unexpanded[0][0] >= floor:
            entry = heapq.heappop(self._unexpanded)
            node = entry[2]
            if not node.alive or node.expanded or entry[0] != -node.score or node is self.root:
                continue
            assert node.parent is not None
            if node.parent.expanded:
                if not found or found[-1] is not node:  # queued twice under one score
                    found.append(node)
            else:
                early.append(entry)
        for entry in early:
            heapq.heappush(self._unexpanded, entry)
        return found

    def ask_again(self, nodes: Iterable[Node]) -> None:
        """They were asked about, and nobody answered."""
        for node in nodes:
            self._queue_for_expansion(node)

    def learn(self) -> None:
        """Let every outcome that is known by now improve the estimate; before the path is cut."""
        node: Node | None = self.root
        while node is not None and node.successor >= 0:
            taken = node.children.get(node.successor)
            for child in node.children.values():
                self._acceptance.learn(_evidence(child, node), child is taken)
            node = taken

    def put_back(self, nodes: list[Node]) -> None:
        """They were taken and are not sent after all."""
        for node in nodes:
            self._push(node)

    def _reweigh(self, top: Node) -> None:
        """Bring the score of ``top``, and of all nodes below it, in line with its evidence."""
        assert top.parent is not None
        new = top.parent.score + self._log_probability(_evidence(top, top.parent))
        change = new - top.score
        if not change:
            return
        stack = [top]
        while stack:
            node = stack.pop()
            node.score += change
            if node.number < 0:
                self._push(node)
            if not node.expanded:
                self._queue_for_expansion(node)
            stack.extend(node.children.values())

    def _queue_for_expansion(self, node: Node) -> None:
        heapq.heappush(self._unexpanded, (-node.score, node.id, node))

    def _log_probability(self, evidence: Evidence) -> float:
        return math.log(self._acceptance.probability(evidence))


def _evidence(child: Node, parent: Node) -> Evidence:
    return Evidence(child.drafted, child.looked_up, parent.expanded)
