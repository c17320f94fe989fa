"""D0's side of one request as small steps, shared by the real-time and virtual-time drivers.

A driver polls for messages and tasks, runs each task when it likes, and passes in arrivals. Knows the order
of D0's steps. Does not know sockets or how time passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.d0.capacity import session_rows, tentative_rows
from flowspec_edge.d0.generation import Generation
from flowspec_edge.d0.prompt_chunks import USUAL, PromptCurve
from flowspec_edge.d0.request import FinishReason, Likelihood, Request, Result
from flowspec_edge.d0.strategy_contract import StrategyContract
from flowspec_edge.d0.target import Logits, States, Target
from flowspec_edge.d0.token_rules import TokenRules
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.errors import ProtocolError, RequestFailed, UsageError
from flowspec_edge.messages import Cancel, Open, Output, Prune, Segment, Tap
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.segment_builder import SegmentBuilder


@dataclass(frozen=True)
class Verify:
    """lm_head on an output's rows, the tree walk, and the decisions that follow."""

    output: Output


@dataclass(frozen=True)
class DraftPass:
    request: DraftRequest


Task = Verify | DraftPass

# The next turn of a chat may repeat all of a prompt but its last tokens, which begin an answer whose
# reasoning the template leaves out later.  A segment of so few rows takes as long as a single row
# (Params.segment).
_BEFORE_ANSWER = 16


