"""PipeInfer: asynchronous micro-batches and canonical runs (PipeInfer, section IV).

Every newly accepted token starts a one-token *canonical* run.  When idle, D0 drafts a micro-batch that
continues its last speculation, as long as the draft's confidence is above a cutoff; the cutoff rises with
every micro-batch and falls with every attempt that it stopped.  Refuted runs are cancelled by id.

Ancestor bits replace the paper's cache partitions, so an accepted token that a speculative run holds needs no
canonical run.  The paper starts one all the same, and so does the default of ``pipeinfer_canonical``, for the
newest of the tokens accepted at once.  The paper's "superfluous" runs cannot arise: only a run's own output
accepts its last token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.model.draft_kinds import LM
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder


@dataclass(frozen=True)
class PipeInferParameters(Parameters):
    pipeinfer_tokens: Annotated[int, "the longest micro-batch, in tokens of one sequence"] = 4
    pipeinfer_sequences: Annotated[int, "branches of a micro-batch"] = 3
    pipeinfer_accept: Annotated[float, "confidence cutoff at the start", 0, 2] = 0.01
    pipeinfer_split: Annotated[float, "confidence from which a second child starts a branch", 0, 2] = 0.8
    pipeinfer_recovery: Annotated[float, "added to the cutoff by every micro-batch until a run returns",
                                  0, 2] = 0.4
    pipeinfer_decay: Annotated[float, "taken off the cutoff by every attempt that it stopped", 0, 1] = 0.01
    pipeinfer_canonical: Annotated[Literal["all", "needed"], "accepted tokens that get a one-token run: all, "
                                                             "or only those in no run yet"] = "all"

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.pipeinfer_tokens * self.pipeinfer_sequences)


class PipeInfer(TreeStrategy):
    name = "pipeinfer"
    title = "PipeInfer"
    summary = "continuous micro-batches of a draft model, cancelled when refuted (PipeInfer)"
    parameters = PipeInferParameters
    params: PipeInferParameters
    drafter = LM.name

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._cancels: list[int] = []
        self._runs: dict[int, list[Node]] = {}  # speculative runs in flight, oldest first
        self._waiting: deque[list[Node]] = deque()  # micro-batches that were not sent yet
        self._batch: list[Node] = []  # the micro-batch being drafted
        self._levels = 0
        self._tips: list[Node] = []  # where speculation continues
        self._stopped_attempt: tuple[DraftRequest, DraftOutput] | None = None  # an attempt that the cutoff stopped
        self._uncommitted: Node | None = None  # the root, until its canonical run is sent
        self._iterations = self._failures = 0  # micro-batches, and attempts stopped by the cutoff

    @property
    def max_in_flight(self) -> int:
        """More than the stages hold: the first stage's free slot paces the runs."""
        return 2 * self.pipeline.stages + 2

    def begin_round(self) -> None:
        self._waiting.clear()
        self._batch, self._levels, self._tips = [], 0, [self.tree.root]
        self._stopped_attempt = self._uncommitted = None
        self._iterations = self._failures = 0

    # ---- sending ------------------------------------------------------------------------

    def next_segment(self, rows: int | None = None) -> Segment | None:
        root = self.tree.root
        if root.number < 0:
            return self.send((), root=True)
        if self._uncommitted is not None:
            # The run repeats a row that is in flight and must not see it: its parent is the text before
            # that row, and only then does the row become text.
            self.builder.add(root.token, root.position)
            segment = self.builder.seal()
            self._settle()
            return segment
        while self._waiting:
            nodes = [n for n in self._waiting.popleft() if n.alive and n.number < 0]
            if nodes:
                segment = self.send(nodes, root=False)
                self._runs[segment.run] = nodes
                return segment
        return None

    def controls(self) -> list[Prune | Cancel]:
        """Return cancels, the newest run first; PipeInfer has no prunes."""
        self._prunes.clear()
        if not self._cancels:
            return []
        runs, self._cancels = tuple(sorted(self._cancels, reverse=True)), []
        return [Cancel(self.builder.session, self.builder.epoch, runs)]

    # ---- outputs ---------------------------------------------------------------------

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        self._runs.pop(run, None)
        self.record(numbers, successors)
        if self.tree.root.successor >= 0:
            self._settle()  # an unsent canonical run is redundant now
        commits, restarted = self.accept()
        if commits:
            self._iterations = self._failures = 0
            self._cancel_refuted(restarted)
            if self._stopped_attempt is not None and not np.isfinite(self._stopped_attempt[1].scores).any():
                self._stopped_attempt = None  # no child was found, but a longer text may have one
        return commits

    def _commit(self, node: Node) -> None:
        """Delay the newest accepted row's commit if a canonical run of it follows."""
        redundant = self.params.pipeinfer_canonical == "all"
        self._runs = {run: nodes for run, nodes in self._runs.items() if node not in nodes}
        self._settle()
        if redundant and node.successor < 0:
            self._uncommitted = node
        else:
            super()._commit(node)

    def _settle(self) -> None:
        if self._uncommitted is not None:
            self.builder.commit(self._uncommitted.number)
            self._uncommitted = None

    def _cancel_refuted(self, restarted: bool) -> None:
        """Cancel runs and drop waiting micro-batches without a live row."""
        self._waiting = deque(batch for batch in self._waiting
                              if any(n.alive and n is not self.tree.root for n in batch))
        for run, nodes in list(self._runs.items()):
            if restarted or not any(n.alive for n in nodes):
                self._cancels.append(run)
                del self._runs[run]

    # ---- drafting ---------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """The minimum confidence to continue a sequence (section IV-B.2)."""
        p = self.params
        return (p.pipeinfer_accept + self._iterations * p.pipeinfer_recovery
                - self._failures * p.pipeinfer_decay)

    def next_draft(self) -> DraftRequest | None:
        if len(self._runs) + len(self._waiting) > self.pipeline.stages:
            return None
        if self._stopped_attempt is not None and not self._try_again(*self._stopped_attempt):
            return None
        self._tips = [n for n in self._tips if n.alive]
        if not self._tips:
            self._tips, self._batch, self._levels = [self.tree.root], [], 0
        return self.tree.draft_request(self._tips, self.params.pipeinfer_sequences)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        tips = {n.id: n for n in self._tips}
        if not any(draft_node.id in tips for draft_node in request.nodes):
            return  # the pass belongs to a round that has ended
        new_tips: list[Node] = []
        for row, draft_node in enumerate(request.nodes):
            tip = tips.get(draft_node.id)
            if tip is not None and tip.alive:
                new_tips += self._grow(tip, output.tokens[row].tolist(), output.scores[row].tolist(),
                                       self.params.pipeinfer_sequences - len(new_tips))
        if new_tips:
            self._tips = new_tips
            self._batch += new_tips
            self._levels += 1
            if self._levels < self.params.pipeinfer_tokens:
                return
        elif not self._batch:
            self._failures += 1
            self._stopped_attempt = (request, output)
            return
        self._waiting.append(self._batch)
        self._batch, self._levels = [], 0
        self._iterations += 1

    def _try_again(self, request: DraftRequest, output: DraftOutput) -> bool:
        """Retry an attempt that the cutoff stopped; False: the cutoff is still too high.

        The draft's former answer is reused: it would be the same, and a pass would keep D0 from handling outputs.
        """
        node_ids = {node.id for node in request.nodes}
        if any(tip.alive and tip.id in node_ids for tip in self._tips):
            if not 0 < math.exp(output.scores.max()) >= self.cutoff:
                self._failures += 1
                return False
            self.on_draft(request, output)
        self._stopped_attempt = None
        return True

    def _grow(self, tip: Node, tokens: list[int], scores: list[float], room: int) -> list[Node]:
        """Add the best child of ``tip`` above the cutoff, and branches above ``pipeinfer_split``."""
        children: list[Node] = []
        for token, score in zip(tokens, scores, strict=True):
            confidence = math.exp(score)  # 0: an absent child, below any cutoff
            cutoff = self.params.pipeinfer_split if children else self.cutoff
            if len(children) < room and 0 < confidence >= cutoff:
                children.append(self.tree.add(tip, token, tip.score + score))
        return children
