"""One expansion of the tree, level by level, one draft pass at a time.

Knows how EAGLE-2 builds a dynamic tree (and FlowSpec its initial and expansion trees): every
level expands the k best nodes of the level before, and of all levels the best nodes are kept.
Does not know when it runs, or what has been sent meanwhile: nodes may leave for the pipeline
between two passes, and the tree may be cut.
"""

from __future__ import annotations

import heapq

import numpy as np

from flowspec_edge.tree.draft_tree import DraftTree, Node
from flowspec_edge.tree.requests import DraftNode, DraftRequest, Expansion


class Growth:
    """An expansion from ``origins`` by ``levels`` levels that keeps at most ``keep`` new nodes."""

    def __init__(self, tree: DraftTree, origins: list[Node], levels: int, width: int, keep: int) -> None:
        self._tree = tree
        self._frontier = origins
        self._levels = levels
        self._width = width
        self._keep = keep
        self._first_new = tree.next_id
        tree.generation += 1
        self._kept: list[tuple[float, int, Node]] = []  # min-heap: the worst kept node first

    @property
    def done(self) -> bool:
        """Whether no pass is left to ask for."""
        return self._levels <= 0 or not self._frontier

    def request(self) -> DraftRequest | None:
        """The next pass, or None when the expansion is complete (or its nodes were cut away)."""
        self._frontier = [n for n in self._frontier if n.alive]
        if self.done:
            return None
        nodes = tuple(
            DraftNode(n.id, -1 if n.parent is None else n.parent.id, n.token, n.position)
            for n in self._frontier
        )
        return DraftRequest(self._tree.root.id, nodes, self._children())

    def _children(self) -> int:
        """Children to ask for in the pass that is due."""
        return self._width

    def absorb(self, expansion: Expansion) -> None:
        """Add the children that the pass found, and choose the next level's nodes.

        Absent children are none.  A level without a single child ends the expansion.
        """
        self._levels -= 1
        parents = self._frontier
        cumulative = expansion.scores + np.array([[n.score] for n in parents])
        for node in parents:
            node.expanded = True
        flat = cumulative.ravel()
        limit = min(self._keep, int(np.isfinite(flat).sum()))
        if not limit:
            self._frontier = []
            return
        best = np.argpartition(-flat, limit - 1)[:limit]
        best = best[np.lexsort((best, -flat[best]))]
        children = expansion.tokens.shape[1]
        level: list[Node] = []
        for index in best.tolist():
            score = float(flat[index])
            full = len(self._kept) >= self._keep
            if full and score <= self._kept[0][0]:
                break  # falling scores: nothing after this one can be kept either
            parent = parents[index // children]
            if not parent.alive:
                continue
            node = self._tree.add(parent, int(expansion.tokens[index // children, index % children]), score)
            level.append(node)
            self._admit(node)
        alive = [n for n in level if n.alive]
        self._frontier = alive[: self._width]

    def _admit(self, node: Node) -> None:
        """Keep the node; when too many are kept, the worst one goes, if it is this growth's own."""
        # The newest of equals is the worst, so that a parent outlives its child.
        heapq.heappush(self._kept, (node.score, -node.id, node))
        while len(self._kept) > self._keep:
            worst = heapq.heappop(self._kept)[2]
            unsent = worst.alive and worst.number < 0 and not worst.children
            if unsent and worst.id >= self._first_new:
                self._tree.discard(worst)
