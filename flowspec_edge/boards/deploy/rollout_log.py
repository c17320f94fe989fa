"""A rollout's progress and result: runs phases and records what happened on each board."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec_edge.boards.deploy.actions import Action, BoardOutcome, BoardState, Phase, Step, run
from flowspec_edge.boards.deploy.steps.phases import bring_about
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.services.status import FleetStatus


class Watch:
    """What receives a rollout's progress, called from several threads."""

    def phase(self, name: str) -> None:
        """Begin a phase, whose ``name`` is shown to the user."""

    def step(self, step: Step) -> None:
        """Receive a step that is done."""

    def amount(self, target: str, done: int, total: int) -> None:
        """Receive the bytes done for ``target``, a board or "here"."""


@dataclass(frozen=True)
class DeployReport:
    boards: list[BoardOutcome]
    release: str | None = None  # the new release's id, if known
    rolled_back: str | None = None  # the id that runs again because the new release did not become ready
    after_failure: str = ""  # after a failure: what runs, and what to do; "": no running service was changed
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # why nothing was started
    notes: list[str] = field(default_factory=list)  # warnings that do not prevent a deployment
    unreached: list[str] = field(default_factory=list)  # boards; the causes are problems

    @property
    def failures(self) -> list[str]:
        return [*self.problems, *(board.error for board in self.boards if board.error)]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def changed(self) -> int:
        """Steps that changed something, over all boards."""
        return sum(board.changes for board in self.boards)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``--json``, which are stable."""
        boards = [{"name": board.board, "changed": board.changes, "error": board.error,
                   "steps": [{"name": step.name, "changed": step.changed} for step in board.steps]}
                  for board in self.boards]
        return {"ok": self.ok, "release": self.release, "changed": self.changed, "boards": boards,
                "rolled_back": self.rolled_back, "problems": self.problems,
                "notes": self.notes, "seconds": round(self.seconds, 2)}


class RolloutLog:
    def __init__(self, inventory: Inventory, boards: Iterable[str], watch: Watch) -> None:
        """Begin a log of ``boards``: names, in the order of the report."""
        self._inventory = inventory
        self._outcomes = {name: BoardOutcome(name) for name in boards}
        self._began = time.monotonic()
        self.watch = watch
        self.problems: list[str] = []  # as DeployReport's
        self.notes: list[str] = []
        self.unreached: list[str] = []

    def answered(self, status: FleetStatus) -> bool:
        """Return whether all boards answer; otherwise each that does not is a problem, and nothing is to be done."""
        self.unreached = [board.name for board in status.boards if board.unreached]
        self.problems = [board.error for board in status.boards if board.error]
        return not self.problems

    def include(self, boards: Iterable[str]) -> None:
        """Report these boards, too, after the others."""
        self._outcomes |= {name: BoardOutcome(name) for name in boards}

    @property
    def failed(self) -> bool:
        return any(outcome.error for outcome in self._outcomes.values())

    def error(self, board: str) -> str:
        """Return the board's first failure; "" without one."""
        return self._outcomes[board].error

    def add_step(self, step: Step, error: str = "") -> None:
        """Record a step; ``error`` is one line that names the board, if the step failed."""
        outcome = self._outcomes[step.board]
        if error:
            outcome.error = outcome.error or error
            return
        outcome.steps.append(step)
        self.watch.step(step)

    def carry_out(self, boards: Sequence[tuple[DeviceEntry, Sequence[Action]]], title: str) -> bool:
        """Run actions on all boards, under the phase's ``title``; return whether no board has failed yet."""
        self.watch.phase(title)
        run(self._inventory, boards, on_step=self.add_step, on_error=self._fail)
        return not self.failed

    def run(self, phase: Phase, boards: Sequence[tuple[DeviceEntry, BoardState]], title: str,
            dry_run: bool = False) -> bool:
        """Run a phase like ``carry_out``, with the actions decided from the boards' present state."""
        self.watch.phase(title)
        bring_about(self._inventory, phase, boards, dry_run, on_step=self.add_step, on_error=self._fail)
        return not self.failed

    def add(self, other: RolloutLog, title: str) -> None:
        """Append ``other``, whose failures are reported as those of the phase ``title``."""
        for name, outcome in other._outcomes.items():
            total = self._outcomes[name]
            total.steps += outcome.steps
            if outcome.error:
                total.error = "; ".join(filter(None, (total.error, f"{title}: {outcome.error}")))

    def report(self, release: str | None = None, rolled_back: str | None = None, after_failure: str = ""
               ) -> DeployReport:
        return DeployReport([*self._outcomes.values()], release, rolled_back, after_failure,
                            time.monotonic() - self._began, self.problems, self.notes, self.unreached)

    def _fail(self, board: str, error: str) -> None:
        self._outcomes[board].error = self._outcomes[board].error or f"{board}: {error}"
