"""What all strategies over one draft tree share: sending nodes, walking, committing, restarting.

Knows the tree, the ledger and the bookkeeping of a round.  Each strategy in a file of its own
decides what is drafted, in which order it is sent, and what happens after a walk.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.tree.draft_tree import DraftTree, Node, Order
from flowspec_edge.tree.growth import Growth
from flowspec_edge.tree.requests import Commit, DraftRequest, Expansion


class TreeStrategy(Strategy):
    """A strategy with one tree and at most one expansion in progress."""

    order: Order = "score"
    tree: DraftTree
    growth: Growth | None = None
    _asked: Growth | None = None  # whose pass is being computed

    def start(self, token: int, position: int) -> None:
        self._prunes: list[Prune] = []
        self._next_id = 0
        self._restart(token, position)

    def next_draft(self) -> DraftRequest | None:
        self._asked = self.growth
        return self.growth.request() if self.growth else None

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        if self._asked is not None and self._asked is self.growth:
            self._asked.absorb(expansion)

    def controls(self) -> list[Prune | Cancel]:
        prunes, self._prunes = self._prunes, []
        return list(prunes)

    def begin_round(self) -> None:
        """The tree is new and holds its root alone: draft the initial tree (FlowSpec, III-B)."""
        p = self.params
        self.growth = Growth(self.tree, [self.tree.root], p.depth, p.width, p.tree_size)

    def _restart(self, token: int, position: int) -> None:
        self.tree = self._new_tree(token, position)
        self.begin_round()

    def _new_tree(self, token: int, position: int) -> DraftTree:
        """A tree of its root alone; ids go on from the last round's."""
        return DraftTree(token, position, self.order, self._next_id)

    def _send(self, nodes: Sequence[Node], root: bool) -> Segment:
        """A segment of ``nodes`` (parents first), the root before them if asked."""
        self._number(nodes, root)
        return self.ledger.seal()

    def _number(self, nodes: Sequence[Node], root: bool) -> None:
        """Give the rows of a segment their numbers."""
        if root:
            top = self.tree.root
            self.tree.mark_sent(top, self.ledger.add(top.token, top.position, committed=True))
        for node in nodes:
            assert node.parent is not None
            self.tree.mark_sent(node, self.ledger.add(node.token, node.position, node.parent.number))
        self.counters.drafted += len(nodes)

    def _record(self, numbers: Sequence[int], successors: Sequence[int]) -> None:
        self.counters.verified += len(numbers)
        for number, successor in zip(numbers, successors, strict=True):
            self.tree.record(number, successor)

    def _commit(self, node: Node) -> None:
        """A row that was sent has become text."""
        self.ledger.commit(node.number)

    def _walk(self) -> tuple[list[Commit], bool]:
        """Accept what the verified rows allow: the commits, and whether the round ended.

        After a miss the tree is a new one, rooted at the missed token; after a hit it is cut at
        the newest token.  The stages are told to prune in either case, if anything was accepted.
        """
        path, missed = self.tree.walk()
        commits = []
        for node in path:
            assert node.parent is not None
            commits.append(Commit(node.token, node.parent.number, drafted=True))
            if node.number >= 0:
                self._commit(node)
        if missed >= 0:
            self.counters.rounds += 1
            last = path[-1] if path else self.tree.root
            commits.append(Commit(missed, last.number))
            self._next_id = self.tree.next_id
            self._restart(missed, last.position + 1)
            self._prunes.append(self.ledger.prune(()))
        elif path:
            self.tree.cut(path)
            self._prunes.append(self.ledger.prune(self.tree.sent))
        return commits, missed >= 0
