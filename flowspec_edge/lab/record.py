"""Records what a model and its draft head say (``drivers.virtual.recording``), over any cluster.

A request runs with a strategy that drafts and sends nothing but the text: at every token it lets the head expand the
likeliest nodes below that root.  So the head reads the states that it reads while it drafts, wherever the model runs.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowspec_edge.d0.request import ClusterBackend, Request
from flowspec_edge.drivers.virtual.recording import Expansion, RecordedText, Recording, load_recording, rounded
from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Segment
from flowspec_edge.model.draft_kinds import EAGLE2
from flowspec_edge.strategies.autoregressive import Autoregressive
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.registry import strategy_meanwhile
from flowspec_edge.tree.draft_api import ABSENT, DraftNode, DraftOutput, DraftRequest
from flowspec_edge.tree.segment_builder import SegmentBuilder

Advance = Callable[[str], None]  # called before each text

_PASS = 16  # nodes of a draft pass
_ROOT = (-1, ABSENT)  # as a node's parent and token
_ON_TEXT = 10  # nodes on the text that are recorded below a root, whether or not the head finds them likely
_LEVELS, _LEVEL_WIDTH = 6, 10  # of the trees that FlowSpec's strategies draft: they are recorded first, whole


@dataclass(frozen=True)
class Budget:
    """What is recorded below a root: ``nodes`` with ``children`` each."""

    nodes: int
    children: int


@dataclass
class _Job:
    """The text that is being recorded; ``answer``: all of it."""

    budget: Budget
    answer: Sequence[int] = ()
    roots: list[Expansion] = field(default_factory=list)


class Expander:
    """Which nodes below a root are expanded next: whole levels first, then the likeliest of all.

    Nodes on the text are always expanded: a look-up may draft them where the head does not.

    ``nodes`` in the order of their expansion, as (parent's place, token)
    """

    def __init__(self, budget: Budget, text: Sequence[int] = ()) -> None:
        """Begin below a root; ``text``: what follows it."""
        self._budget = budget
        self._text = text[:_ON_TEXT]
        self._right: list[int] = []  # places of the root and the nodes on the text
        self.nodes: list[tuple[int, int]] = []
        self.tokens: list[list[int]] = []
        self.scores: list[list[float]] = []
        self._depths: list[int] = []
        self._sums: list[float] = []
        # Children that are not expanded, by falling log probability: (-sum, parent's place, token).
        self._open: list[tuple[float, int, int]] = []
        self._levels: dict[int, list[tuple[float, int, int]]] = {}  # by depth, of the levels to come
        self._level = 0
        self._expanded: set[tuple[int, int]] = set()

    def next(self) -> list[tuple[int, int]]:
        """Return the places of the nodes' parents and their tokens; none at the end."""
        if not self.nodes:
            return [_ROOT]
        right = self._next_right()
        room = self._budget.nodes - len(self.nodes)
        if self._level < _LEVELS - 1 and room > 0:
            self._level += 1
            level = heapq.nsmallest(min(_LEVEL_WIDTH, room), self._levels.get(self._level, []))
            if level:
                return sorted({*right, *((parent, token) for _, parent, token in level)})
        batch: set[tuple[int, int]] = {*right}
        while self._open and len(batch) < min(_PASS, room):
            _, parent, token = heapq.heappop(self._open)
            if (parent, token) not in self._expanded:
                batch.add((parent, token))
        return sorted(batch)

    def _next_right(self) -> list[tuple[int, int]]:
        """Return the first node on the text that is not expanded; none if all are."""
        while len(self._right) <= len(self._text):
            node = (self._right[-1], self._text[len(self._right) - 1])
            if node not in self._expanded:
                return [node]
            self._right.append(self.nodes.index(node))
        return []

    def add(self, nodes: Sequence[tuple[int, int]], output: DraftOutput) -> None:
        """Take in the children of what :meth:`next` returned."""
        for (parent, token), tokens, scores in zip(nodes, output.tokens.tolist(), output.scores.tolist(), strict=True):
            index = len(self.nodes)
            self.nodes.append((parent, token))
            self._expanded.add((parent, token))
            if parent < 0:
                self._right.append(index)
            self.tokens.append(tokens)
            self.scores.append(scores)
            depth = self._depths[parent] + 1 if parent >= 0 else 0
            total = self._sums[parent] + self._score(parent, token) if parent >= 0 else 0.0
            self._depths.append(depth)
            self._sums.append(total)
            for child, score in zip(tokens, scores, strict=True):
                if score > -math.inf:
                    entry = (-(total + score), index, child)
                    heapq.heappush(self._open, entry)
                    self._levels.setdefault(depth + 1, []).append(entry)

    def _score(self, parent: int, token: int) -> float:
        """Return a child's score.

        A token that the head did not name counts as likely as the least likely one that it named.
        """
        scores_by_token = dict(zip(self.tokens[parent], self.scores[parent], strict=True))
        return scores_by_token.get(token, min(self.scores[parent]))

    def depth(self, index: int) -> int:
        return self._depths[index]

    def expansion(self) -> Expansion:
        parents, node_tokens = zip(*self.nodes, strict=True)
        return Expansion(np.array(parents, np.int32), np.array(node_tokens, np.int32), np.array(self.tokens, np.int32),
                         rounded(np.array(self.scores, np.float64)))


class RecordingStrategy(Autoregressive):
    """Plain decoding that has the head's tree below each token; ``job`` takes the trees."""

    name = "recording"
    summary = "plain decoding that records what the draft head would draft (flowspec record)"
    drafter = EAGLE2.name  # type: ignore[assignment]  # plain decoding has none
    job: ClassVar[_Job]

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        super().__init__(params, builder, pipeline)
        self._next_id = 0
        self._expander: Expander | None = None
        self._expanding: list[tuple[int, int]] = []
        self._ids: list[int] = []  # of the expander's nodes

    def start(self, token: int, position: int) -> None:
        super().start(token, position)
        self._answer_tokens = 1  # tokens of the answer
        self._expander = self._new_expander()

    def _new_expander(self) -> Expander:
        return Expander(self.job.budget, self.job.answer[self._answer_tokens :])

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Any]:
        commits = super().on_verified(run, numbers, successors)
        if commits:
            self._answer_tokens += len(commits)
            self._expander, self._ids = self._new_expander(), []
        return commits

    def next_segment(self, rows: int | None = None) -> Segment | None:
        """Return the token goes when its tree is recorded."""
        return None if self._expander is not None else super().next_segment(rows)

    def row_probabilities(self, limit: int) -> Sequence[float]:
        return () if self._expander is not None else super().row_probabilities(limit)

    def next_draft(self) -> DraftRequest | None:
        expander = self._expander
        if expander is None or self._unsent is None:
            return None
        self._expanding = expander.next()
        if not self._expanding:
            self.job.roots.append(expander.expansion())
            self._expander = None
            return None
        nodes: list[DraftNode] = []
        for parent, token in self._expanding:
            node_id = self._next_id + len(nodes)
            if parent < 0:
                nodes.append(DraftNode(node_id, -1, self._unsent, self._position))
            else:
                nodes.append(DraftNode(node_id, self._ids[parent], token,
                                       self._position + expander.depth(parent) + 1))
        self._next_id += len(nodes)
        self._ids += [node.id for node in nodes]
        return DraftRequest(self._ids[0], tuple(nodes), self.job.budget.children)

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        if self._expander is not None and request.root == self._ids[0]:
            self._expander.add(self._expanding, output)


