"""The engine's process: pyinfra carries out one phase on all boards at a time.

    python -m flowspec_edge.fleet.engine_child

Knows the way in (one line of JSON on stdin: phase, dry_run, boards) and out (one line of JSON an event
on stdout), and which file of ``deploy/steps`` has a phase.  Ends when stdin does, whatever it is doing.
A board that fails is left where it is; the others go on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import gevent
from gevent.os import tp_read
from gevent.pool import Group
from pyinfra.api.config import Config
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State, StateStage
from pyinfra.context import ctx_state

from flowspec_edge.fleet.desired import BoardState, Phase
from flowspec_edge.fleet.engine_board import Board, StepFailed
from flowspec_edge.fleet.engine_ssh import OpenSsh
from flowspec_edge.resources import resource_dir

_FILES: dict[Phase, str] = {"software": "software", "release": "release", "activate": "activate",
                            "start": "services", "stop": "services", "down": "services", "purge": "purge"}


def main() -> None:
    """Carry out the phase that stdin names."""
    job = json.loads(sys.stdin.readline())
    boards = [BoardState.from_json(board) for board in job["boards"]]
    steps = _steps(job["phase"])
    state = _state(boards, job["dry_run"])
    hosts = {host.name: host for host in state.inventory}
    watch = gevent.spawn(_until_stdin_ends)
    work = Group()
    with ctx_state.use(state):
        for board in boards:
            work.spawn(_look_after, board, hosts[board.name], job["dry_run"], steps)
        gevent.wait([watch, gevent.spawn(work.join)], count=1)
        work.kill()  # what is still there when stdin has ended
        for host in hosts.values():
            host.connector.disconnect()
    sys.stdout.flush()
    os._exit(0)  # the thread that reads stdin would hold up an orderly end


def _look_after(wanted: BoardState, host: Host, dry_run: bool, steps: Callable[[Board], None]) -> None:
    board = Board(wanted, host, dry_run, lambda step, changed: _tell(wanted, step=step, changed=changed))
    error = ""
    try:
        host.connector.connect()
        host.connected = True
        steps(board)
    except (StepFailed, ConnectError) as failure:
        error = f"{board.step}: {failure}"
    except Exception as failure:  # one board's trouble, whatever it is, must not reach the others
        error = f"{board.step}: {type(failure).__name__}: {failure}"
    _tell(wanted, error=" ".join(error.split()))


def _tell(board: BoardState, **event: Any) -> None:
    print(json.dumps({"board": board.name, **event}), flush=True)


def _steps(phase: Phase) -> Callable[[Board], None]:
    """The function named like the phase, in its file of ``deploy/steps``."""
    sys.dont_write_bytecode = True  # the directory may be the package's
    sys.path.insert(0, str(resource_dir("deploy")))
    steps: Callable[[Board], None] = getattr(import_module(f"steps.{_FILES[phase]}"), phase)
    return steps


def _state(boards: list[BoardState], dry_run: bool) -> State:
    inventory = Inventory(([(board.name, {"reach": board.reach}) for board in boards], {}))
    for host in inventory:
        host.connector_cls = OpenSsh
    # The boards' own words are searched and reported: in English.
    state = State(inventory, Config(ENV={"LC_ALL": "C.UTF-8"}), check_for_changes=dry_run)
    state.current_stage = StateStage.Prepare if dry_run else StateStage.Execute
    state.is_executing = not dry_run  # an operation is carried out where it is called
    return state


def _until_stdin_ends() -> None:
    while tp_read(sys.stdin.fileno(), 1):
        pass


if __name__ == "__main__":
    main()
