"""D0's side of one request: prompt, strategy, drafter, lm_head and the books, in small steps.

Knows in which order D0 does things and what a result is made of.  Does not know sockets or how
time passes: a driver asks for messages to send and for the next piece of work, runs it when and
as long as it likes, and hands in what arrives.  Both drivers use this very object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.errors import ProtocolError, UsageError
from flowspec_edge.messages import Cancel, Credit, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.lm_head import LmHead
from flowspec_edge.runtime.request import FinishReason, Likelihood, Request, Result, Stats
from flowspec_edge.strategies.base import Counters, Strategy
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import Commit, DraftRequest


def tentative_rows(params: Params, stages: int) -> int:
    """Cache rows for drafts beside the text's own: living trees, and dead rows not yet pruned.

    Two whole trees and all that can be in flight, twice over, for prunes that are late.
    """
    tree = params.tree_size + params.expand_size + params.extend_size
    return max(1024, 2 * (2 * tree + (stages + 2) * params.largest_segment()))


def session_rows(request: Request, stages: int) -> int:
    """Cache rows that a request takes in every stage."""
    return len(request.prompt) + request.max_new_tokens + tentative_rows(request.params, stages)


def cache_rows(context: int, at_once: int, params: Params, stages: int) -> int:
    """Cache rows for ``at_once`` requests beside one another, whose texts, together with those that are
    kept for requests to come, have ``context`` tokens."""
    return context + at_once * tentative_rows(params, stages)


@dataclass(frozen=True)
class Verify:
    """Work for D0: lm_head on an output's rows, the walk, and what follows from it."""

    output: Output


@dataclass(frozen=True)
class Draft:
    """Work for D0: one pass of the drafter."""

    request: DraftRequest


Task = Verify | Draft


