"""FlowSpec+: every slot of the pipeline is filled with what is likeliest to become text.

FlowSpec drafts a few levels from the root at every acceptance, so it never looks further ahead than
they reach: about (depth + 1) / (N + 2) tokens a turn.  Here one tree lives as long as the round, and
three questions are answered anew whenever they arise, each by the same measure, the probability that a
node becomes text (``tree.guess_tree``):

    what to send      the likeliest unsent nodes, whatever their depth          ``next_segment``
    what to draft     the likeliest nodes that have no children yet             ``next_draft``
    what it is worth  the draft model's word and the text's, weighed by what
                      has come true so far                                      ``verified``

Each idea has a name by which ``plus_without`` leaves it out (docs/strategies.md has the figures), and a
function that is that idea.  The policy is here; the arithmetic is ``tree.acceptance``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from flowspec_edge.messages import Segment
from flowspec_edge.sampling import Sampling, chance_scores
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import LONGEST_BLOCK, Params
from flowspec_edge.strategies.tree_strategy import TreeStrategy
from flowspec_edge.tree.acceptance import Acceptance
from flowspec_edge.tree.draft_tree import Node
from flowspec_edge.tree.guess_tree import GuessTree
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import Commit, DraftNode, DraftRequest, Expansion
from flowspec_edge.tree.text_index import TextIndex

_ENOUGH = 1024  # nodes: beyond that no draft pass is worth its time and the memory of what it drafts
_CHILDREN = 10  # that a draft pass names of a node (FlowSpec's k)
_LONGEST_RUN = 8  # tokens that the look-up compares
_FOUND = 4  # children that one look-up names
_LOOK_UPS = 24  # nodes that are looked up at one moment, at most
_WORTH_LOOKING = math.log(0.02)  # a found child less likely than this is not followed


class FlowSpecPlus(TreeStrategy):
    """Best-first drafting and sending over one lasting tree."""

    name = "flowspec_plus"
    summary = "one lasting tree: the likeliest nodes are drafted and sent, at every depth"
    tree: GuessTree

    def __init__(self, params: Params, ledger: Ledger, pipeline: Pipeline) -> None:
        super().__init__(params, ledger, pipeline)
        self._without = params.left_out()

    @property
    def sends_ahead(self) -> bool:
        """**ahead**: the pipeline does not wait for D0's draft passes (``runtime.pace``).

        As many segments are in flight as there are stages, so only V1's idle moments are filled.
        """
        return "ahead" not in self._without

    @property
    def learns_slot(self) -> bool:
        """**curve** is all that asks how long a segment takes."""
        return "curve" not in self._without

    def begin(self, text: Sequence[int], sampling: Sampling, vocabulary: int) -> None:
        self._sampling = sampling
        self._acceptance = Acceptance(sampling.greedy, "learn" not in self._without)
        self._text = TextIndex(_LONGEST_RUN, 1)
        self._read(text)

    def start(self, token: int, position: int) -> None:
        self._read([token])
        super().start(token, position)
        self._look_up(self.tree.root)

    def begin_round(self) -> None:
        self._root_is_stale = True
        self._asked_of: dict[int, Node] = {}

    def _new_tree(self, token: int, position: int) -> GuessTree:
        return GuessTree(token, position, self._next_id, self._acceptance)

    # ---- what to send -----------------------------------------------------------------------

    def next_segment(self) -> Segment | None:
        """**root**: a new root goes at once, with whatever is known by then; **fill**: then the
        likeliest unsent nodes of the newest tree."""
        root = self.tree.root.number < 0
        nodes = self.tree.take(self._most_rows() - root)
        worth = self._worth_sending(nodes, root)
        self.tree.put_back(nodes[worth:])
        nodes = nodes[:worth]
        return self._send(nodes, root) if root or nodes else None

    def _most_rows(self) -> int:
        return self.params.plus_rows or (LONGEST_BLOCK if self._curve() else self.params.segment)

    def _curve(self) -> bool:
        return self.pipeline.slot_seconds is not None and "curve" not in self._without

    def _worth_sending(self, nodes: Sequence[Node], root: bool) -> int:
        """**curve**: as many of ``nodes`` (likeliest first) as bring the most tokens a second.

        A row brings, on average, as many tokens as it is likely to become text, so a segment of r
        rows brings (sum of their probabilities) / (what r rows take in a stage and over a link)
        tokens a second once the pipeline is full.  What it takes longer than a single row counts
        once for every stage: it delays the news of all segments in flight, and so what follows them.
        A root may go alone.
        """
        seconds = self.pipeline.slot_seconds
        if seconds is None or not nodes or not self._curve():
            return len(nodes)
        gains = np.cumsum([float(root), *(self.tree.probability(node) for node in nodes)])
        least, stages = seconds(1), self.pipeline.stages
        rates = [gains[rows] / (least + stages * (seconds(rows + root) - least))
                 for rows in range(0 if root else 1, len(gains))]
        # The last of the best: on a flat piece of the curve every row is welcome.
        return len(nodes) - int(np.argmax(rates[::-1]))

    # ---- what to draft ----------------------------------------------------------------------

    def next_draft(self) -> DraftRequest | None:
        """**best-first**: the likeliest nodes that have not been expanded, at whatever depth, and the
        root once its true features are here (docs/experiments.md: 2.66 x Chunk-PP, where
        drafting anew from the root has 1.71).

        The draft model keeps what it has computed for all nodes below the root.
        """
        self.tree.ask_again(node for node in self._asked_of.values() if not node.expanded)
        nodes = [self.tree.root] if self._root_is_stale else []
        if self.tree.size < _ENOUGH:
            nodes += self.tree.unexpanded(self.params.plus_width - len(nodes))
        if not nodes:
            return None
        self._asked_of = {node.id: node for node in nodes}
        return DraftRequest(self.tree.root.id, tuple(
            DraftNode(n.id, -1 if n.parent is None else n.parent.id, n.token, n.position) for n in nodes
        ), _CHILDREN)

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        estimates = self._acceptance.drafted(expansion.scores).tolist()
        tokens, scores = expansion.tokens.tolist(), expansion.scores.tolist()
        for row, asked in enumerate(request.nodes):
            node = self._asked_of.get(asked.id)
            if node is None or not node.alive:
                continue  # the text has taken another way meanwhile
            if asked.id == self.tree.root.id == request.root:
                self._root_is_stale = False
            self.tree.drafted(node, tokens[row], scores[row], estimates[row])
            self._look_up(node)
        self._asked_of = {}

    def _read(self, tokens: Sequence[int]) -> None:
        """They are text; nobody pays for an index that is not looked into."""
        if "lookup" not in self._without:
            for token in tokens:
                self._text.append(token)

    def _look_up(self, top: Node) -> None:
        """**lookup**: what the text has had after this path before, token after token, while that is
        likely; it costs no pass (docs/experiments.md: 2.14 to 2.51 x Chunk-PP in greedy text)."""
        if "lookup" in self._without:
            return
        floor = self.tree.root.score + _WORTH_LOOKING
        queue = [(-top.score, top)] if top.score > floor else []
        for _ in range(_LOOK_UPS):
            if not queue:
                return
            node = heapq.heappop(queue)[1]
            for token, p in self._text.candidates(self._path(node), _FOUND):
                score = chance_scores(np.array([token], np.int32), np.array([p]), node.position,
                                      self._sampling, self.params.rank)[0]
                child = self.tree.looked_up(node, token, float(score))
                if child is not None and child.score > floor and not child.expanded:
                    heapq.heappush(queue, (-child.score, child))

    def _path(self, node: Node) -> tuple[int, ...]:
        """The newest tokens of the text that ends with ``node``."""
        tokens: list[int] = []
        step = node
        while step.parent is not None and len(tokens) < _LONGEST_RUN:
            tokens.append(step.token)
            step = step.parent
        return (*self._text.newest, *reversed(tokens))[-_LONGEST_RUN:]

    # ---- what has come true -----------------------------------------------------------------

    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        """**learn**: what the target has judged tells how far both sources can be believed."""
        self._record(numbers, successors)
        self.tree.learn()
        commits, _ = self._walk()
        self._read([commit.token for commit in commits])
        if commits:
            self._root_is_stale = True
            self._look_up(self.tree.root)
        return commits
