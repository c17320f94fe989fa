"""The draft tree: the tokens that D0 expects, which of them were sent, and the target's verdicts.

Adding, sending and re-rooting take time proportional to the nodes added, sent and removed.

An expansion is EAGLE-2's dynamic tree, one draft pass per level: every level expands the k best nodes of
the level before, and the best nodes of all levels are kept. Nodes may be sent and the tree re-rooted
between two passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

Order = Literal["score", "layer"]


@dataclass(slots=True, eq=False)
class Node:
    """One draft token.

    id         unique in the session, larger than its parent's
    score      log product of confidences from the round's first root (FlowSpec, eq. 1)
    number     the segment builder's once sent, else -1
    successor  the target's token after it once verified, else -1
    expanded   a draft model has been asked for its children
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
    children: dict[int, Node] = field(default_factory=dict)

    def __lt__(self, other: Node) -> bool:
        """Compare by age, for heaps that hold a node twice with one score."""
        return self.id < other.id


class DraftTree:
    """What may follow the text: the root is the newest token of the text, all other nodes are guesses.

    root        the :class:`Node` of the newest token; its number is -1 until the strategy has sent it
    size        nodes below the root
    sent_nodes  by number: the nodes, root included, that are on their way or verified
    generation  expansions begun so far; with ``order`` "layer" nodes of an older one are sent first
    """

    def __init__(self, token: int, position: int, order: Order = "score", first_id: int = 0) -> None:
        self.next_id = first_id + 1  # the next round's tree continues from it
        self._order = order
        self._queue: list[tuple[tuple[int, int], float, int, Node]] = []
        self.sent_nodes: dict[int, Node] = {}  # by number: alive, sent (verified or not)
        self.root = Node(first_id, None, token, position, 0.0)
        self.size = 0  # nodes below the root
        self.generation = 0  # expansions begun; in layer order an older one goes first

    def add(self, parent: Node, token: int, score: float) -> Node:
        """Return the child of ``parent`` with ``token``, created and queued if new.

        An unsent child takes the new score, since a later expansion knows more context (FlowSpec, III-D).
        """
        node = parent.children.get(token)
        if node is None:
            node = Node(self.next_id, parent, token, parent.position + 1, score)
            self.next_id += 1
            self.size += 1
            parent.children[token] = node
            self._push(node)
        elif node.number < 0 and node.score != score:
            node.score = score
            if self._order == "score":
                self._push(node)
        return node

    def _push(self, node: Node) -> None:
        # By falling score, then age: a parent never comes after its child.  In layer order, expansion
        # by expansion, and layer by layer in each.
        rank = (self.generation, node.position) if self._order == "layer" else (0, 0)
        heapq.heappush(self._queue, (rank, -node.score, node.id, node))

    def pop_unsent(self, limit: int) -> list[Node]:
        """Remove up to ``limit`` unsent nodes, best first.

        Unsent ancestors come along, in front: re-scoring may have put a parent behind its child.
        """
        nodes: list[Node] = []
        result_ids: set[int] = set()
        while self._queue and len(nodes) < limit:
            _, score, _, node = self._queue[0]
            outdated = self._order == "score" and -score != node.score
            if not node.alive or node.number >= 0 or node.id in result_ids or outdated:
                heapq.heappop(self._queue)
                continue
            chain: list[Node] = []
            step: Node | None = node
            while step is not None and step is not self.root and step.number < 0 and step.id not in result_ids:
                chain.append(step)
                step = step.parent
            chain.reverse()
            room = limit - len(nodes)
            nodes += chain[:room]
            result_ids.update(n.id for n in chain[:room])
            if len(chain) <= room:
                heapq.heappop(self._queue)
        return nodes

    def requeue(self, nodes: Iterable[Node]) -> None:
        """Undo :meth:`pop_unsent`, in a tree that is sent by score."""
        for node in nodes:
            self._push(node)

    def draft_request(self, nodes: list[Node], children: int) -> DraftRequest:
        """Ask the draft model for the likeliest ``children`` of each node."""
        return DraftRequest(self.root.id, tuple(
            DraftNode(n.id, -1 if n.parent is None else n.parent.id, n.token, n.position, n.number)
            for n in nodes), children)

    def mark_sent(self, node: Node, number: int) -> None:
        """Give the node its number from the segment builder."""
        node.number = number
        self.sent_nodes[number] = node

    def record(self, number: int, successor: int) -> bool:
        """Record the target's token after ``number``; False if the node is gone."""
        node = self.sent_nodes.get(number)
        if node is None:
            return False
        node.successor = successor
        return True

    def child(self, parent: Node, token: int) -> Node | None:
        """Return the child of ``parent`` with ``token``, if it has one."""
        return parent.children.get(token)

    def reroot(self, path: list[Node]) -> None:
        """Make the end of ``path`` (accepted nodes, in order) the root; drop all nodes that are not below."""
        for child in path:
            old, self.root = self.root, child
            self.size -= 1
            child.parent = None
            for token, sibling in old.children.items():
                if token != child.token:
                    self._drop(sibling)
            self._forget(old)
            old.children = {}

    def _drop(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            self.size -= 1
            self._forget(node)
            stack.extend(node.children.values())

    def _forget(self, node: Node) -> None:
        node.alive = False
        if node.number >= 0:
            self.sent_nodes.pop(node.number, None)

    def discard(self, node: Node) -> None:
        """Drop ``node`` and its descendants."""
        if node.parent is not None and node.alive:
            del node.parent.children[node.token]
            self._drop(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class TreeExpansion:
    """Expands ``origins`` by ``levels`` levels of ``width`` nodes with ``width`` children; ``keep`` nodes stay."""

    def __init__(self, tree: DraftTree, origins: list[Node], levels: int, width: int, keep: int) -> None:
        self._tree = tree
        self._frontier = origins
        self._levels = levels
        self._width = width
        self._keep = keep
        self._first_new = tree.next_id
        tree.generation += 1
        self._best: list[tuple[float, int, Node]] = []  # min-heap: the worst kept node first

    @property
    def done(self) -> bool:
        return self._levels <= 0 or not self._frontier

    def request(self) -> DraftRequest | None:
        """Return the next pass; None when the expansion is complete or its nodes are gone."""
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
            full = len(self._best) >= self._keep
            if full and score <= self._best[0][0]:
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
        heapq.heappush(self._best, (node.score, -node.id, node))
        while len(self._best) > self._keep:
            worst = heapq.heappop(self._best)[2]
            unsent = worst.alive and worst.number < 0 and not worst.children
            if unsent and worst.id >= self._first_new:
                self._tree.discard(worst)
