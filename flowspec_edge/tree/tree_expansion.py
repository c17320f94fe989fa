"""One expansion of the tree: EAGLE-2's dynamic tree, one draft pass per level.

Every level expands the k best nodes of the level before, and the best nodes of all levels are kept.  Nodes
may be sent and the tree re-rooted between two passes.
"""

from __future__ import annotations

import heapq

import numpy as np

from flowspec_edge.tree.draft_api import DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import DraftTree, Node


class TreeExpansion:
    """Expands ``origins`` by ``levels`` levels of ``width`` nodes with ``width`` children; ``keep`` nodes
    stay."""

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
        return self._levels <= 0 or not self._frontier

    def request(self) -> DraftRequest | None:
        """The next pass; None when the expansion is complete or its nodes are gone."""
        self._frontier = [n for n in self._frontier if n.alive]
        if self.done:
            return None
        return self._tree.draft_request(self._frontier, self._children())

    def _children(self) -> int:
        return self._width

    def absorb(self, output: DraftOutput) -> None:
        """Add the pass's children and choose the next level; if all are absent, the expansion ends."""
        self._levels -= 1
        parents = self._frontier
        cumulative = output.scores + np.array([[n.score] for n in parents])
        for node in parents:
            node.expanded = True
        flat = cumulative.ravel()
        limit = min(self._keep, int(np.isfinite(flat).sum()))
        if not limit:
            self._frontier = []
            return
        best = np.argpartition(-flat, limit - 1)[:limit]
        best = best[np.lexsort((best, -flat[best]))]
        children = output.tokens.shape[1]
        level: list[Node] = []
        for index in best.tolist():
            score = float(flat[index])
            full = len(self._kept) >= self._keep
            if full and score <= self._kept[0][0]:
                break  # falling scores: nothing after this one can be kept either
            parent = parents[index // children]
            if not parent.alive:
                continue
            node = self._tree.add(parent, int(output.tokens[index // children, index % children]), score)
            level.append(node)
            self._admit(node)
        alive = [n for n in level if n.alive]
        self._frontier = alive[: self._width]

    def _admit(self, node: Node) -> None:
        """Above the limit, drop the worst node if it is unsent and new in this expansion."""
        # The newest of equals is the worst, so that a parent outlives its child.
        heapq.heappush(self._kept, (node.score, -node.id, node))
        while len(self._kept) > self._keep:
            worst = heapq.heappop(self._kept)[2]
            unsent = worst.alive and worst.number < 0 and not worst.children
            if unsent and worst.id >= self._first_new:
                self._tree.discard(worst)
