"""Asks boards and runs actions on them, in parallel, over ssh; a failure on one does not stop the others."""

from __future__ import annotations

import io
import shlex
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardOutcome, BoardState, PartWanted, Step
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.probe.facts import BoardFacts, ask_deployment
from flowspec_edge.fleet.remote.runner import as_root
from flowspec_edge.fleet.remote.ssh import runner_for

SCOPE = "deploy-flowspec"  # prefix of the transient scopes in which a board runs a deployment's commands
# umask: root's may differ, and the services' user has to read the files.  LC_ALL: error messages are
# reported, in English.
_PREAMBLE = "umask 022; export LC_ALL=C.UTF-8\n"
# A cut connection does not end its command.  systemd does, with all its processes: at its deadline, or when
# the next run reads the board's facts.
_IN_SCOPE = f"""limit=$1; step=$2; shift 2
[ ! -d /run/systemd/system ] || set -- systemd-run --quiet --scope --collect --unit="{SCOPE}-$$" \\
    --description="flowspec deploy: $step" --property=RuntimeMaxSec="$limit" --property=TimeoutStopSec=5 \\
    -- "$@"
exec "$@"
"""


def ask_boards(inventory: Inventory, boards: Sequence[tuple[DeviceEntry, BoardState, PartWanted | None]],
               end_others: bool = False) -> list[BoardFacts | FlowspecError]:
    """The facts of each board, or an error that names the board.

    ``end_others``: first end what an interrupted run left, which would change the board after it was read.
    """
    others = f"{SCOPE}-*.scope" if end_others else ""

    def one(board: tuple[DeviceEntry, BoardState, PartWanted | None]) -> BoardFacts | FlowspecError:
        device, state, part = board
        wanted = [part.name, [list(file) for file in part.files], part.manifest_sha256] if part else None
        try:
            return ask_deployment(inventory, device, state.environment.digest if state.environment else "",
                                  wanted, others)
        except FlowspecError as error:
            return error

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(one, boards))


def run(inventory: Inventory, boards: Sequence[tuple[DeviceEntry, Sequence[Action]]], dry_run: bool = False,
        on_step: Callable[[Step], None] = lambda step: None,
        on_error: Callable[[str, str], None] = lambda board, error: None) -> list[BoardOutcome]:
    """Run each board's actions in order; one outcome per board.

    The callbacks are called from several threads.  ``dry_run`` reports the steps without running commands.
    """
    stopped = threading.Event()

    def one(board: tuple[DeviceEntry, Sequence[Action]]) -> BoardOutcome:
        device, actions = board
        outcome = BoardOutcome(device.name)
        for action in actions:
            if stopped.is_set():
                break
            try:
                if action.error:
                    raise FlowspecError(action.error)
                if action.commands and not dry_run:
                    _execute(inventory, device, action)
            except FlowspecError as error:
                outcome.error = f"{action.step}: {error}"
                on_error(device.name, outcome.error)
                break
            step = Step(device.name, action.step, action.changes)
            outcome.steps.append(step)
            on_step(step)
        return outcome

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        try:
            return list(pool.map(one, boards))
        except BaseException:  # Ctrl-C: the pool waits for running commands; no others start
            stopped.set()
            raise


def _execute(inventory: Inventory, device: DeviceEntry, action: Action) -> None:
    runner = runner_for(inventory, device, action.timeout_s)
    # Parentheses, because a command may contain ; and &.
    script = _PREAMBLE + " &&\n".join(f"(\n{command}\n)" for command in action.commands)
    command = as_root(["sh", "-c", _IN_SCOPE, "sh", f"{action.timeout_s:g}", action.step, "sh", "-c", script])
    try:
        if action.files:
            with tempfile.TemporaryFile() as archive:
                _write_tar(archive, action.files)
                archive.seek(0)
                runner.run(command, archive)
        else:
            runner.run(command)
    except FlowspecError as error:
        raise FlowspecError(str(error).removeprefix(f"{runner.where}: ")) from error


def _write_tar(archive: IO[bytes], files: Mapping[str, str | Path]) -> None:
    """Files of mode 0644."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.mode = 0o644
            try:
                stream = content.open("rb") if isinstance(content, Path) else io.BytesIO(content.encode())
                with stream:
                    entry.size = stream.seek(0, io.SEEK_END)
                    stream.seek(0)
                    tar.addfile(entry, stream)
            except OSError as error:
                raise FlowspecError(f"{name}: {error.strerror}") from error


def quote(*words: str) -> str:
    """Join words with shell quoting."""
    return shlex.join(words)
