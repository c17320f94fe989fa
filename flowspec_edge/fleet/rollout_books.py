"""What happened on each board in one command, and the engine's phases booked.

Knows outcomes and who watches.  Does not know in which order things are done (``rollout``, ``rollback``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet import engine
from flowspec_edge.fleet.desired import BoardState, Outcome, Phase, Step
from flowspec_edge.fleet.rollout_report import Report, Watch


class Books:
    """Of one command."""

    def __init__(self, boards: Iterable[str], watch: Watch) -> None:
        """``boards``: their names, in the order of the report."""
        self._outcomes = {name: Outcome(name) for name in boards}
        self._began = time.monotonic()
        self.watch = watch

    @property
    def failed(self) -> bool:
        """Whether anything failed on any board."""
        return any(outcome.error for outcome in self._outcomes.values())

    def error(self, board: str) -> str:
        """What failed there first; "" if nothing did."""
        return self._outcomes[board].error

    def book(self, step: Step, error: str = "") -> None:
        """A step that is over; with an ``error``, one line that names the board, it failed."""
        outcome = self._outcomes[step.board]
        if error:
            outcome.error = outcome.error or error
            return
        outcome.steps.append(step)
        self.watch.step(step)

    def run(self, phase: Phase, states: Sequence[BoardState], says: str, dry_run: bool = False) -> bool:
        """A phase of the engine's on these boards; whether nothing has failed on any board yet.

        ``says``: what is being done, in words.  An engine that is lost failed on all of them, so that what
        it has begun is taken back as after any other failure.
        """
        self.watch.phase(says)
        if not states:
            return not self.failed
        def fail(board: str, error: str) -> None:
            self._outcomes[board].error = self._outcomes[board].error or f"{board}: {error}"

        try:
            engine.run(phase, states, dry_run, lambda step: self.book(step), fail)
        except UsageError:  # nothing was begun
            raise
        except FlowspecError as error:  # the process is lost: how far it came, the steps say
            for state in states:
                fail(state.name, str(error))
        return not self.failed

    def add(self, other: Books, says: str) -> None:
        """What happened in ``other`` happened after this; its failures are told as those of ``says``."""
        for name, outcome in other._outcomes.items():
            own = self._outcomes[name]
            own.steps += outcome.steps
            if outcome.error:
                own.error = "; ".join(filter(None, (own.error, f"{says}: {outcome.error}")))

    def report(self, release: str | None = None, problems: Sequence[str] = (), rolled_back: str | None = None,
               left: str = "") -> Report:
        """All of it; the arguments are those of :class:`Report`."""
        return Report([*self._outcomes.values()], release, rolled_back, left,
                      time.monotonic() - self._began, [*problems])
