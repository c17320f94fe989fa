"""PipeInfer: asynchronous micro-batches beside canonical runs, cancelled when they are refuted.

(PipeInfer, section IV.)  Every newly accepted token starts a one-token *canonical* run.  Whenever
D0 is idle it drafts another micro-batch that goes on where its last speculation ended, as long as
the draft's confidence is above a cutoff that rises with every micro-batch and falls with every
attempt that it stopped.  A run that the accepted text contradicts is cancelled by its id; canonical
runs never are.

What differs from the paper's implementation: ancestor bits take the place of cache partitions, so
an accepted token needs no canonical run if a speculative one holds it already.  The paper's system
starts one all the same; so does this by default (``pipeinfer_canonical``), for the newest of the
tokens accepted at once: what follows the others is known.  A run "superfluous" in the paper's
sense cannot arise: a run's last token is accepted only by the run's own output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.requests import Commit, DraftNode, DraftRequest, Expansion


class PipeInfer(TreeStrategy):
    """Canonical runs and continuous, reactive speculation."""

    name = "pipeinfer"
    summary = "continuous micro-batches of a draft model, cancelled when refuted (PipeInfer)"
    drafter = "lm"

    @property
    def max_in_flight(self) -> int:
        """More than the stages hold: the first stage's free slot is what paces the runs."""
        return 2 * self.pipeline.stages + 2

    def start(self, token: int, position: int) -> None:
        self._cancels: list[int] = []
        self._runs: dict[int, list[Node]] = {}  # speculative ones in flight, oldest first
        super().start(token, position)

    def begin_round(self) -> None:
        self._waiting: deque[list[Node]] = deque()  # micro-batches that V1 has had no room for
        self._batch: list[Node] = []  # the micro-batch being drafted
        self._levels = 0  # of it
        self._tips = [self.tree.root]  # where speculation goes on
        self._held: tuple[DraftRequest, Expansion] | None = None  # an attempt that the cutoff stopped
        self._uncommitted: Node | None = None  # the root, until its canonical run is on its way
        self._reset_cutoff()

    # ---- what is sent ------------------------------------------------------------------------

    def next_segment(self) -> Segment | None:
        root = self.tree.root
        if root.number < 0:
            return self._send((), root=True)
        if self._uncommitted is not None:
            # The run repeats a row that is in flight, so it must not see that row: it hangs on the
            # text before it, and only then does the row become text.
            self.ledger.add(root.token, root.position)
            segment = self.ledger.seal()
            self._settle()
            return segment
        while self._waiting:
            nodes = [n for n in self._waiting.popleft() if n.alive and n.number < 0]
            if nodes:
                segment = self._send(nodes, root=False)
                self._runs[segment.run] = nodes
                return segment
        return None

    def controls(self) -> list[Prune | Cancel]:
        """Cancels, from the back of the pipeline; PipeInfer knows no prunes."""
        self._prunes.clear()
        if not self._cancels:
            return []
        runs, self._cancels = tuple(sorted(self._cancels, reverse=True)), []
        return [Cancel(self.ledger.session, self.ledger.epoch, runs)]

    # ---- what comes back ---------------------------------------------------------------------

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._runs.pop(run, None)
        self._record(numbers, successors)
        if self.tree.root.successor >= 0:
            self._settle()  # a canonical run that has had no room yet would tell nothing new
        commits, restarted = self._walk()
        if commits:
            self._reset_cutoff()
            self._cancel_refuted(restarted)
            if self._held is not None and not np.isfinite(self._held[1].scores).any():
                self._held = None  # there was no child at all, but a longer text may offer one
        return commits

    def _commit(self, node: Node) -> None:
        """Hold the newest accepted row back if a canonical run of it is to come."""
        redundant = self.params.pipeinfer_canonical == "all"
        self._runs = {run: nodes for run, nodes in self._runs.items() if node not in nodes}
        self._settle()
        if redundant and node.successor < 0:
            self._uncommitted = node
        else:
            super()._commit(node)

    def _settle(self) -> None:
        if self._uncommitted is not None:
            self.ledger.commit(self._uncommitted.number)
            self._uncommitted = None

    def _cancel_refuted(self, restarted: bool) -> None:
        """Give up the runs of which no row lives; those with a row that became text are not here.

        Likewise the micro-batches that wait: they would hold drafting back.
        """
        self._waiting = deque(batch for batch in self._waiting
                              if any(n.alive and n is not self.tree.root for n in batch))
        for run, nodes in list(self._runs.items()):
            if restarted or not any(n.alive for n in nodes):
                self._cancels.append(run)
                del self._runs[run]

    # ---- what is drafted ---------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """The confidence below which a sequence is not drafted on (section IV-B.2)."""
        p = self.params
        return (p.pipeinfer_accept + self._iterations * p.pipeinfer_recovery
                - self._failures * p.pipeinfer_decay)

    def next_draft(self) -> DraftRequest | None:
        if len(self._runs) + len(self._waiting) > self.pipeline.stages:
            return None
        if self._held is not None and not self._try_again(*self._held):
            return None
        self._tips = [n for n in self._tips if n.alive]
        if not self._tips:
            self._tips, self._batch, self._levels = [self.tree.root], [], 0
        nodes = tuple(
            DraftNode(n.id, -1 if n.parent is None else n.parent.id, n.token, n.position)
            for n in self._tips
        )
        return DraftRequest(self.tree.root.id, nodes, self.params.pipeinfer_sequences)

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        tips = {n.id: n for n in self._tips}
        if not any(asked.id in tips for asked in request.nodes):
            return  # the round that it was asked in has ended
        grown: list[Node] = []
        for row, asked in enumerate(request.nodes):
            tip = tips.get(asked.id)
            if tip is not None and tip.alive:
                grown += self._grow(tip, expansion.tokens[row].tolist(), expansion.scores[row].tolist(),
                                    self.params.pipeinfer_sequences - len(grown))
        if grown:
            self._tips = grown
            self._batch += grown
            self._levels += 1
            if self._levels < self.params.pipeinfer_tokens:
                return
        elif not self._batch:
            self._failures += 1
            self._held = (request, expansion)
            return
        self._waiting.append(self._batch)
        self._batch, self._levels = [], 0
        self._iterations += 1

    def _try_again(self, request: DraftRequest, expansion: Expansion) -> bool:
        """Another attempt at what the cutoff stopped, with the answer that the draft gave then.

        The same pass would give the same answer, and D0 would not hear what arrives meanwhile.
        False: the cutoff, which the attempt lowers, is too high still.
        """
        asked = {node.id for node in request.nodes}
        if any(tip.alive and tip.id in asked for tip in self._tips):
            if not 0 < math.exp(expansion.scores.max()) >= self.cutoff:
                self._failures += 1
                return False
            self.drafted(request, expansion)
        self._held = None
        return True

    def _grow(self, tip: Node, tokens: list[int], scores: list[float], room: int) -> list[Node]:
        """The children of ``tip`` that are confident enough: the best, and branches beside it."""
        children: list[Node] = []
        for token, score in zip(tokens, scores, strict=True):
            confidence = math.exp(score)  # 0: an absent child, below any cutoff
            wanted = self.params.pipeinfer_split if children else self.cutoff
            if len(children) < room and 0 < confidence >= wanted:
                children.append(self.tree.add(tip, token, tip.score + score))
        return children

    def _reset_cutoff(self) -> None:
        self._iterations = self._failures = 0
