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

from flowspec_edge.tree.acceptance import Acceptance, Evidence
from flowspec_edge.tree.draft_tree import DraftTree, Node

_HOPELESS = math.log(1e-6)  # nobody would ever send it: not held at all


class GuessTree(DraftTree):
    """One round's tree; ``score`` counts from the round's first root on."""

    def __init__(self, token: int, position: int, first_id: int, acceptance: Acceptance) -> None:
        super().__init__(token, position, "score", first_id)
        self._acceptance = acceptance
        self._unexpanded: list[tuple[float, int, Node]] = []

    def probability(self, node: Node) -> float:
        """That ``node`` becomes text, as far as is known."""
        return math.exp(node.score - self.root.score)

    def drafted(self, parent: Node, token: int, score: float) -> Node | None:
        """The draft model names a child of ``parent`` with this log confidence; None: it is hopeless."""
        return self._learned_of(parent, token, drafted=score)

    def looked_up(self, parent: Node, token: int, score: float) -> Node | None:
        """The text has a child of ``parent``, with this log estimate; None: it is hopeless."""
        return self._learned_of(parent, token, looked_up=score)

    def expanded(self, node: Node) -> None:
        """The draft model has named the children of ``node`` that it knows; it doubts all others."""
        node.expanded = True
        for child in node.children.values():
            if child.drafted == -math.inf:
                self._reweigh(child)

    def unexpanded(self, limit: int) -> list[Node]:
        """At most ``limit`` nodes that the draft model has not been asked about, the likeliest first.

        They leave the queue.  A node is among them only if its parent has been expanded; the root never is.
        """
        found: list[Node] = []
        early: list[tuple[float, int, Node]] = []  # whose parents are still to be expanded
        while self._unexpanded and len(found) < limit:
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

    def _learned_of(self, parent: Node, token: int, drafted: float = -math.inf,
                    looked_up: float = -math.inf) -> Node | None:
        child = parent.children.get(token)
        if child is None:
            score = parent.score + self._log_probability(Evidence(drafted, looked_up, parent.expanded))
            if score - self.root.score < _HOPELESS:
                return None
            child = self.add(parent, token, score)
            child.drafted, child.looked_up = drafted, looked_up
            self._queue_for_expansion(child)
            return child
        child.drafted = max(drafted, child.drafted) if drafted == -math.inf else drafted
        child.looked_up = max(looked_up, child.looked_up) if looked_up == -math.inf else looked_up
        self._reweigh(child)
        return child

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