class DraftSession:
    def __init__(self, request: Request, make: Callable[[SegmentBuilder], Strategy], drafter: Drafter | None,
                 head: Target, clock: Callable[[], float], session: int = 1,
                 predecessor: DraftSession | None = None, cached_rows: int = 0, parent_session: int = -1,
                 draft: str = "", prompts: PromptCurve | None = None) -> None:
        """Begin a request, or go on with one whose earlier session was lost.

        predecessor   the request's draft session in an earlier session: its prompt and answer become this
                      one's prompt
        cached_rows   rows of the prompt that the stages retain from ``parent_session``; at least one must be
                      left to prefill, and a drafter must have been rewound to one token more
        draft         what the request drafts with, as ``draft_label`` says it
        prompts       the stages' times of a prompt's segments, if they are known
        """
        if not request.prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens must be at least 1, not {request.max_new_tokens}")
        self.request = request
        self._needed_layers = frozenset(drafter.taps if drafter else ())  # layers whose states the drafter needs
        self.builder = SegmentBuilder(session, 0, tuple(sorted(self._needed_layers)), cached_rows)
        self.strategy = make(self.builder)
        self._contract = StrategyContract(self.strategy, self.builder, head.vocabulary,
                                          partial(session_rows, request))
        self.drafter, self._draft = drafter, draft
        self._cached_rows, self._parent_session = cached_rows, parent_session
        self.head = head
        self._generation = Generation(request, clock)
        if predecessor:
            assert not predecessor.finished
            self._generation = predecessor._generation
            self._generation.suspend(predecessor.strategy.counters)
        generation = self._generation
        rules = generation.grammar, generation.penalties, generation.restrictions
        self._rules = TokenRules(*rules) if any(rule is not None for rule in rules) else None
        self._text = [*request.prompt, *self.tokens]  # to prefill
        assert 0 <= cached_rows < len(self._text)
        self._reused: int = predecessor._reused if predecessor else cached_rows
        self._prompt = deque(self._text[cached_rows:])
        self._chunk = request.params.prefill_chunk or (
            prompts.chunk(len(self._prompt), self.strategy.pipeline.stages, cached_rows) if prompts else USUAL)
        self._prompt_chunk: int = predecessor._prompt_chunk if predecessor else self._chunk
        self._pending_prompt_rows = len(self._prompt)  # rows of it that have not come back
        self._accepted = list(self._text)  # all accepted tokens, also those after the end of the answer
        self._chain = list(range(cached_rows))  # numbers of its rows that have come back
        self._outputs: deque[Output] = deque()
        self._newest_run = -1  # of the outputs
        self._taps: list[Tap] = []  # not passed to the drafter yet
        self._tapped: dict[int, set[int]] = {}  # run -> needed layers whose states have come
        self._hidden: dict[int, tuple[States, int]] = {}  # number -> states [n, H] and its row in them
        self._rounds = 0
        if drafter and not cached_rows:
            drafter.reset(request.sampling, request.params.rank, request.params.tau)

    @property
    def draft_kind(self) -> str:
        """The kind of draft model that it uses, which may stand in for the one that its strategy wants."""
        return self._draft.partition("+")[0]

    # ---- messages to send ------------------------------------------------------------------

    def open_message(self) -> Open:
        stages = self.strategy.pipeline.stages
        return Open(self.builder.session, self.builder.epoch, session_rows(self.request, stages),
                    parent_session=self._parent_session, rows=self._cached_rows,
                    tentative=tentative_rows(self.request.params, stages), snapshot=self.snapshot)

    def controls(self) -> list[Prune | Cancel]:
        if self._pending_prompt_rows:
            return []
        messages = self.strategy.controls()
        self._contract.controls(messages)
        return messages

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt has not been sent."""
        return bool(self._prompt) and not self.finished

    @property
    def _may_send(self) -> bool:
        return not (self.finished or self._pending_prompt_rows
                    or self.builder.in_flight >= self.strategy.max_in_flight)

    def row_probabilities(self, limit: int) -> Sequence[float] | None:
        """Return ``Strategy.row_probabilities``; nothing while the prompt is read."""
        offer = self.strategy.row_probabilities(limit) if self._may_send else ()
        if not (self._pending_prompt_rows or self.finished):
            self._contract.probabilities(offer, limit)
        return offer

    def next_segment(self, rows: int | None = None) -> Segment | None:
        """Return the best segment that may be sent now, of at most ``rows`` rows if they are given.

        The caller checks that V1 has room. A chunk of the prompt, while any is left.
        """
        if self.is_reading:
            return self._next_chunk(min(rows or self._chunk, self._chunk))
        if self.finished or self._pending_prompt_rows:
            return None
        if not self._may_send:
            self._contract.segment(None, rows)
            return None
        # Strategies from outside may not have the argument, which those that divide their rows get alone.
        segment = self.strategy.next_segment() if rows is None else self.strategy.next_segment(rows)
        self._contract.segment(segment, rows)
        if segment and self._rules:
            self._rules.record_segment(segment)
        return segment

    def _next_chunk(self, rows: int) -> Segment:
        """Chunked prefill (paper, III-A): a slice of the prompt as a chain of committed tokens."""
        position = len(self._text) - len(self._prompt)
        parent = -1
        for _ in range(min(rows, len(self._prompt))):
            parent = self.builder.add(self._prompt.popleft(), position, parent, committed=True)
            position += 1
        segment = self.builder.seal(self.strategy.prompt_taps)
        self._contract.record_segment(segment)
        return segment

    # ---- arrivals --------------------------------------------------------------------------

    def receive(self, message: Output | Tap) -> bool:
        """Store an arrival for the tasks, without processing it; False for a stale one, which is ignored.

        ProtocolError for one that does not answer what was sent.
        """
        if (message.session, message.epoch) != (self.builder.session, self.builder.epoch):
            return False
        self._check(message)
        match message:
            case Output():
                self._newest_run = message.run
                self._outputs.append(message)
            case Tap():
                self._taps.append(message)
                self._contract.tapped(message.run, message.layer)
                self.strategy.on_tap(message.run, message.layer)
                if message.layer in self._needed_layers:
                    self._tapped.setdefault(message.run, set()).add(message.layer)
        return True

    def _check(self, message: Output | Tap) -> None:
        name = f"{type(message).__name__.lower()} of segment {message.run} of session {message.session}"
        width = message.hidden.array.shape[1]
        if width != self.head.hidden_size:
            raise ProtocolError(f"{name}: its states have {width} values, not {self.head.hidden_size}")
        sent_numbers, numbers = self.builder.sent_numbers(message.run), message.numbers
        if isinstance(message, Output):
            if sent_numbers is None or message.run <= self._newest_run:
                raise ProtocolError(f"{name}: the segment is not in flight, or has an output already")
            if self._pending_prompt_rows and len(numbers) != len(sent_numbers):
                raise ProtocolError(f"{name}: it has {len(numbers)} rows of a prompt's {len(sent_numbers)}")
        is_out_of_order = bool((numbers[1:] <= numbers[:-1]).any())
        if sent_numbers is not None and not is_out_of_order:
            at = np.searchsorted(sent_numbers, numbers)
            is_out_of_order = bool((at >= len(sent_numbers)).any() or (sent_numbers[at] != numbers).any())
        if is_out_of_order:
            raise ProtocolError(f"{name}: it has rows that were not sent in it")

    # ---- tasks -----------------------------------------------------------------------------

    def next_output(self) -> Verify | None:
        """Return the oldest output, if all taps of its rows have arrived."""
        if self.finished or not self._outputs or not self._is_complete(self._outputs[0]):
            return None
        return Verify(self._outputs.popleft())

    def next_draft(self) -> DraftPass | None:
        if self.finished or self._pending_prompt_rows:
            return None
        if self.drafter is None:
            self._contract.no_drafter()
            return None
        request = self.strategy.next_draft()
        self._contract.draft(request, len(self._accepted))
        if request is None:
            return None
        self._pass_on_taps(self.drafter)  # now: those that arrive during a pass are for the next one
        return DraftPass(request)

    def _is_complete(self, output: Output) -> bool:
        """Return whether the drafter's taps have arrived; they come over other links than the output.

        Every stage has tapped a row that comes out; an output without rows predicts nothing.
        """
        return not len(output.numbers) or self._needed_layers <= self._tapped.get(output.run, set())

    def _pass_on_taps(self, drafter: Drafter) -> None:
        for tap in self._taps:
            drafter.tap(tap)
        self._taps.clear()

    def complete(self, task: Task) -> None:
        """Do a task of this request alone (``d0.jobs``: of several together)."""
        if isinstance(task, Verify):
            states, verified = self.begin(task)
            verified(self.head.logits(states))
        elif self.drafter is not None:
            self.drafted(task.request, self.drafter.expand(task.request))

    def begin(self, task: Verify) -> tuple[States, Callable[[Logits], None]]:
        """Take the output in.

        Returns the states [m, H] that lm_head has to see, and the rest of the task, to be called with their logits
        [m, V]: choose tokens, walk the tree, commit.
        """
        output = task.output
        numbers, positions = self.builder.pop_returned(output.run)
        self._contract.returned(output.run, len(output.numbers))
        positions = positions[np.searchsorted(numbers, output.numbers)]
        if (row := self.head.first_row_not_finite(output.hidden)) is not None:
            raise RequestFailed(f"the last stage's output is not finite from position {positions[row]} "
                                f"on: activations overflow {output.hidden.dtype}, or the weights are "
                                "damaged; choose a --dtype with a wider range (bf16, fp32), or check the "
                                "files with: flowspec models verify")
        if self.drafter and self._needed_layers:
            self._pass_on_taps(self.drafter)  # before the commits that use them
            self._tapped = {run: layers for run, layers in self._tapped.items() if run > output.run}
        states = self.head.states(output.hidden)
        if not self._pending_prompt_rows:
            return states, partial(self._verify, output, positions, states)
        self._take_prompt(output, positions, states)
        if self._pending_prompt_rows:
            return states[:0], lambda logits: None
        last = self.head.stacked([(states, -1)])  # frees the chunk's other rows
        return last, partial(self._end_prompt, int(output.numbers[-1]), positions[-1:], last)

    def _take_prompt(self, output: Output, positions: NDArray[np.int32], states: States) -> None:
        """Pass the features of prompt rows to the drafter."""
        self._pending_prompt_rows -= len(output.numbers)
        self._chain += output.numbers.tolist()
        if self.drafter:
            text = self._text
            if positions[0] == 0:
                self.drafter.commit(text[:1], None)
            following = [text[p + 1] for p in positions.tolist() if p + 1 < len(text)]
            if following:
                self.drafter.commit(following, states[: len(following)],
                                    output.numbers[: len(following)].tolist())

    def _end_prompt(self, number: int, position: NDArray[np.int32], state: States, logits: Logits) -> None:
        """Choose the first token from the output of the prompt's last row."""
        logits, allowed = self._rules.newest(logits) if self._rules else (logits, None)
        token = int(self.head.choose(logits, position, self.request.sampling, allowed)[0])
        self._hidden[number] = (state, 0)
        self.builder.skip_prune()
        self._generation.prefilled()
        self.strategy.begin(self._text, self.request.sampling)
        self.strategy.start(token, len(self._text))
        self._contract.started()
        self._commit([Commit(token, number)])

    def _verify(self, output: Output, positions: NDArray[np.int32], states: States, logits: Logits) -> None:
        logits, allowed = (self._rules.returned(output, len(self._accepted), logits) if self._rules
                           else (logits, None))
        successors = self.head.choose(logits, positions, self.request.sampling, allowed)
        numbers, tokens = output.numbers.tolist(), successors.tolist()
        for row, number in enumerate(numbers):
            self._hidden[number] = (states, row)
        self._contract.verified(numbers, tokens)
        self._rounds = self.strategy.counters.rounds
        commits = self.strategy.on_verified(output.run, numbers, tokens)
        self._contract.commits(output.run, commits, self._accepted)
        self._commit(commits)

    def drafted(self, request: DraftRequest, output: DraftOutput) -> None:
        self._contract.drafted()
        self.strategy.on_draft(request, output)

    def _commit(self, commits: list[Commit]) -> None:
        if not commits:
            return
        if self._rules:
            self._rules.check(commit.source for commit in commits)
        features = self.head.stacked([self._hidden[c.source] for c in commits])
        if self.drafter:
            self.drafter.commit([c.token for c in commits], features, [c.source for c in commits])
        likelihoods = self._likelihoods(commits, features)
        self._accepted += [c.token for c in commits]
        self._chain += [c.source for c in commits if c.source > self._chain[-1]]  # has the prompt's last
        newest = commits[-1].source  # older rows predict nothing any more
        self._hidden = {n: v for n, v in self._hidden.items() if n >= newest}
        self._generation.extend(commits, likelihoods)

    def _likelihoods(self, commits: list[Commit], features: States) -> list[Likelihood]:
        """Run lm_head again, for these rows only, if the request asks for likelihoods."""
        count = self.request.logprobs
        return [] if count is None else self.head.likelihoods(features, [c.token for c in commits], count)

    # ---- the answer ------------------------------------------------------------------------

    def cancel(self) -> None:
        self._generation.cancel()

    def retainable_rows(self) -> tuple[list[int], list[int]]:
        """Return numbers and tokens of the text's rows that have come back: every stage has these."""
        return self._chain, self._accepted[: len(self._chain)]

    @property
    def snapshot(self) -> int:
        """Rows of the text at which stages keep a snapshot: a little before the prompt's end."""
        return max(self._cached_rows, len(self._text) - _BEFORE_ANSWER)

    @property
    def text_rows(self) -> int:
        """Rows of the text that a stage has at most."""
        return len(self._accepted)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None while it is incomplete."""
        return self._generation.finish_reason

    @property
    def finished(self) -> bool:
        return self._generation.finish_reason is not None

    @property
    def tokens(self) -> Sequence[int]:
        return self._generation.tokens

    def new_likelihoods(self) -> list[Likelihood]:
        return self._generation.new_likelihoods()

    def new_tokens(self) -> list[int]:
        return self._generation.new_tokens()

    def result(self, slot_s: float, bytes_sent: int, stages: tuple[dict[str, float], ...] = ()) -> Result:
        """Make the request's result; ``slot_s``: time of one segment in the slowest stage."""
        return self._generation.result(self.strategy.counters, self._rounds, slot_s, bytes_sent, stages,
                                       self._reused, self._draft, self._prompt_chunk)
