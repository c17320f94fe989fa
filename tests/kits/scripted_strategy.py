"""A strategy without pipeline and model: the test says what the draft answers and what comes back.

Tokens stand for nodes, so a token should occur only once in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flowspec_edge.messages import Segment
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.base import Pipeline, Strategy
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import DraftOutput
from flowspec_edge.tree.segment_builder import SegmentBuilder

ROOT, A, B, C, D, E, F, G, H, OTHER = range(100, 110)
PROMPT = 1
Children = list[tuple[int, float]]  # tokens and confidences, best first


class Device0:
    """A strategy after a prompt of one token; the first generated token is ROOT."""

    def __init__(self, name: str, pipeline: int | Pipeline = 4, text: Sequence[int] = (PROMPT,),
                 **params: int | float | str) -> None:
        """``pipeline``: its stages, if nothing else of it matters; ``text``: what the strategy is told of
        the prompt, for those that look into it."""
        self.builder = SegmentBuilder()
        self.builder.add(PROMPT, 0, committed=True)
        self.builder.pop_returned(self.builder.seal().run)
        self.builder.skip_prune()
        self.strategy: Strategy = STRATEGIES[name](
            Params(**params), self.builder,  # type: ignore[arg-type]
            pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline))
        self.strategy.begin(text, Sampling())
        self.strategy.start(ROOT, 1)

    def send(self) -> Segment:
        """The next segment; there must be one."""
        segment = self.strategy.next_segment()
        assert segment is not None
        return segment

    def layer(self) -> list[int]:
        """Tokens of the next segment; none if nothing is to be sent."""
        segment = self.strategy.next_segment()
        return [] if segment is None else tokens(segment)

    def asked(self) -> list[int]:
        """Tokens of the nodes that the next draft pass would expand."""
        request = self.strategy.next_draft()
        return [] if request is None else [node.token for node in request.nodes]

    def draft(self, answers: dict[int, Children]) -> None:
        """One pass: the children of every node asked for; nodes that are left out get unlikely ones."""
        request = self.strategy.next_draft()
        assert request is not None
        assert answers.keys() <= {node.token for node in request.nodes}
        filler = 1000 * (1 + request.nodes[0].id)
        found: list[Children] = []
        for node in request.nodes:
            known = answers.get(node.token, [])
            found.append(known + [(filler + len(found) * 50 + i, 1e-6)
                                  for i in range(request.children - len(known))])
        self.strategy.on_draft(request, DraftOutput(
            np.array([[token for token, _ in row[: request.children]] for row in found], np.int32),
            np.log([[p for _, p in row[: request.children]] for row in found])))

    def chain(self, *path: int, confidence: float = 0.9) -> None:
        """A pass for every step of ``path``."""
        for parent, child in pairwise(path):
            self.draft({parent: [(child, confidence)]})

    def back(self, segment: Segment, *successors: int) -> list[tuple[int, bool]]:
        """``segment`` has come back: the tokens that became text, and whether they were drafted.

        Without ``successors`` it is empty, as a cancelled one.
        """
        numbers, _ = self.builder.pop_returned(segment.run)
        commits = self.strategy.on_verified(segment.run, numbers.tolist() if successors else [], successors)
        return [(c.token, c.accepted) for c in commits]


def tokens(segment: Segment) -> list[int]:
    assert segment.tokens is not None
    return [int(token) for token in segment.tokens]
