"""The growing answer of one request, and its statistics; survives a loss of the stages in a new session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from flowspec_edge.d0.request import FinishReason, Likelihood, Request, Result, Stats
from flowspec_edge.sampling.restrictions import AnswerRestrictions
from flowspec_edge.strategies.base import TokenCounters
from flowspec_edge.tree.draft_api import Commit

if TYPE_CHECKING:
    from flowspec_edge.sampling.sampler import AnswerPenalties


class Generation:
    """An answer while it is made; ``finish_reason`` is None while it is incomplete.

    ``grammar``, ``penalties`` and ``restrictions`` are at its newest token, if the request has any.
    """

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_id: int | None = None
        self.grammar = request.grammar.begin() if request.grammar else None
        self.penalties: AnswerPenalties | None = None
        if request.penalties:
            from flowspec_edge.sampling.sampler import AnswerPenalties  # imports torch

            self.penalties = AnswerPenalties(request.penalties, request.prompt)
        self.restrictions = AnswerRestrictions(request.restrictions, request.prompt, request.stop_ids
                                               ) if request.restrictions else None
        self._request = request
        self._clock = clock
        self._token_at: list[float] = []  # when each token was accepted
        self._likelihoods: list[Likelihood] = []  # not taken yet
        self._streamed = 0  # tokens taken
        self._accepted = 0  # draft tokens
        self._past = TokenCounters()  # of strategies whose stages were lost
        self._started_at = self._first_at = self._ended_at = clock()

    def suspend(self, counters: TokenCounters) -> None:
        """Keep the token counters of a session that lost its stages."""
        self._past = TokenCounters(*(getattr(self._past, field.name) + getattr(counters, field.name)
                                for field in fields(TokenCounters)))

    def prefilled(self) -> None:
        """Begin to count decoding, unless it began in an earlier session."""
        if not self.tokens:
            self._first_at = self._clock()

    def extend(self, commits: Sequence[Commit], likelihoods: Sequence[Likelihood]) -> None:
        """Accept tokens, up to the end of sequence, the limit, or the end of the grammar.

        ``likelihoods``: one per token, or empty.
        """
        for index, commit in enumerate(commits):
            if commit.token in self._request.stop_ids:
                self.finish_reason, self._stop_id = "stop", commit.token
                break
            self.tokens.append(commit.token)
            self._token_at.append(self._clock())
            self._likelihoods += likelihoods[index:index + 1]
            self._accepted += commit.accepted
            if self.penalties:
                self.penalties.extend([commit.token])
            if self.restrictions:
                self.restrictions.extend([commit.token])
            if self.grammar:
                self.grammar.advance(commit.token)
                if self.grammar.complete:
                    self.finish_reason = "stop"
                    break
            if len(self.tokens) == self._request.max_new_tokens:
                self.finish_reason = "length"
                break
        self._ended_at = self._clock()

    def cancel(self) -> None:
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def new_tokens(self) -> list[int]:
        """Return the tokens since the last call."""
        new = self.tokens[self._streamed :]
        self._streamed = len(self.tokens)
        return new

    def new_likelihoods(self) -> list[Likelihood]:
        new, self._likelihoods = self._likelihoods, []
        return new

    def result(self, counters: TokenCounters, rounds_before: int, slot_s: float, bytes_sent: int,
               stages: tuple[dict[str, float], ...], reused: int, draft: str,
               prompt_chunk: int) -> Result:
        """Make the request's result.

        counters       of the last session's strategy
        rounds_before  its rounds before the last acceptance, which ends the running round
        slot_s         time of one segment in the slowest stage

        Tokens/s, turns and rounds leave out the first token, which prefill yields, for every strategy; an
        answer without a second one has no rate.
        """
        assert self.finish_reason is not None
        decode = self._ended_at - self._first_at
        generated = max(0, len(self.tokens) - 1) if decode > 0 else 0
        rounds = self._past.rounds + rounds_before + 1 if generated else 0
        turns = decode / slot_s if slot_s > 0 else 0.0
        gaps = np.diff(self._token_at) if generated else None
        stats = Stats(
            turns=turns, rounds=rounds,
            alt=generated / turns if generated and turns else None,
            alr=generated / rounds if generated else None,
            tokens_per_second=generated / decode if generated else None,
            ttft_s=self._first_at - self._started_at,
            itl_p50_s=None if gaps is None else float(np.percentile(gaps, 50)),
            itl_p95_s=None if gaps is None else float(np.percentile(gaps, 95)),
            drafted=self._past.drafted + counters.drafted, verified=self._past.verified + counters.verified,
            accepted=self._accepted,
            bytes=bytes_sent, decode_s=decode, slot_s=slot_s, stages=stages, reused=reused,
            draft=draft, prompt_chunk=prompt_chunk,
        )
        return Result(list(self.tokens), self.finish_reason, stats, tuple(self._token_at), self._stop_id)
