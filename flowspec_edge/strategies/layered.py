"""What the methods that send one tree layer a segment share (PipeDec, SPD).

Knows the newest layer, the candidates for the next one, and that only the newest layer grows: a
draft pass expands it while it is in the first stage, and of the children the best become the next
layer at the moment the first stage falls free.  The candidates were pruned by whatever came back
until then, so survivors take the places of those that died (PipeDec, section 3.3.4: one more
update after the pruning).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from flowspec_edge.messages import Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.requests import Commit, DraftNode, DraftRequest, Expansion

Candidate = tuple[float, Node, int]  # cumulative score, parent, token


class LayeredStrategy(TreeStrategy):
    """One layer of at most ``layer_width`` nodes a segment; a miss empties the pipeline."""

    order = "layer"

    @property
    @abstractmethod
    def layer_width(self) -> int:
        """Nodes of a layer (PipeDec's w, SPD's W)."""

    @property
    @abstractmethod
    def children(self) -> int:
        """Children that a node may have (PipeDec's c)."""

    @property
    def segment_taps(self) -> tuple[int, ...]:
        """Hidden states of a layer's rows that the drafter wants."""
        return ()

    def begin_round(self) -> None:
        """The root is the first layer, and goes at once."""
        self._newest: list[Node] = [self.tree.root]
        self._candidates: list[Candidate] | None = None  # None: not drafted yet

    def next_segment(self) -> Segment | None:
        if self.tree.root.number < 0:  # a new round, or a hit among candidates that were not sent
            self.begin_round()
            return self._send((), root=True)
        if self._candidates is None:
            return None
        self._adopt(self._candidates)
        layer = self.tree.take(self.layer_width)
        if not layer:
            return None  # all of them died; what is in flight decides how the round ends
        self._newest, self._candidates = layer, None
        return self._send(layer, root=False)

    def next_draft(self) -> DraftRequest | None:
        if self._candidates is not None or self._newest[0].number < 0:
            return None
        self._newest = [node for node in self._newest if node.alive]
        if not self._newest:
            self._candidates = []  # nothing is left to expand until the round ends
            return None
        nodes = tuple(
            DraftNode(n.id, -1 if n.parent is None else n.parent.id, n.token, n.position, n.number)
            for n in self._newest
        )
        return DraftRequest(self.tree.root.id, nodes, self.children)

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        parents = {node.id: node for node in self._newest}
        if any(node.id not in parents for node in request.nodes):
            return  # the round it was asked in has ended
        scores = expansion.scores + np.array([[parents[n.id].score] for n in request.nodes])
        order = np.argsort(-scores, axis=None, kind="stable")
        columns = scores.shape[1]
        self._candidates = [
            (float(scores.flat[i]), parents[request.nodes[i // columns].id], int(expansion.tokens.flat[i]))
            for i in order.tolist() if np.isfinite(scores.flat[i])  # not absent
        ]
        # In the tree already: a successor that is found here is a hit, though it was not sent.
        self._adopt(self._candidates)

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._record(numbers, successors)
        return self._walk()[0]

    def _send(self, nodes: Sequence[Node], root: bool) -> Segment:
        self._number(nodes, root)
        return self.ledger.seal(self.segment_taps)

    def _adopt(self, candidates: list[Candidate]) -> None:
        """Make the best living candidates nodes of the tree."""
        living = (c for c in candidates if c[1].alive)
        for _, (score, parent, token) in zip(range(self.layer_width), living, strict=False):
            self.tree.add(parent, token, score)
