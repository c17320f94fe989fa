"""Status, journals, start and stop of the services of a deployed cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from flowspec_edge.boards.commands import as_root, on_each, runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, Unreached
from flowspec_edge.boards.probe.checks import AllBoards, judge
from flowspec_edge.boards.probe.facts import BoardFacts, BoardStatus, ask_service
from flowspec_edge.boards.probe.findings import Finding, in_one_line
from flowspec_edge.errors import FlowspecError, UsageError

_START_S = 960.0  # longer than any unit's TimeoutStartSec, so that systemd reports the failure
# reset-failed: a manual start ignores systemd's start limit.
_ACT = 'verb=$1; shift; [ "$verb" = stop ] || systemctl reset-failed "$1" 2>/dev/null; ' \
       'exec systemctl "$verb" "$@"'
Verb = Literal["start", "stop", "restart"]


@dataclass(frozen=True)
class FleetStatus:
    """The status of all boards, in the inventory's order."""

    boards: list[BoardStatus]

    @property
    def release(self) -> str | None:
        """The common release; None without one, or if they differ.

        Boards outside the cluster have none.
        """
        ids = {board.current.id for board in self.boards if board.current}
        return next(iter(ids)) if len(ids) == 1 else None

    @property
    def ready(self) -> bool:
        """Whether a token came through the pipeline recently."""
        return any(board.ready for board in self.boards)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong: "service" of a board, "release" and "ready" of the cluster."""
        return judge("status", AllBoards({board.name: BoardFacts(running=board) for board in self.boards}))

    @property
    def ok(self) -> bool:
        """Whether every board answers, all releases are the same, and the pipeline is ready."""
        return not self.findings

    @property
    def reason(self) -> str:
        """Why the cluster is not ready; "" if it is, or the reason is unknown."""
        return "; ".join(finding.found for finding in self.findings
                         if finding.check != "service" and finding.found)

    @property
    def draft(self) -> BoardStatus:
        """The board that drafts; if none is known to, one that gives no answer, else any."""
        drafts = [board for board in self.boards if board.current is not None and board.current.role == "draft"]
        return [*drafts, *(board for board in self.boards if board.error), *self.boards][0]

    @property
    def unreached(self) -> list[str]:
        """The boards that do not answer."""
        return [board.name for board in self.boards if board.error]

    @property
    def disorder(self) -> str:
        """Faults of a ready cluster; "" without any."""
        by_check = {finding.check: finding.found for finding in self.findings}
        return by_check.get("release") or ", ".join(finding.found for finding in self.findings
                                                    if finding.check == "service")

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "release": self.release, "ready": self.ready, "reason": self.reason,
                "boards": [board.as_json() for board in self.boards]}


def look(inventory: Inventory) -> FleetStatus:
    """Look at all boards in parallel."""
    return FleetStatus(on_each(lambda device: look_at(inventory, device), inventory.device))


def look_at(inventory: Inventory, device: DeviceEntry) -> BoardStatus:
    """Look at one board; an error is in the status, and FlowspecError is never raised."""
    try:
        status = ask_service(inventory, device).running
    except FlowspecError as error:
        return BoardStatus(device.name, error=in_one_line(device, error), unreached=isinstance(error, Unreached))
    return replace(status, name=device.name, error="", unreached=False)


def look_at_draft(inventory: Inventory) -> BoardStatus:
    """Look at the draft device, with roles "auto" the board that drafts now; an error as for ``look_at``."""
    return look_at(inventory, inventory.draft) if inventory.decided else look(inventory).draft


def control(inventory: Inventory, verb: Verb, names: Sequence[str] = (),
            done: Callable[[str, str], None] = lambda name, error: None) -> dict[str, str]:
    """Run ``systemctl verb`` on the boards ``names`` (default: all); return the errors, by board.

    Stages start before the draft device, which waits for a token through all of them, and stop after it.  If
    a stage failed to start, the draft device starts without waiting and becomes ready when the stage does.
    Without ``names``, boards outside the cluster are skipped.  ``done`` receives each board and its error
    ("": none).

    Raise UsageError for an unknown board.
    """
    boards = {device.name: device for device in boards_named(inventory, names)}
    status = {board.name: board for board in look(inventory).boards if board.name in boards}
    failed = {name: board.error or f"{name}: nothing is deployed there: flowspec deploy up"
              for name, board in status.items() if board.current is None}
    if not names and any(board.current for board in status.values()):
        failed = {name: error for name, error in failed.items() if status[name].error}
    stages = [b for b in status.values() if b.current is not None and b.current.role == "verify"]
    drafts = [b for b in status.values() if b.current is not None and b.current.role == "draft"]

    def act(verb: Verb, board: BoardStatus) -> None:
        assert board.current is not None
        error = ""
        try:
            runner = runner_for(inventory, boards[board.name], _START_S)
            lost = verb != "stop" and board.current.role == "draft" and failed
            runner.run(as_root(["sh", "-c", _ACT, "sh", verb, board.current.unit,
                                *(["--no-block"] if lost else [])]))
        except FlowspecError as failure:
            now = look_at(inventory, boards[board.name])
            error = f"{board.name}: {board.current.unit}: {now.said}" if now.said else str(failure)
            failed[board.name] = error
        done(board.name, error)

    for name, error in failed.items():
        done(name, error)
    if verb == "restart" and stages and drafts:  # else the draft device would wait for stopped stages
        rounds: list[tuple[Verb, list[BoardStatus]]] = [("stop", drafts), ("restart", stages),
                                                        ("start", drafts)]
    elif verb == "stop":
        rounds = [(verb, drafts), (verb, stages)]
    else:
        rounds = [(verb, stages), (verb, drafts)]
    for step, group in rounds:
        on_each(partial(act, step), group)
    return failed


def logs_command(inventory: Inventory, device: DeviceEntry, unit: str, lines: int, follow: bool) -> list[str]:
    options = ["--follow"] if follow else []
    return runner_for(inventory, device).command(as_root(
        ["journalctl", "--unit", unit, "--lines", str(lines), "--output", "short-iso", "--no-pager",
         "--no-hostname", *options]))


def boards_named(inventory: Inventory, names: Sequence[str]) -> list[DeviceEntry]:
    """Return the boards of these names, default all; raise UsageError for an unknown name."""
    by_name = {device.name: device for device in inventory.device}
    for name in names:
        if name not in by_name:
            raise UsageError(f"no board {name!r} in cluster {inventory.cluster.name}; there are "
                             f"{', '.join(by_name)}")
    return [by_name[name] for name in names] or list(inventory.device)
