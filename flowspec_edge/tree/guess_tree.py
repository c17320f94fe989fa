"""A draft tree that weighs evidence: every node's score is the log probability that it becomes text.

Knows for each node what the draft model and the look-up say of it, and what an estimate makes of that
(``tree.acceptance``); keeps the unsent nodes and those that nobody has expanded in order of that
probability, over all depths and however often it is changed.  Does not know when either is wanted.

A draft pass names ten children of each node, and hardly two of them are ever sent or expanded.  So a
named child is no node yet: it becomes one when it is the likeliest that there is, when the look-up
finds it too, or when the target has chosen it.

Beside the costs of :class:`DraftTree`: new evidence for a node costs time in proportion to the nodes
below it, and nothing costs time for what merely lives on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from flowspec_edge.tree.acceptance import Acceptance, Evidence
from flowspec_edge.tree.draft_tree import DraftTree, Named, Node

HOPELESS = math.log(1e-4)  # a node less likely than this is not held, nor sent if it has become so
_WORTH_DRAFTING = math.log(1e-3)  # the children of one less likely would hardly ever be sent

_Queue = list[tuple[float, int, Node]]  # a heap of (-score, id, node); outdated where the scores differ


class GuessTree(DraftTree):
    """One round's tree; ``score`` counts from the round's first root on."""

    def __init__(self, token: int, position: int, first_id: int, acceptance: Acceptance) -> None:
        super().__init__(token, position, "score", first_id)
        self._acceptance = acceptance
        self._unsent: _Queue = []
        self._unexpanded: _Queue = []
        self._naming: _Queue = []  # nodes that have named children, by the likeliest of these

    def probability(self, node: Node) -> float:
        """That ``node`` becomes text, as far as is known."""
        return math.exp(node.score - self.root.score)

    # ---- evidence ---------------------------------------------------------------------------

    def drafted(self, parent: Node, tokens: list[int], scores: list[float], estimates: list[float]) -> None:
        """The draft model has named children of ``parent``, with these log confidences, best first; it
        doubts those that the look-up alone has named.

        ``estimates`` are ``Acceptance.drafted(scores)``: all that a child is worth of which nothing
        else is known.  Absent children (-inf) are none, and hopeless ones are not held.  Asked of the
        same parent again, the model takes back what it named before, unless that is a node by now.
        """
        parent.expanded = True
        here = parent.children
        before = list(here.values())
        named = list(zip(tokens, scores, estimates, strict=True))
        if here:
            for token, score, _ in named:
                if token in here:
                    here[token].drafted = score
            named = [child for child in named if child[0] not in here]
        floor = self.root.score + HOPELESS - parent.score
        while named and (named[-1][2] < floor or named[-1][1] == -math.inf):
            named.pop()
        named.reverse()
        parent.named = named
        self._queue_named(parent)
        for child in before:
            self._reweigh(child)

    def looked_up(self, parent: Node, token: int, score: float) -> Node | None:
        """The text has a child of ``parent``, with this log estimate; None: it is hopeless."""
        child = self._child(parent, token)
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

    def learn(self) -> None:
        """Let every outcome that is known by now improve the estimate; before the path is cut."""
        node: Node | None = self.root
        while node is not None and node.successor >= 0:
            taken = self._child(node, node.successor)
            for child in node.children.values():
                self._acceptance.learn(_evidence(child, node), child is taken)
            for _, score, _ in reversed(node.named):
                self._acceptance.learn(Evidence(score, -math.inf, True), False)
            node = taken

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
            self._queue_named(node)
            stack.extend(node.children.values())

    def _log_probability(self, evidence: Evidence) -> float:
        return math.log(self._acceptance.probability(evidence))

    # ---- in order of probability ------------------------------------------------------------

    def take(self, limit: int) -> list[Node]:
        """At most ``limit`` unsent nodes, likeliest first, none hopeless; they leave the queue.

        Parents come before their children, since no child is likelier than its parent.
        """
        return list(islice(self._likeliest(self._unsent, HOPELESS, lambda node: node.number < 0), limit))

    def put_back(self, nodes: list[Node]) -> None:
        """They were taken and are not sent after all."""
        for node in nodes:
            self._push(node)

    def unexpanded(self, limit: int) -> list[Node]:
        """At most ``limit`` nodes that the draft model has not been asked about, the likeliest first.

        They leave the queue (:meth:`ask_again`).  A node is among them only if its parent has been
        expanded and its own children may be worth sending; the root never is.
        """
        found: list[Node] = []
        early: list[Node] = []  # whose parents are still to be expanded
        nodes = self._likeliest(self._unexpanded, _WORTH_DRAFTING, lambda node: not node.expanded)
        while len(found) < limit and (node := next(nodes, None)) is not None:
            assert node.parent is not None
            (found if node.parent.expanded else early).append(node)
        self.ask_again(early)
        return found

    def ask_again(self, nodes: Iterable[Node]) -> None:
        """They were asked about, and nobody answered."""
        for node in nodes:
            self._queue_for_expansion(node)

    def _likeliest(self, queue: _Queue, floor: float, wanted: Callable[[Node], bool]) -> Iterator[Node]:
        """The living nodes of a queue that are wanted, likeliest first, none less likely than exp(``floor``)
        and never the root; they leave the queue."""
        floor += self.root.score
        last = None
        while True:
            while queue and not (_is_valid(queue[0]) and wanted(queue[0][2])):
                heapq.heappop(queue)
            self._make_nodes(queue, floor)
            if not queue or -queue[0][0] < floor:
                return
            node = heapq.heappop(queue)[2]
            if node is not last and node is not self.root:  # a node may be queued twice under one score
                yield node
            last = node

    def _make_nodes(self, queue: _Queue, floor: float) -> None:
        """Of the named children that are likelier than all that ``queue`` has, and than ``floor``."""
        naming = self._naming
        while naming and -naming[0][0] >= (max(floor, -queue[0][0]) if queue else floor):
            score, _, parent = heapq.heappop(naming)
            if parent.alive and parent.named and -score == parent.score + parent.named[-1][2]:
                self._make(parent, parent.named.pop())

    def _make(self, parent: Node, named: Named) -> Node:
        token, score, estimate = named
        child = self.add(parent, token, parent.score + estimate)
        child.drafted = score
        self._queue_for_expansion(child)
        self._queue_named(parent)
        return child

    def _child(self, parent: Node, token: int) -> Node | None:
        """The child that carries ``token``, if there is one or the draft model has named one."""
        child = parent.children.get(token)
        if child is None:
            for place, named in enumerate(parent.named):
                if named[0] == token:
                    return self._make(parent, parent.named.pop(place))
        return child

    def _push(self, node: Node) -> None:
        heapq.heappush(self._unsent, (-node.score, node.id, node))

    def _queue_for_expansion(self, node: Node) -> None:
        heapq.heappush(self._unexpanded, (-node.score, node.id, node))

    def _queue_named(self, parent: Node) -> None:
        if parent.named:
            score = parent.score + parent.named[-1][2]
            heapq.heappush(self._naming, (-score, parent.id, parent))


def _is_valid(entry: tuple[float, int, Node]) -> bool:
    """Of a queue of nodes by their own scores."""
    return entry[2].alive and entry[0] == -entry[2].score


def _evidence(child: Node, parent: Node) -> Evidence:
    return Evidence(child.drafted, child.looked_up, parent.expanded)
