"""What a rollout says while it goes on, and what it came to.

Knows the words; plain data.  Does not know how anything is done (``rollout``) nor how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowspec_edge.fleet.desired import Outcome, Step


class Watch:
    """Is told how it goes, from several threads; every method may do nothing."""

    def phase(self, name: str) -> None:
        """What is done now, in words."""

    def step(self, step: Step) -> None:
        """A step on a board is over."""

    def amount(self, what: str, done: int, total: int) -> None:
        """So many bytes of ``total`` are done for ``what``, a board or something made here."""


@dataclass(frozen=True)
class Report:
    """What a command came to.

    release      the id that the boards were to run; None if it did not come so far
    rolled_back  the release that runs again since ``release`` did not become ready
    left         how a failure has left what runs on the boards, and what to do; "" if it did not come so far
    seconds      it took
    problems     what was in the way before anything was touched
    """

    boards: list[Outcome]
    release: str | None = None
    rolled_back: str | None = None
    left: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.problems and not any(board.error for board in self.boards)

    @property
    def changed(self) -> int:
        """Steps that changed something, on all boards."""
        return sum(board.changes for board in self.boards)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        boards = [{"name": board.board, "changed": board.changes, "error": board.error,
                   "steps": [{"name": step.name, "changed": step.changed} for step in board.steps]}
                  for board in self.boards]
        return {"ok": self.ok, "release": self.release, "changed": self.changed, "boards": boards,
                "rolled_back": self.rolled_back, "problems": self.problems,
                "seconds": round(self.seconds, 2)}
