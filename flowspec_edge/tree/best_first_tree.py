"""A draft tree whose node scores are log probabilities that the node becomes text.

Unsent and unexpanded nodes queue by score, over all depths; new evidence for a node re-scores its subtree.  A
draft pass names ten children per node, of which barely two are ever sent or expanded, so most never become
nodes: only the likeliest candidates, and those that the look-up or the target chose, too.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from flowspec_edge.tree.acceptance import AcceptanceEstimator, Evidence
from flowspec_edge.tree.draft_tree import DraftTree, Node

HOPELESS = math.log(1e-4)  # less likely nodes are neither added nor sent
_LEAST_EXPANDED = 1e-3  # children of less likely nodes are hardly ever sent

_Queue = list[tuple[float, int, Node]]  # a heap of (-score, id, node); outdated where the scores differ

# A child named by the draft model that is no node yet: token, log confidence, and the log probability that
# the target accepts it, given its parent.
Named = tuple[int, float, float]


@dataclass(slots=True)
class _Scores:
    """A node's log scores given its parent, by the draft model and by the look-up; -inf if that one did not name it.

    named  its named children that have no node yet, likeliest last
    """

    draft_score: float = -math.inf
    lookup_score: float = -math.inf
    named: list[Named] = field(default_factory=list)


class BestFirstTree(DraftTree):
    """Scores count from the round's first root."""

    def __init__(self, token: int, position: int, first_id: int, estimator: AcceptanceEstimator) -> None:
        super().__init__(token, position, "score", first_id)
        self._estimator = estimator
        self._scores: defaultdict[int, _Scores] = defaultdict(_Scores)  # by node id
        self._unsent: _Queue = []
        self._unexpanded: _Queue = []
        self._naming: _Queue = []  # nodes with named children, by their likeliest one

    def probability(self, node: Node) -> float:
        """Return the probability that ``node`` becomes text."""
        return math.exp(node.score - self.root.score)

    def evidence(self, node: Node) -> Evidence:
        assert node.parent is not None
        scores = self._scores[node.id]
        return Evidence(scores.draft_score, scores.lookup_score, node.parent.expanded)

    def named_children(self, node: Node) -> list[Named]:
        """Children of ``node`` that the draft model named and that are no nodes yet, likeliest last."""
        return self._scores[node.id].named

    # ---- evidence ---------------------------------------------------------------------------

    def name_children(self, parent: Node, tokens: list[int], scores: list[float], estimates: list[float]
                      ) -> None:
        """Add the draft model's children of ``parent``, best first, except absent (-inf) and hopeless ones.

        ``estimates``: ``AcceptanceEstimator.draft_estimates(scores)``.  A second pass replaces the first
        one's named children.  Children that only the look-up named become less likely.
        """
        parent.expanded = True
        children = parent.children
        before = list(children.values())
        named = list(zip(tokens, scores, estimates, strict=True))
        if children:
            for token, score, _ in named:
                if token in children:
                    self._scores[children[token].id].draft_score = score
            named = [child for child in named if child[0] not in children]
        floor = self.root.score + HOPELESS - parent.score
        while named and (named[-1][2] < floor or named[-1][1] == -math.inf):
            named.pop()
        named.reverse()
        self._scores[parent.id].named = named
        self._queue_named(parent)
        for child in before:
            self._rescore(child)

    def look_up_child(self, parent: Node, token: int, score: float) -> Node | None:
        """Add a child found by the text look-up, with its log estimate; None if it is hopeless."""
        child = self.child(parent, token)
        if child is not None:
            self._scores[child.id].lookup_score = score
            self._rescore(child)
            return child
        worth = self._log_probability(Evidence(-math.inf, score, parent.expanded))
        if parent.score + worth < self.root.score + HOPELESS:
            return None
        child = self.add(parent, token, parent.score + worth)
        self._scores[child.id].lookup_score = score
        self._queue_for_expansion(child)
        return child

    def learn(self) -> None:
        """Update the estimator with all known outcomes; call it before :meth:`reroot`."""
        node: Node | None = self.root
        while node is not None and node.successor >= 0:
            accepted = self.child(node, node.successor)
            for child in node.children.values():
                self._estimator.learn(self.evidence(child), child is accepted)
            for _, score, _ in reversed(self._scores[node.id].named):
                self._estimator.learn(Evidence(score, -math.inf, True), False)
            node = accepted

    def _rescore(self, top: Node) -> None:
        assert top.parent is not None
        new = top.parent.score + self._log_probability(self.evidence(top))
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
        return math.log(self._estimator.probability(evidence))

    def _forget(self, node: Node) -> None:
        super()._forget(node)
        self._scores.pop(node.id, None)

    # ---- queues by probability ------------------------------------------------------------

    def pop_unsent(self, limit: int) -> list[Node]:
        """Remove up to ``limit`` unsent nodes that are not hopeless, likeliest first, so parents before children."""
        return list(islice(self._likeliest(self._unsent, HOPELESS, lambda node: node.number < 0), limit))

    def pop_unexpanded(self, limit: int, floor: float = 0.0) -> list[Node]:
        """Remove up to ``limit`` unexpanded nodes, likeliest first, never the root.

        Their parents are expanded, and their children may be worth sending: nodes with a probability below
        ``floor`` stay.
        """
        ready: list[Node] = []
        early: list[Node] = []  # their parents are not expanded yet
        floor = math.log(max(floor, _LEAST_EXPANDED))
        nodes = self._likeliest(self._unexpanded, floor, lambda node: not node.expanded)
        while len(ready) < limit and (node := next(nodes, None)) is not None:
            assert node.parent is not None
            (ready if node.parent.expanded else early).append(node)
        self.requeue_expansion(early)
        return ready

    def requeue_expansion(self, nodes: Iterable[Node]) -> None:
        """Requeue nodes whose draft pass returned no answer."""
        for node in nodes:
            self._queue_for_expansion(node)

    def _likeliest(self, queue: _Queue, floor: float, condition: Callable[[Node], bool]) -> Iterator[Node]:
        """Pop the live nodes that meet ``condition``, likeliest first.

        Nodes whose probability, given the root, is below exp(``floor``) stay queued.  The root is never yielded.
        """
        floor += self.root.score
        last = None
        while True:
            while queue:
                score, _, node = queue[0]
                if node.alive and score == -node.score and condition(node):
                    break
                heapq.heappop(queue)
            self._make_nodes(queue, floor)
            if not queue or -queue[0][0] < floor:
                return
            node = heapq.heappop(queue)[2]
            if node is not last and node is not self.root:  # a node may be queued twice under one score
                yield node
            last = node

    def _make_nodes(self, queue: _Queue, floor: float) -> None:
        """Make nodes of named children that are likelier than ``floor`` and all of ``queue``."""
        naming = self._naming
        while naming and -naming[0][0] >= (max(floor, -queue[0][0]) if queue else floor):
            score, _, parent = heapq.heappop(naming)
            if not parent.alive:
                continue
            named = self._scores[parent.id].named
            if named and -score == parent.score + named[-1][2]:
                self._make(parent, named.pop())

    def _make(self, parent: Node, named: Named) -> Node:
        token, score, estimate = named
        child = self.add(parent, token, parent.score + estimate)
        self._scores[child.id].draft_score = score
        self._queue_for_expansion(child)
        self._queue_named(parent)
        return child

    def child(self, parent: Node, token: int) -> Node | None:
        """Return a child; a child that is only named becomes a node."""
        child = parent.children.get(token)
        if child is None:
            candidates = self._scores[parent.id].named
            for index, candidate in enumerate(candidates):
                if candidate[0] == token:
                    return self._make(parent, candidates.pop(index))
        return child

    def _push(self, node: Node) -> None:
        heapq.heappush(self._unsent, (-node.score, node.id, node))

    def _queue_for_expansion(self, node: Node) -> None:
        heapq.heappush(self._unexpanded, (-node.score, node.id, node))

    def _queue_named(self, parent: Node) -> None:
        named = self._scores[parent.id].named
        if named:
            heapq.heappush(self._naming, (-(parent.score + named[-1][2]), parent.id, parent))