STRATEGY = f"{__name__}:{RecordingStrategy.__name__}"


@dataclass(frozen=True)
class TextToRecord:
    """A text that is to be recorded.

    ``task``, ``name``: of the prompt; ``request``: with its sampling and its largest number of tokens.
    """

    task: str
    name: str
    request: Request


def record(cluster: ClusterBackend, prompts: Sequence[TextToRecord], about: Recording, budget: Budget, work: Path,
           advance: Advance = lambda _: None) -> Recording:
    """Record every prompt; ``about`` is the recording without texts.

    Each finished text is a file in ``work``, so that a run that broke off continues there.  A prompt that has no token
    of an answer, at one temperature or seed, is left out with all of its answers: who measures takes every prompt at
    every temperature.  UsageError if ``work`` has texts of another model or budget, or if no text is left.
    """
    work.mkdir(parents=True, exist_ok=True)
    with strategy_meanwhile(STRATEGY) as name:
        texts = _texts(cluster, prompts, about, budget, work, advance, name)
    recorded = Counter((text.task, text.name) for text in texts)
    requested = Counter((prompt.task, prompt.name) for prompt in prompts)
    texts = [text for text in texts if recorded[text.task, text.name] == requested[text.task, text.name]]
    if not texts:
        raise UsageError("none of the prompts has an answer: there is nothing to record")
    return replace(about, texts=tuple(texts))


def _texts(cluster: ClusterBackend, prompts: Sequence[TextToRecord], about: Recording, budget: Budget, work: Path,
           advance: Advance, name: str) -> list[RecordedText]:
    """Record the prompts' texts and yield them; ``name``: of the strategy that records."""
    texts: list[RecordedText] = []
    for prompt in prompts:
        advance(f"{prompt.task} {prompt.name}, temperature {prompt.request.sampling.temperature:g}")
        path = work / f"{_key(prompt, about, budget)}.flowrec"
        if path.exists():
            texts += load_recording(path).texts
            continue
        plain = cluster.generate(replace(prompt.request, strategy=Autoregressive.name))
        RecordingStrategy.job = job = _Job(budget, plain.tokens)
        result = cluster.generate(replace(prompt.request, strategy=name))
        if not result.tokens or result.finish_reason == "cancelled":
            continue
        text = RecordedText(prompt.task, prompt.name, tuple(prompt.request.prompt), tuple(result.tokens),
                            result.finish_reason, result.stop_id, prompt.request.sampling,
                            tuple(job.roots[: len(result.tokens)]))
        replace(about, texts=(text,)).save(path)
        texts.append(text)
    return texts


def _key(prompt: TextToRecord, about: Recording, budget: Budget) -> str:
    """Return what a text depends on, as a file's name."""
    request = prompt.request
    weights = [about.provenance.get(name) for name in ("digest", "head", "dtype")]
    content = json.dumps([about.model, about.draft, about.rank, about.tau, weights, list(request.prompt),
                          request.max_new_tokens, repr(request.sampling), sorted(request.stop_ids), repr(budget),
                          prompt.task, prompt.name])
    return hashlib.sha256(content.encode()).hexdigest()[:24]
