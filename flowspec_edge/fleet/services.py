"""The services of a deployed cluster: how they are, what they log, and starting and stopping them.

Knows in which order stages and draft device go, and that a board that cannot be reached says nothing of
the others.  Does not know how a release gets there (``rollout``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet import board_status
from flowspec_edge.fleet.board_status import unit_of
from flowspec_edge.fleet.commands import LocalRunner, Runner, as_root
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import API_KEY, HOME
from flowspec_edge.fleet.ssh import SshRunner, is_here

_START_S = 960.0  # more than any unit gives itself to start: then it is systemd that says what is wrong
# Whoever starts a unit by hand means it, however often it has failed before.
_ACT = 'verb=$1; shift; [ "$verb" = stop ] || systemctl reset-failed "$1" 2>/dev/null; ' \
       'exec systemctl "$verb" "$@"'
Verb = Literal["start", "stop", "restart"]


@dataclass(frozen=True)
class Installed:
    """A release on a board, by its own release.json."""

    id: str
    role: str  # "draft" or "verify"
    stage: int  # 0 for the draft device
    unit: str
    model: str = ""  # the sharded model's request
    environment: str = ""

    @classmethod
    def of(cls, told: dict[str, Any] | None) -> Installed | None:
        """From release.json; None without one."""
        if told is None:
            return None
        return cls(told["id"], told["role"], told["stage"], unit_of(told), told.get("model", ""),
                   told.get("environment", ""))


@dataclass(frozen=True)
class BoardStatus:
    """One board.

    state   systemd's: active, activating, failed, …; "absent" without a release
    since   when the unit became active, in systemd's words
    said    the unit's last words, if it has failed or does not come up
    error   why nothing is known; "" if the board answered
    """

    name: str
    current: Installed | None = None
    previous: Installed | None = None
    state: str = "unknown"
    since: str = ""
    restarts: int = 0
    status: str = ""
    said: str = ""
    ready: bool | None = None
    reason: str = ""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields that ``deploy status --json`` promises."""
        here = self.current
        return {"name": self.name, "role": here.role if here else None, "stage": here.stage if here else None,
                "reachable": not self.error, "release": here.id if here else None,
                "previous": self.previous.id if self.previous else None, "unit": here.unit if here else None,
                "state": self.state, "since": self.since, "restarts": self.restarts, "status": self.status,
                "error": self.error or self.said}


@dataclass(frozen=True)
class FleetStatus:
    """All boards, in the inventory's order."""

    boards: list[BoardStatus]

    @property
    def release(self) -> str | None:
        """The release that the boards have, less those that have none: a cluster may leave a board out.
        None if there is none, or they differ."""
        found = {board.current.id for board in self.boards if board.current}
        return next(iter(found)) if len(found) == 1 else None

    @property
    def ready(self) -> bool:
        """Whether a token came through the pipeline lately."""
        return any(board.ready for board in self.boards)

    @property
    def ok(self) -> bool:
        """Whether all boards that have a release run the same, it is ready, and every board answers."""
        runs = all(board.state == "active" for board in self.boards if board.current)
        return self.release is not None and self.ready and runs and not any(b.error for b in self.boards)

    @property
    def reason(self) -> str:
        """Why it is not ready, as the draft service says, or what it lacks; "" if it is, or nobody knows."""
        said = next((board.reason for board in self.boards if board.reason), "")
        if said or self.release is not None or any(board.error for board in self.boards):
            return said
        if any(board.current for board in self.boards):
            return "the boards have different releases: flowspec deploy up brings all to one"
        return "nothing is deployed: flowspec deploy up"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"ok": self.ok, "release": self.release, "ready": self.ready, "reason": self.reason,
                "boards": [board.as_json() for board in self.boards]}


def board_runner(inventory: Inventory, device: DeviceEntry, timeout_s: float = 60.0) -> Runner:
    """Runs commands on ``device``: here, if that is this machine, else over ssh."""
    if is_here(device):
        return LocalRunner(device.name, timeout_s=timeout_s)
    return SshRunner(inventory, device, timeout_s=timeout_s)


def look(inventory: Inventory) -> FleetStatus:
    """How every board is, all asked at once."""
    with ThreadPoolExecutor(len(inventory.device)) as pool:
        return FleetStatus(list(pool.map(lambda device: look_at(inventory, device), inventory.device)))


def look_at(inventory: Inventory, device: DeviceEntry) -> BoardStatus:
    """How one board is; why it could not be asked is in the answer."""
    script = Path(board_status.__file__).read_text(encoding="utf-8")
    cluster = inventory.cluster
    try:
        told = json.loads(board_runner(inventory, device).run(
            [cluster.board_python, "-", HOME, cluster.serve_address, str(cluster.serve_port), API_KEY],
            script).splitlines()[-1])
        unit, ready = told["unit"] or {}, told["ready"] or {}
        return BoardStatus(
            device.name, Installed.of(told["current"]), Installed.of(told["previous"]),
            state=unit.get("state", "absent"), since=unit.get("since", ""), restarts=unit.get("restarts", 0),
            status=unit.get("status", ""), said=unit.get("said", ""), ready=ready.get("ready"),
            reason=ready.get("reason") or "")
    except FlowspecError as error:
        return BoardStatus(device.name, error=str(error))
    except (ValueError, LookupError, TypeError):
        return BoardStatus(device.name, error=f"{device.name}: {cluster.board_python} gave no answer: see "
                                              "whether board_python in the cluster file is a Python")


def control(inventory: Inventory, verb: Verb, names: Sequence[str] = (),
            done: Callable[[str, str], None] = lambda name, error: None) -> dict[str, str]:
    """``systemctl verb`` of the services on the boards ``names``, or on all; what failed, by board.

    Stages start before the draft device, which waits for a token through all of them, and stop after it.
    Where a stage has not started the draft device is told to start, and not waited for: it becomes ready
    when the stage does.  Without ``names`` boards that the cluster leaves out are passed over.  ``done`` is
    called with every board and its error, "" without.  UsageError for an unknown board.
    """
    boards = {device.name: device for device in chosen(inventory, names)}
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
            runner = board_runner(inventory, boards[board.name], _START_S)
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
    if verb == "restart" and stages and drafts:  # the draft device must not wait for stages that are gone
        rounds: list[tuple[Verb, list[BoardStatus]]] = [("stop", drafts), ("restart", stages),
                                                        ("start", drafts)]
    elif verb == "stop":
        rounds = [(verb, drafts), (verb, stages)]
    else:
        rounds = [(verb, stages), (verb, drafts)]
    for what, group in rounds:
        with ThreadPoolExecutor(max(1, len(group))) as pool:
            list(pool.map(lambda board, what=what: act(what, board), group))
    return failed


def logs_command(inventory: Inventory, device: DeviceEntry, unit: str, lines: int, follow: bool) -> list[str]:
    """What to run here to read a service's journal on its board."""
    options = ["--follow"] if follow else []
    return board_runner(inventory, device).command(as_root(
        ["journalctl", "--unit", unit, "--lines", str(lines), "--output", "short-iso", "--no-pager",
         "--no-hostname", *options]))


def chosen(inventory: Inventory, names: Sequence[str]) -> list[DeviceEntry]:
    """The boards of these names, all without any; UsageError for one that is unknown."""
    known = {device.name: device for device in inventory.device}
    for name in names:
        if name not in known:
            raise UsageError(f"no board {name!r} in cluster {inventory.cluster.name}; there are "
                             f"{', '.join(known)}")
    return [known[name] for name in names] or list(inventory.device)
