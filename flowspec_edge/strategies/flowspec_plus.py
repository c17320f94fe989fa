"""FlowSpec+: every slot of the pipeline is filled with the nodes that are likeliest to become text.

FlowSpec redrafts a few levels from the root at every acceptance, which limits it to about (depth + 1) / (N +
2) tokens a turn.  Here one tree lasts as long as the round, and the probability that a node becomes text
(``tree.best_first_tree``) decides what to send and what to draft, at any depth.

``plus_without`` switches ideas off by their names (``IDEAS``). docs/reference/strategies.md explains each,
docs/experiments/flowspec.md has the figures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Segment
from flowspec_edge.sampling.rule import Sampling, scores_from_probabilities
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import LONGEST_BLOCK, Parameters
from flowspec_edge.strategies.slot_worth import SlotWorth
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.acceptance import AcceptanceEstimator
from flowspec_edge.tree.best_first_tree import BestFirstTree
from flowspec_edge.tree.draft_api import ABSENT, Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.segment_builder import SegmentBuilder
from flowspec_edge.tree.text_index import TextIndex

_MAX_NODES = 1024  # a tree that has as many is not expanded: a draft pass would not be worth its time and memory
_CHILDREN = 10  # per node and draft pass (FlowSpec's k)
_LONGEST_RUN = 8  # tokens that the look-up compares
_CHILDREN_PER_LOOKUP = 4
_RANKED_AGAIN = 24  # nodes in flight, when a block begins at a new root
_LOOK_UPS = 24  # most nodes of one look-up
_WORTH_EXPANDING = 0.5  # of the least likely row sent: a node so likely may have children worth sending
_WORTH_LOOKING = math.log(0.02)  # less likely children are not looked up
IDEAS = ("ahead", "curve", "learn", "lookup")


@dataclass(frozen=True)
class FlowSpecPlusParameters(Parameters):
    plus_width: Annotated[int, "nodes that a draft pass of FlowSpec+ expands"] = 10
    plus_rows: Annotated[int, "the longest segment of FlowSpec+; 0: by the stages' curve, else segment",
                         0] = 0
    plus_without: Annotated[str, "ideas of FlowSpec+ to switch off, separated by commas: "
                                 "ahead, curve, learn, lookup"] = ""
    plus_carry: Annotated[bool | None, "whether a request goes on with what earlier ones taught FlowSpec+ about the "
                                       "draft model; default: over processes, not in virtual time"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.disabled_ideas()

    def disabled_ideas(self) -> frozenset[str]:
        names = frozenset(part.strip() for part in self.plus_without.split(",") if part.strip())
        if unknown := sorted(names - set(IDEAS)):
            raise UsageError(f"plus_without knows {', '.join(IDEAS)}, not {unknown[0]!r}")
        return names

    def largest_segment(self) -> int:
        return max(super().largest_segment(), 1 + self.plus_rows)


class FlowSpecPlus(TreeStrategy):
    name = "flowspec_plus"
    title = "FlowSpec+"
    summary = "FlowSpec+, this project's: one lasting tree, likeliest nodes first, at any depth (default)"
    parameters = FlowSpecPlusParameters
    params: FlowSpecPlusParameters
    tree: BestFirstTree

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._disabled = self.params.disabled_ideas()
        if self.params.ngram is False:
            self._disabled |= {"lookup"}
        self._sampling = Sampling()
        self._estimator = AcceptanceEstimator(greedy=True)
        self.tree = BestFirstTree(-1, -1, 0, self._estimator)  # until ``start``
        self._text = TextIndex(_LONGEST_RUN, 1)
        self._worth = SlotWorth(pipeline.stages)
        self._root_is_stale = True  # its expansion did not have its true features
        self._pending_draft: dict[int, Node] = {}  # the nodes of the draft pass in progress, by id
        self._beyond: list[Node] = []  # too deep for the drafter below this root
        self._drafts_blocks = False  # whether ranking more nodes by the root's pass costs next to nothing
        self._least_probability = 0.0  # probability of the last segment's least likely row; 0: it had room for more

    @property
    def allows_early_send(self) -> bool:
        """**ahead**: the pipeline does not wait for D0's draft passes."""
        return "ahead" not in self._disabled

    @property
    def wants_stage_times(self) -> bool:
        """Whether the strategy uses segment times, which only **curve** does."""
        return "curve" not in self._disabled

    @classmethod
    def looks_up(cls, params: Parameters) -> bool:
        return cls._looks_up_itself(params) or super().looks_up(params)

    @classmethod
    def merges_look_up(cls, params: Parameters) -> bool:
        """Return whether its own look-up is off: both would name the same continuations."""
        return super().looks_up(params) and not cls._looks_up_itself(params)

    @classmethod
    def _looks_up_itself(cls, params: Parameters) -> bool:
        plus_params = params.select(FlowSpecPlusParameters)
        return plus_params.ngram is not False and "lookup" not in plus_params.disabled_ideas()

    def begin(self, text: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        carries = self.pipeline.carries if self.params.plus_carry is None else self.params.plus_carry
        self._estimator = AcceptanceEstimator(sampling.greedy, "learn" not in self._disabled,
                                              self.pipeline.acceptance if carries else None)
        self._text.reset()
        self._read(text)

    def start(self, token: int, position: int) -> None:
        self._read([token])
        super().start(token, position)
        self._look_up(self.tree.root)

    def begin_round(self) -> None:
        self._root_is_stale = True
        self._pending_draft = {}
        self._beyond = []

    def _new_tree(self, token: int, position: int, first_id: int) -> BestFirstTree:
        return BestFirstTree(token, position, first_id, self._estimator)

    # ---- sending -----------------------------------------------------------------------

    def row_probabilities(self, limit: int) -> Sequence[float]:
        return self.best_probabilities(min(limit, self._longest()))

    def _longest(self) -> int:
        return self.params.plus_rows or (LONGEST_BLOCK if self._curve() else self.params.segment)

    def next_segment(self, rows: int | None = None) -> Segment | None:
        root = self.tree.root.number < 0
        room = (rows or self._longest()) - root
        unsent = self.tree.pop_unsent(room + 1)  # one more, to know whether there is more
        nodes = unsent[:room]
        nodes = nodes[: self._rows_to_send(nodes, root)] if rows is None else nodes
        self.tree.requeue(unsent[len(nodes) :])
        is_full = nodes and len(nodes) < len(unsent)
        self._least_probability = self.tree.probability(nodes[-1]) if is_full else 0.0
        return self.send(nodes, root) if root or nodes else None

    def _curve(self) -> bool:
        return self.pipeline.slot_seconds is not None and "curve" not in self._disabled

    def _rows_to_send(self, nodes: Sequence[Node], root: bool) -> int:
        """**curve**: as many of ``nodes`` (likeliest first) as maximise tokens per second.

        In a full pipeline, r rows bring the sum of their probabilities in the time of r rows in a stage and
        over a link.  Time beyond that of one row counts once per stage: it delays all segments in flight.  A
        root may go alone.  With experts, ``slot_worth`` decides.
        """
        seconds = self.pipeline.slot_seconds
        if seconds is None or not nodes or not self._curve():
            return len(nodes)
        worths = [self.tree.probability(node) for node in nodes]
        if self.pipeline.sparse:
            return self._worth.rows(worths, seconds, int(root))
        gains = np.cumsum([float(root), *worths])
        least, stages = seconds(1), self.pipeline.stages
        rates = [gains[rows] / (least + stages * (seconds(rows + root) - least))
                 for rows in range(0 if root else 1, len(gains))]
        # Of equal maxima take the last: where the curve is flat, further rows cost no time.
        return len(nodes) - int(np.argmax(rates[::-1]))

    # ---- drafting ----------------------------------------------------------------------

    def next_draft(self) -> DraftRequest | None:
        """Return the likeliest unexpanded nodes, at any depth, and the root once its true features have arrived.

        Redrafting from the root alone is slower: 1.71 x Chunk-PP instead of 2.66 (docs/experiments/flowspec.md).
        A node that is far less likely than all rows of the last segment is not expanded, because its children would
        not be sent. This halves the work at four requests, is as fast in greedy text, and 2 % slower in sampled text.
        """
        self.tree.requeue_expansion(node for node in self._pending_draft.values() if not node.expanded)
        nodes = [self.tree.root] if self._root_is_stale else []
        if self._root_is_stale and self._drafts_blocks:
            nodes += self._in_flight()
        if self.tree.size < _MAX_NODES:
            nodes += self.tree.pop_unexpanded(self.params.plus_width - self._root_is_stale,
                                               _WORTH_EXPANDING * self._least_probability)
        if not nodes:
            return None
        self._pending_draft = {node.id: node for node in nodes}
        return self.tree.draft_request(nodes, _CHILDREN)

    def _in_flight(self) -> list[Node]:
        """Return the likeliest nodes that a block from an older root ranked.

        The new block knows more of the text, and ranks what follows them along the paths that are in flight.
        """
        ranked = (node for node in self.tree.nodes() if node.expanded and node.successor < 0)
        return heapq.nlargest(_RANKED_AGAIN, ranked, lambda node: node.score)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        self._drafts_blocks = output.beyond is not None
        estimates = self._estimator.draft_estimates(output.scores).tolist()
        tokens, scores = output.tokens.tolist(), output.scores.tolist()
        for row, draft_node in enumerate(request.nodes):
            node = self._pending_draft.get(draft_node.id)
            if node is None or not node.alive:
                continue  # dropped meanwhile
            if draft_node.id == self.tree.root.id == request.root:
                self._root_is_stale = False
            if output.beyond is not None and output.beyond[row] and tokens[row][0] == ABSENT:
                self._beyond.append(node)
                continue
            self.tree.name_children(node, tokens[row], scores[row], estimates[row])
            self._look_up(node)
        self._pending_draft = {}

    def _read(self, tokens: Sequence[int]) -> None:
        if "lookup" not in self._disabled:
            for token in tokens:
                self._text.append(token)

    def _look_up(self, top: Node) -> None:
        """Add earlier continuations of this path while they are likely, without a draft pass (``lookup``).

        With it greedy text has 2.51 instead of 2.14 x Chunk-PP's tokens/s (docs/experiments/flowspec.md).
        """
        if "lookup" in self._disabled:
            return
        floor = self.tree.root.score + _WORTH_LOOKING
        queue = [(-top.score, top)] if top.score > floor else []
        for _ in range(_LOOK_UPS):
            if not queue:
                return
            node = heapq.heappop(queue)[1]
            candidates = self._text.candidates(self._path(node), _CHILDREN_PER_LOOKUP)
            scores = scores_from_probabilities(np.array([token for token, _ in candidates], np.int32),
                                               np.array([p for _, p in candidates]), node.position,
                                               self._sampling, self.params.rank)
            for (token, _), score in zip(candidates, scores.tolist(), strict=True):
                child = self.tree.look_up_child(node, token, score)
                if child is not None and child.score > floor and not child.expanded:
                    heapq.heappush(queue, (-child.score, child))

    def _path(self, node: Node) -> tuple[int, ...]:
        """Return the newest tokens of the text that ends with ``node``."""
        tokens: list[int] = []
        step = node
        while step.parent is not None and len(tokens) < _LONGEST_RUN:
            tokens.append(step.token)
            step = step.parent
        return (*self._text.newest, *reversed(tokens))[-_LONGEST_RUN:]

    # ---- outcomes ---------------------------------------------------------------------------

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        """**learn**: outcomes improve the estimate."""
        self.record(numbers, successors)
        self.tree.learn()
        commits, _ = self.accept()
        self._read([commit.token for commit in commits])
        if commits:
            self._root_is_stale = True
            self.tree.requeue_expansion(node for node in self._beyond if node.alive)
            self._beyond = []
            self._look_up(self.tree.root)
        return commits