class Coordinator:
    """One request from prompt to result."""

    def __init__(self, request: Request, make: Callable[[Ledger], Strategy], drafter: Drafter | None,
                 head: LmHead, clock: Callable[[], float], session: int = 1,
                 epoch: int = 0, window: int = 1, before: Coordinator | None = None,
                 kept: int = 0, after: int = -1) -> None:
        """``window``: segments that may be at V1 at a time; ``clock`` is in seconds.

        ``before`` is the same request's coordinator whose stages were lost: this one reads prompt and
        answer in again, as one prompt, and goes on where that one was, in text and figures.
        ``kept``: rows of the prompt that the stages have already, left by session ``after``; a drafter
        must have been rewound to one token more.  At least one row is to be read in.
        """
        assert not (before and kept)
        assert 0 <= kept < max(len(request.prompt), 1)
        if not request.prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens must be at least 1, not {request.max_new_tokens}")
        self.request = request
        self._needed = frozenset(drafter.taps if drafter else ())  # states that its commits rest on
        self.ledger = Ledger(session, epoch, tuple(sorted(self._needed)), kept)
        self.strategy = make(self.ledger)
        self.drafter = drafter
        self.kept, self.after = kept, after
        self._head = head
        self._clock = clock
        self._credits = window
        self._text = [*request.prompt, *(before._tokens if before else ())]  # to be read in
        self._prompt = deque(self._text[kept:])
        self._prompt_left = len(self._prompt)  # rows of it that have not come back
        self._read = list(self._text)  # all tokens that are text, also behind the end of the answer
        self._chain = list(range(kept))  # numbers of its rows, as far as they have come back
        self._outputs: deque[Output] = deque()
        self._taps: list[Tap] = []  # not yet shown to the drafter
        self._tapped: dict[int, set[int]] = {}  # run -> needed states that have come of it
        self._hidden: dict[int, tuple[Tensor, int]] = {}  # number -> in which states [n, H] its row is
        self._tokens: list[int] = []
        self._token_at: list[float] = []  # when each of them became text
        self._likelihoods: list[Likelihood] = []  # of those that nobody has taken, if they are wanted
        self._streamed = 0
        self._accepted = 0
        self._rounds = 0
        self._past = Counters()  # of the strategies that lost their stages
        self.finish_reason: FinishReason | None = None
        self._started_at = clock()
        self._first_at = self._ended_at = self._started_at
        if before:
            self._go_on(before)
        if drafter and not kept:
            drafter.reset(request.sampling, request.params.rank, request.params.tau)

    def _go_on(self, before: Coordinator) -> None:
        """Take over the books of a coordinator that cannot go on."""
        assert not before.finished
        self._tokens, self._token_at = before._tokens, before._token_at
        self._likelihoods = before._likelihoods
        self._streamed, self._accepted = before._streamed, before._accepted
        past, lost = before._past, before.strategy.counters
        self._past = Counters(*(getattr(past, f.name) + getattr(lost, f.name) for f in fields(Counters)))
        self._started_at, self._first_at = before._started_at, before._first_at
        self._ended_at = before._ended_at

    # ---- what the driver sends -------------------------------------------------------------

    def open_message(self) -> Open:
        """To be seen by every stage before the first segment."""
        capacity = session_rows(self.request, self.strategy.pipeline.stages)
        return Open(self.ledger.session, self.ledger.epoch, capacity, after=self.after, rows=self.kept)

    def take_messages(self) -> list[Segment | Prune | Cancel]:
        """Everything that may be sent now: control messages, then segments if V1 has room."""
        messages: list[Segment | Prune | Cancel] = [*self.controls()]
        while self._credits and (segment := self.next_segment()):
            self._credits -= 1
            messages.append(segment)
        return messages

    def controls(self) -> list[Prune | Cancel]:
        """Control messages that may be sent now."""
        return [] if self._prompt_left else self.strategy.controls()

    def next_segment(self) -> Segment | None:
        """The best segment that may be sent now, for whoever knows that V1 has room."""
        if self.finished:
            return None
        if self._prompt:
            return self._next_chunk()
        if self._prompt_left or self.ledger.in_flight >= self.strategy.max_in_flight:
            return None
        return self.strategy.next_segment()

    def _next_chunk(self) -> Segment:
        """Chunked prefill (paper, III-A): a slice of the prompt, a chain that is text already."""
        position = len(self._text) - len(self._prompt)
        parent = -1
        for _ in range(min(self.request.params.prefill_chunk, len(self._prompt))):
            parent = self.ledger.add(self._prompt.popleft(), position, parent, committed=True)
            position += 1
        return self.ledger.seal(self.strategy.prompt_taps)

    # ---- what the driver hands in ----------------------------------------------------------

    def receive(self, message: Output | Credit | Tap) -> None:
        """An arrival; cheap, the work is done by tasks.  Anything stale is ignored."""
        if (message.session, message.epoch) != (self.ledger.session, self.ledger.epoch):
            return
        match message:
            case Credit():
                self._credits += 1
            case Output():
                self._outputs.append(message)
            case Tap():
                self._taps.append(message)
                if message.layer in self._needed:
                    self._tapped.setdefault(message.run, set()).add(message.layer)

    # ---- what D0 computes ------------------------------------------------------------------

    def next_task(self) -> Task | None:
        """The most urgent work: what has arrived before what may come."""
        return self.next_output() or self.next_draft()

    def next_output(self) -> Verify | None:
        """The first output that is here with all that belongs to it."""
        if self.finished or not self._outputs or not self._is_whole(self._outputs[0]):
            return None
        return Verify(self._outputs.popleft())

    def next_draft(self) -> Draft | None:
        """The draft pass that the strategy wants most."""
        if self.finished or self._prompt_left or self.drafter is None:
            return None
        request = self.strategy.next_draft()
        if request is None:
            return None
        self._show_taps(self.drafter)  # now: what arrives during a pass is for the pass after it
        return Draft(request)

    def _is_whole(self, output: Output) -> bool:
        """Whether the drafter's states of all rows are here, too: taps have a way of their own.

        A row that came out was computed, and tapped, by every stage; one that did not come out
        predicts nothing, so an output without rows waits for nothing.
        """
        return not len(output.numbers) or self._needed <= self._tapped.get(output.run, set())

    def _show_taps(self, drafter: Drafter) -> None:
        for tap in self._taps:
            drafter.tap(tap)
        self._taps.clear()

    def complete(self, task: Task) -> None:
        """Do the work and let the strategy decide on it."""
        if isinstance(task, Verify):
            self._verify(task.output)
        elif self.drafter is not None:
            self.strategy.drafted(task.request, self.drafter.expand(task.request))

    def _verify(self, output: Output) -> None:
        try:
            numbers, positions = self.ledger.returned(output.run)
        except KeyError:
            raise ProtocolError(f"output of segment {output.run}, which is not in flight") from None
        at = np.searchsorted(numbers, output.numbers)
        if (at >= len(numbers)).any() or (numbers[at] != output.numbers).any():
            raise ProtocolError(f"the output of segment {output.run} has rows that were not sent in it")
        if self.drafter and self._needed:
            self._show_taps(self.drafter)  # they come before the commits that rest on them
            self._tapped = {run: layers for run, layers in self._tapped.items() if run > output.run}
        if self._prompt_left:
            self._verify_prompt(output, positions[at])
            return
        states = self._head.states(output.hidden)
        successors = self._head.next_tokens(states, positions[at], self.request.sampling)
        for row, number in enumerate(output.numbers.tolist()):
            self._hidden[number] = (states, row)
        self._rounds = self.strategy.counters.rounds
        commits = self.strategy.verified(output.run, output.numbers.tolist(), successors.tolist())
        self._commit(commits)

    def _verify_prompt(self, output: Output, positions: NDArray[np.int32]) -> None:
        """Prompt rows: their features go to the drafter, the last one gives the first token."""
        self._prompt_left -= len(output.numbers)
        self._chain += output.numbers.tolist()
        states = self._head.states(output.hidden)
        if self.drafter:
            text = self._text
            if positions[0] == 0:
                self.drafter.commit(text[:1], None)
            following = [text[p + 1] for p in positions.tolist() if p + 1 < len(text)]
            if following:
                self.drafter.commit(following, states[: len(following)],
                                    output.numbers[: len(following)].tolist())
        if self._prompt_left:
            return
        last = states[-1:].clone()  # lets the chunk's other rows go
        token = int(self._head.next_tokens(last, positions[-1:], self.request.sampling)[0])
        self._hidden[int(output.numbers[-1])] = (last, 0)
        self.ledger.skip_prune()
        if not self._tokens:
            self._first_at = self._clock()
        self.strategy.begin(self._text, self.request.sampling, self._head.vocabulary)
        self.strategy.start(token, len(self._text))
        self._commit([Commit(token, int(output.numbers[-1]))])

    def _commit(self, commits: list[Commit]) -> None:
        """Make tokens text, exactly up to the end of sequence or the limit."""
        if not commits:
            return
        features = torch.stack([states[row] for states, row in (self._hidden[c.source] for c in commits)])
        if self.drafter:
            self.drafter.commit([c.token for c in commits], features, [c.source for c in commits])
        likelihoods = self._how_likely(commits, features)
        self._read += [c.token for c in commits]
        self._chain += [c.source for c in commits if c.source > self._chain[-1]]  # the prompt's last is there
        newest = commits[-1].source  # older sources can predict nothing any more
        self._hidden = {n: v for n, v in self._hidden.items() if n >= newest}
        for commit in commits:
            if commit.token in self.request.stop_ids:
                self.finish_reason = "stop"
                break
            self._tokens.append(commit.token)
            self._token_at.append(self._clock())
            self._likelihoods += likelihoods[:1]
            likelihoods = likelihoods[1:]
            self._accepted += commit.drafted
            if len(self._tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
                break
        self._ended_at = self._clock()

    def _how_likely(self, commits: list[Commit], features: Tensor) -> list[Likelihood]:
        """Of each commit, if the request wants it; lm_head is asked again, for these rows alone."""
        count = self.request.logprobs
        return [] if count is None else self._head.likelihoods(features, [c.token for c in commits], count)

    def cancel(self) -> None:
        """Nobody waits for the text any more: what there is of it is all."""
        if not self.finished:
            self.finish_reason = "cancelled"

    # ---- what comes of it ------------------------------------------------------------------

    def rows(self) -> tuple[list[int], list[int]]:
        """The text's rows whose outputs are here, so that every stage has them: numbers and tokens."""
        return self._chain, self._read[: len(self._chain)]

    @property
    def finished(self) -> bool:
        """Whether the text is complete, or was cancelled."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> Sequence[int]:
        """The answer so far; it grows until it is finished."""
        return self._tokens

    def new_likelihoods(self) -> list[Likelihood]:
        """How likely the tokens were that were committed since the last call, if the request wants that."""
        new, self._likelihoods = self._likelihoods, []
        return new

    def new_tokens(self) -> list[int]:
        """Tokens committed since the last call."""
        new = self._tokens[self._streamed :]
        self._streamed = len(self._tokens)
        return new

    def result(self, slot_s: float, bytes_sent: int, stages: tuple[dict[str, float], ...] = ()) -> Result:
        """The result; ``slot_s`` is the time of one segment in the slowest stage.

        The first token comes with the prompt, so decoding is what follows it: tokens/s, turns and
        rounds count the tokens after the first, for every strategy alike.
        """
        assert self.finish_reason is not None
        decode = self._ended_at - self._first_at
        generated = max(0, len(self._tokens) - 1) if decode > 0 else 0
        past, counters = self._past, self.strategy.counters
        # The end of the text ends the round that was running before the last acceptance.
        rounds = past.rounds + self._rounds + 1 if generated else 0
        turns = decode / slot_s if slot_s > 0 else 0.0
        gaps = np.diff(self._token_at) if generated else np.zeros(1)
        stats = Stats(
            turns=turns, rounds=rounds,
            alt=generated / turns if turns else 0.0,
            alr=generated / rounds if rounds else 0.0,
            tokens_per_second=generated / decode if decode > 0 else 0.0,
            ttft_s=self._first_at - self._started_at,
            itl_p50_s=float(np.percentile(gaps, 50)), itl_p95_s=float(np.percentile(gaps, 95)),
            drafted=past.drafted + counters.drafted, verified=past.verified + counters.verified,
            accepted=self._accepted,
            bytes=bytes_sent, decode_s=decode, slot_s=slot_s, stages=stages, reused=self.kept,
        )
        return Result(list(self._tokens), self.finish_reason, stats)
