"""What a strategy owes to the draft device, checked for each request: a strategy may come from outside.

A strategy that breaks the contract fails its own request with one line, which names the strategy and what it
did last.  Other requests, and the stages, never see a message that the strategy was not allowed to send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from flowspec_edge.errors import RequestFailed
from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.strategies.parameters import MOST, parameters
from flowspec_edge.tree.draft_api import Commit, DraftNode, DraftRequest
from flowspec_edge.tree.segment_builder import SegmentBuilder

# A strategy may need a second question: its next_draft may find that a look-up in the text is enough, and its
# next_segment then has something to send.
_QUESTIONS = 2
_STEPS = 256  # between two tokens, besides what the strategy's parameters ask for
_ATTRIBUTES = ("params", "builder", "pipeline", "counters")


class StrategyContract:
    """Watches one strategy in one session. What the strategy returns may be of any type.

    last  what the strategy did last, for error messages
    """

    def __init__(self, strategy: Strategy, builder: SegmentBuilder, vocabulary: int,
                 rows: Callable[[int], int]) -> None:
        """Watch a strategy; ``rows``: number of stages -> rows that each keeps for the session, text and drafts."""
        self._strategy, self._builder = strategy, builder
        self._vocabulary = vocabulary
        self.last = "was created"
        if missing := [name for name in _ATTRIBUTES if not hasattr(strategy, name)]:
            raise self._broken(f"has no {missing[0]}: its __init__ has to call that of Strategy")
        self._most_rows = rows(strategy.pipeline.stages)
        builder.most_undecided = self._most_rows
        self._check_properties()
        values = [getattr(strategy.params, name) for name, parameter
                  in parameters(type(strategy.params)).items() if parameter.kind is int]
        self._most_steps = _STEPS + sum(values)
        self._steps = 0  # segments, and draft passes with nothing in flight, since the newest token
        self._questions = 0  # without an answer, and with nothing under way
        self._has_no_segment = self._has_no_draft = False  # the answers to the present question
        self._drafting = False  # a pass is under way
        self._in_flight: set[int] = set()  # runs that were sent and have not come back
        self._newest_run = builder.runs - 1  # the newest run that was sent
        self._due_layers: dict[int, set[int]] = {}  # run -> layers whose taps are still to come
        self._rows: dict[int, tuple[int, int]] = {}  # number -> token, position of a row that was sent
        self._successors: dict[int, int] = {}  # number -> the target's token after a row that came back
        self._expanded: set[int] = set()  # ids of nodes that passes have expanded

    # ---- what the strategy returns -----------------------------------------------------------------

    def _check_properties(self) -> None:
        most: Any = self._strategy.max_in_flight
        if not _is_int(most) or most < 1:
            raise self._broken(f"has a max_in_flight of {_short_repr(most)}, not a number of segments")
        taps: Any = self._strategy.prompt_taps
        if not isinstance(taps, tuple) or not all(_is_int(tap) and tap >= 0 for tap in taps):
            raise self._broken(f"has prompt_taps of {_short_repr(taps)}, not a tuple of layers")

    def segment(self, segment: Any, rows: int | None) -> None:
        """Check what ``next_segment`` returned; ``rows``: the most that it was allowed, if given."""
        if segment is None:
            self._has_no_segment = True
            return
        if not isinstance(segment, Segment):
            raise self._broken(f"returned {_short_repr(segment)} from next_segment, not a Segment or None")
        count = len(segment.numbers)
        if self._builder.sent_numbers(segment.run) is not segment.numbers or segment.run <= self._newest_run:
            raise self._broken(f"returned segment {segment.run} from next_segment, which it has sent before "
                               "or did not build; it has to return what builder.seal() gives, once")
        if segment.run != self._newest_run + 1:
            raise self._broken(f"returned segment {segment.run} from next_segment before segment "
                               f"{self._newest_run + 1}; it has to send each segment that it seals, in order")
        if rows is not None and count > rows:
            raise self._broken(f"returned {count} rows from next_segment, which may have {rows}")
        assert segment.tokens is not None
        tokens, positions = segment.tokens.tolist(), segment.positions.tolist()
        if invalid := [token for token in tokens if not 0 <= token < self._vocabulary]:
            raise self._broken(f"sent the token {invalid[0]}, outside the vocabulary of {self._vocabulary}")
        if invalid := [position for position in positions if position < 0]:
            raise self._broken(f"sent a row at position {invalid[0]}")
        undecided = self._builder.next_number - self._builder.base
        if undecided > self._most_rows:
            raise self._broken(f"has sent {undecided} rows of which none became text, more than the "
                               f"{self._most_rows} that the stages keep")
        self._step()
        self.record_segment(segment)
        self._rows.update(zip(segment.numbers.tolist(), zip(tokens, positions, strict=True), strict=True))
        self.last = f"sent segment {segment.run} with {count} rows"

    def probabilities(self, offer: Any, limit: int) -> None:
        """Check what ``row_probabilities`` returned."""
        if offer is None:
            return
        try:
            count, invalid = len(offer), [p for p in offer if not -1e-9 <= p <= 1 + 1e-6]
        except TypeError:
            raise self._broken(f"returned {_short_repr(offer)} from row_probabilities, not numbers") from None
        if invalid:
            raise self._broken(f"returned the probability {_short_repr(invalid[0])} from row_probabilities")
        if count > limit:
            raise self._broken(f"returned {count} rows from row_probabilities, which may have {limit}")
        if not count:
            self._has_no_segment = True

    def draft(self, request: Any, text: int) -> None:
        """Check what ``next_draft`` returned; ``text``: tokens so far.

        RequestFailed also if the strategy has nothing to send, nothing to draft, and nothing to wait for.
        """
        if request is None:
            self._has_no_draft = True
            self._check_idle()
            return
        if not isinstance(request, DraftRequest):
            raise self._broken(f"returned {_short_repr(request)} from next_draft, not a DraftRequest or None")
        self._check_nodes(request, text)
        if not self._in_flight:
            self._step()
        self._event()
        self._drafting = True
        self._expanded = {node for node in self._expanded if node >= request.root}
        self._expanded.update(node.id for node in request.nodes)
        self.last = f"asked for a draft pass over {len(request.nodes)} nodes"

    def no_drafter(self) -> None:
        """Note that the strategy was not asked for a draft pass, because the request has no draft model."""
        self._has_no_draft = True
        self._check_idle()

    def _check_nodes(self, request: DraftRequest, text: int) -> None:
        nodes: Any = request.nodes
        if not isinstance(nodes, tuple | list) or not all(isinstance(node, DraftNode) for node in nodes):
            raise self._broken(f"asked for a draft pass over {_short_repr(nodes)}, not a tuple of DraftNode")
        if not nodes:
            raise self._broken("asked for a draft pass over no nodes")
        numbers = [request.root, request.children,
                   *(getattr(node, field.name) for node in nodes for field in fields(DraftNode))]
        if invalid := [number for number in numbers if not _is_int(number)]:
            raise self._broken(f"asked for a draft pass with {_short_repr(invalid[0])} where a whole number belongs")
        if not 1 <= request.children <= MOST:
            raise self._broken(f"asked for {request.children} children a node in a draft pass")
        if len({node.id for node in nodes}) < len(nodes):
            raise self._broken("asked for a draft pass over one node twice")
        for node in nodes:
            if not 0 <= node.token < self._vocabulary or node.position < 0:
                raise self._broken(f"asked for a draft pass over the token {node.token} at position "
                                   f"{node.position}; the vocabulary has {self._vocabulary}")
            if node.id == request.root and node.position != text - 1:
                raise self._broken(f"asked for a draft pass below position {node.position}, where the text's "
                                   f"newest token is at {text - 1}: on_verified has to return all tokens "
                                   "that became text")
            if node.id != request.root and node.parent != request.root and node.parent not in self._expanded:
                raise self._broken(f"asked for a draft pass over node {node.id}, whose parent {node.parent} "
                                   "no draft pass has expanded")

    def controls(self, messages: Any) -> None:
        """Check what ``controls`` returned."""
        builder = self._builder
        for message in messages if isinstance(messages, list | tuple) else [messages]:
            match message:
                case Prune():
                    keep = message.keep.tolist()
                    right = (0 <= message.start <= message.stop <= builder.next_number
                             and all(a < b for a, b in pairwise(keep)))
                case Cancel():
                    right = all(0 <= run <= self._newest_run for run in message.runs)
                case _:
                    raise self._broken(f"returned {_short_repr(message)} from controls, not a list of Prune and "
                                       "Cancel")
            if not right or (message.session, message.epoch) != (builder.session, builder.epoch):
                raise self._broken(f"returned a {type(message).__name__} from controls that names rows or "
                                   "segments which it has not sent; builder.prune makes a right one")

    def commits(self, run: int, commits: Any, text: Sequence[int]) -> None:
        """Check what ``on_verified`` returned; ``text``: all tokens before.

        Each commit has to be the target's own token after the text, so that no strategy can change an answer.
        """
        if not isinstance(commits, list | tuple) or not all(isinstance(commit, Commit) for commit in commits):
            raise self._broken(f"returned {_short_repr(commits)} from on_verified, not a list of Commit")
        newest, end = text[-1], len(text)
        for commit in commits:
            if not (_is_int(commit.token) and _is_int(commit.source)):
                raise self._broken(f"returned {_short_repr(commit)} from on_verified, whose token and source have "
                                   "to be whole numbers")
            row = self._rows.get(commit.source)
            if commit.source not in self._successors or (row is not None and row != (newest, end - 1)):
                raise self._broken(f"committed token {commit.token} after row {commit.source}, which is not "
                                   "a verified row of the text's newest token")
            if commit.token != self._successors[commit.source]:
                raise self._broken(f"committed token {commit.token} after row {commit.source}, where the "
                                   f"target's is {self._successors[commit.source]}")
            newest, end = commit.token, end + 1
        self.last = f"committed {len(commits)} tokens after segment {run} came back"
        if commits:
            self._steps = 0
            oldest = commits[-1].source
            self._rows = {number: row for number, row in self._rows.items() if number >= oldest}
            self._successors = {n: token for n, token in self._successors.items() if n >= oldest}

    # ---- what the strategy waits for ---------------------------------------------------------------

    def record_segment(self, segment: Segment) -> None:
        """Note a segment that goes out, of the prompt or of the strategy."""
        self._event()
        self._newest_run = segment.run
        self._in_flight.add(segment.run)
        if segment.taps:
            self._due_layers[segment.run] = set(segment.taps)

    def returned(self, run: int, rows: int) -> None:
        """Note that the output of ``run`` is taken in.

        Its taps may come later, over links of their own; one without rows may have none.
        """
        self._event()
        self._in_flight.discard(run)
        if not rows:
            self._due_layers.pop(run, None)

    def tapped(self, run: int, layer: int) -> None:
        self._event()
        if run in self._due_layers:
            self._due_layers[run].discard(layer)
            if not self._due_layers[run]:
                del self._due_layers[run]

    def verified(self, numbers: Sequence[int], successors: Sequence[int]) -> None:
        self._successors.update(zip(numbers, successors, strict=True))

    def drafted(self) -> None:
        self._event()
        self._drafting = False
        self.last = "was given a draft pass's result"

    def started(self) -> None:
        self._event()
        self.last = "was started with the first token"

    # ---- the rules ---------------------------------------------------------------------------------

    def _event(self) -> None:
        """Something happened of which the strategy may make something."""
        self._questions = 0
        self._has_no_segment = self._has_no_draft = False

    def _check_idle(self) -> None:
        waits = self._in_flight or self._drafting or self._due_layers
        if waits or not (self._has_no_segment and self._has_no_draft):
            return
        self._has_no_segment = self._has_no_draft = False
        self._questions += 1
        if self._questions >= _QUESTIONS:
            raise self._broken("does nothing: no segment is in flight, and next_segment has none to send, "
                               "next_draft none to draft")

    def _step(self) -> None:
        self._steps += 1
        if self._steps > self._most_steps:
            raise self._broken(f"makes no progress: no new token in {self._most_steps} segments and draft "
                               "passes")

    def _broken(self, complaint: str) -> RequestFailed:
        return RequestFailed(f"the strategy {self._strategy.name} {complaint}; the last thing before: it "
                             f"{self.last} (the rules: docs/guides/write-a-strategy.md)")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _short_repr(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
