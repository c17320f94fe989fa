"""Common part of the strategies with one draft tree: sending, accepting, committing, restarting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.strategies.base import Pipeline, Strategy
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.tree.acceptance import accepted_path
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import DraftTree, Node, Order, TreeExpansion
from flowspec_edge.tree.segment_builder import SegmentBuilder


@dataclass(frozen=True)
class TreeParameters(Parameters):
    tree_size: Annotated[int, "L: nodes of the initial tree, root not counted"] = 80
    width: Annotated[int, "k: children per expanded node, and nodes expanded per level"] = 10
    depth: Annotated[int, "d0: levels of the initial tree; EAGLE's depth 5 is 6 here"] = 5

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.tree_size)

    def largest_tree(self) -> int:
        return self.tree_size


class TreeStrategy(Strategy):
    """A strategy with one draft tree: subclasses draft in ``begin_round`` and send in ``next_segment``.

    tree       the draft tree; its root is the newest token
    expansion  the one in progress, or the last

    Accepting, committing, pruning, and a new round after a miss are done here.
    """

    parameters: ClassVar[type[Parameters]] = TreeParameters  # of the initial tree
    order: Order = "score"

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self.tree = DraftTree(-1, -1)  # until ``start``
        self.expansion: TreeExpansion | None = None
        self._in_progress: TreeExpansion | None = None  # its draft pass is in progress
        self._prunes: list[Prune] = []

    def start(self, token: int, position: int) -> None:
        self._restart(token, position, first_id=0)

    def next_draft(self) -> DraftRequest | None:
        self._in_progress = self.expansion
        return self.expansion.request() if self.expansion else None

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        if self._in_progress is not None and self._in_progress is self.expansion:
            self._in_progress.absorb(output)

    def controls(self) -> list[Prune | Cancel]:
        prunes, self._prunes = self._prunes, []
        return list(prunes)

    def begin_round(self) -> None:
        """Draft the initial tree; the tree holds only its root (FlowSpec, III-B)."""
        p = self.params.select(TreeParameters)
        self.expand([self.tree.root], p.depth, p.width, p.tree_size)

    @property
    def drafting(self) -> bool:
        return self.expansion is not None and not self.expansion.done

    def expand(self, origins: list[Node], levels: int, width: int, keep: int) -> None:
        """Begin to draft ``levels`` levels below ``origins``, ``width`` expanded nodes and as many children each.

        In the end the best ``keep`` of the new nodes stay (EAGLE-2's rerank).
        """
        self.expansion = TreeExpansion(self.tree, origins, levels, width, keep)

    def _restart(self, token: int, position: int, first_id: int) -> None:
        self.tree = self._new_tree(token, position, first_id)
        self.begin_round()

    def _new_tree(self, token: int, position: int, first_id: int) -> DraftTree:
        return DraftTree(token, position, self.order, first_id)

    def send_best(self, limit: int) -> Segment | None:
        """Up to ``limit`` rows: an unsent root first, then the best unsent nodes; None if empty."""
        root = self.tree.root.number < 0
        nodes = self.tree.pop_unsent(limit - root)
        return self.send(nodes, root) if root or nodes else None

    def best_probabilities(self, limit: int) -> list[float]:
        """:meth:`row_probabilities` of what :meth:`send_best` would send."""
        top = self.tree.root
        root = [1.0] if top.number < 0 else []
        nodes = self.tree.pop_unsent(limit - len(root))
        self.tree.requeue(nodes)
        return root + [math.exp(min(0.0, node.score - top.score)) for node in nodes]

    def send(self, nodes: Sequence[Node], root: bool) -> Segment:
        """Return the segment of the tree's root (``root``: it is unsent) and then ``nodes``, parents first."""
        self._number(nodes, root)
        return self.builder.seal()

    def _number(self, nodes: Sequence[Node], root: bool) -> None:
        if root:
            top = self.tree.root
            self.tree.mark_sent(top, self.builder.add(top.token, top.position, committed=True))
        for node in nodes:
            assert node.parent is not None
            self.tree.mark_sent(node, self.builder.add(node.token, node.position, node.parent.number))
        self.counters.drafted += len(nodes)

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self.record(numbers, successors)
        return self.accept()[0]

    def record(self, numbers: Sequence[int], successors: Sequence[int]) -> None:
        """Add verified rows to the tree: arguments of :meth:`on_verified`."""
        self.counters.verified += len(numbers)
        for number, successor in zip(numbers, successors, strict=True):
            self.tree.record(number, successor)

    def _commit(self, node: Node) -> None:
        self.builder.commit(node.number)

    def accept(self) -> tuple[list[Commit], bool]:
        """Accept what the verified rows allow, and prune: the commits, and whether the round ended in a miss.

        A miss starts a tree at the missed token; otherwise the newest token becomes the root.
        """
        path, missed = accepted_path(self.tree)
        commits = []
        for node in path:
            assert node.parent is not None
            commits.append(Commit(node.token, node.parent.number, accepted=True))
            if node.number >= 0:
                self._commit(node)
        if missed >= 0:
            self.counters.rounds += 1
            last = path[-1] if path else self.tree.root
            commits.append(Commit(missed, last.number))
            self._restart(missed, last.position + 1, self.tree.next_id)
            self._prunes.append(self.builder.prune(()))
        elif path:
            self.tree.reroot(path)
            self._prunes.append(self.builder.prune(self.tree.sent_nodes))
        return commits, missed >= 0
