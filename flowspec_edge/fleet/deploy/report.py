"""A rollout's progress and result, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowspec_edge.fleet.deploy.engine.desired_state import BoardOutcome, Step


class Watch:
    """Receives progress, called from several threads."""

    def phase(self, name: str) -> None:
        """``name`` is shown to the user."""

    def step(self, step: Step) -> None:
        """Called after each step."""

    def amount(self, what: str, done: int, total: int) -> None:
        """Bytes done for ``what``, a board or "here"."""


@dataclass(frozen=True)
class DeployReport:
    boards: list[BoardOutcome]
    release: str | None = None  # the new release's id, if known
    rolled_back: str | None = None  # the id that runs again because the new release did not become ready
    left: str = ""  # what runs after a failure, and what to do; "": no board was changed
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
        """The fields of ``--json``, which are stable."""
        boards = [{"name": board.board, "changed": board.changes, "error": board.error,
                   "steps": [{"name": step.name, "changed": step.changed} for step in board.steps]}
                  for board in self.boards]
        return {"ok": self.ok, "release": self.release, "changed": self.changed, "boards": boards,
                "rolled_back": self.rolled_back, "problems": self.problems,
                "notes": self.notes, "seconds": round(self.seconds, 2)}
