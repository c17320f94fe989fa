"""D0's work for one or several requests, whose matrix products are computed together.

An lm_head or draft head takes about as long as reading its weights, however many rows it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from flowspec_edge.d0.session import DraftPass, DraftSession, Task, Verify
from flowspec_edge.d0.target import Logits, States
from flowspec_edge.drafting.base import Drafter

Failure = tuple[DraftSession, Exception]


@dataclass(frozen=True)
class Job:
    """Work of D0: outputs to verify, or draft passes of drafters that can share one; one of ``parts`` a request."""

    parts: tuple[tuple[DraftSession, Task], ...]

    @property
    def is_draft(self) -> bool:
        return isinstance(self.parts[0][1], DraftPass)

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(draft_session.builder.session for draft_session, _ in self.parts)

    def without(self, sessions: Sequence[int]) -> Job | None:
        """Return the job for the other requests, if there are any."""
        parts = tuple(part for part in self.parts if part[0].builder.session not in sessions)
        return Job(parts) if parts else None

    def complete(self) -> list[Failure]:
        """Do the work; return the requests that failed, with their errors.

        An error in a request's own strategy, drafter or sampling fails this request alone, an error in the common
        work fails all.
        """
        try:
            if len(self.parts) > 1:
                return self._draft() if self.is_draft else self._verify()
            [(draft_session, task)] = self.parts
            draft_session.complete(task)
            return []
        except Exception as error:
            return [(draft_session, error) for draft_session, _ in self.parts]

    def _verify(self) -> list[Failure]:
        failures: list[Failure] = []
        verifications: list[tuple[DraftSession, States, Callable[[Logits], None]]] = []
        for draft_session, task in self.parts:
            try:
                assert isinstance(task, Verify)
                verifications.append((draft_session, *draft_session.begin(task)))
            except Exception as error:
                failures.append((draft_session, error))
        if verifications:
            head = verifications[0][0].head
            logits = head.logits(head.joined([states for _, states, _ in verifications]))
            ends = list(accumulate(len(states) for _, states, _ in verifications))
            failures += _each((draft_session, partial(verified, logits[end - len(states) : end]))
                              for (draft_session, states, verified), end in zip(verifications, ends, strict=True))
        return failures

    def _draft(self) -> list[Failure]:
        passes = [(draft_session, draft_session.drafter, task.request) for draft_session, task in self.parts
                  if isinstance(task, DraftPass) and draft_session.drafter is not None]
        assert len(passes) == len(self.parts)
        first: Drafter = passes[0][1]
        outputs = first.expand_together([(drafter, request) for _, drafter, request in passes])
        return _each((draft_session, partial(draft_session.drafted, request, output))
                     for (draft_session, _, request), output in zip(passes, outputs, strict=True))


def can_share(first: DraftSession, other: DraftSession) -> bool:
    """Whether one pass can serve both drafters."""
    return (first.drafter is not None and other.drafter is not None
            and first.drafter.shares_passes_with(other.drafter))


def _each(steps: Iterable[tuple[DraftSession, Callable[[], None]]]) -> list[Failure]:
    failures: list[Failure] = []
    for draft_session, step in steps:
        try:
            step()
        except Exception as error:
            failures.append((draft_session, error))
    return failures
