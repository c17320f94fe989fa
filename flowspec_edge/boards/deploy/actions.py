"""Desired state, actions on boards and their outcome, and how to ask boards and run actions on them."""

from __future__ import annotations

import io
import shlex
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from flowspec_edge.boards.commands import as_root, on_each, runner_for
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.probe.facts import BoardFacts, ask_deployment
from flowspec_edge.errors import FlowspecError

SCOPE = "deploy-flowspec"  # prefix of the transient scopes in which a board runs a deployment's commands
# umask: root's may differ, and the services' user has to read the files.  LC_ALL: error messages are shown to
# the user, and should be in English.
_PREAMBLE = "umask 022; export LC_ALL=C.UTF-8\n"
# A command outlives a cut connection.  So systemd runs it in a scope, and ends all processes of the scope at
# the command's deadline, or when the next run reads the board's facts.
_IN_SCOPE = f"""limit=$1; step=$2; shift 2
[ ! -d /run/systemd/system ] || set -- systemd-run --quiet --scope --collect --unit="{SCOPE}-$$" \\
    --description="flowspec deploy: $step" --property=RuntimeMaxSec="$limit" --property=TimeoutStopSec=5 \\
    -- "$@"
exec "$@"
"""

Phase = Literal["software", "release", "switch", "activate", "settle", "down", "leave", "purge"]
"""What a phase leaves on every board.

software  clock, user, directories, the environment below ``venvs`` or the image, power mode; running services are
          not disturbed
release   the release's own files below ``releases``; running services are not disturbed
switch    ``current`` is this release, ``previous`` the one before; its units are installed and enabled; the
          draft device was told to restart if it is not active or its release or unit file changed
activate  the units run this release; those that were active and whose release and unit file are the same were
          not restarted
settle    the rollout has ended: what neither this release nor the previous one needs is removed, a stage no
          longer changes its release by itself (``UNSETTLED``), and the board has the release's key pair alone
down      the units do not run, also after a reboot; their files are removed; power mode and clocks are what
          they were before the first ``software`` changed them
leave     down, and the board has no current release; ``previous`` is the one that it had, for a rollback
purge     the board has no file, user or directory of flowspec
"""


@dataclass(frozen=True)
class Environment:
    """A release's venv, which also sees the system Python's torch."""

    digest: str  # of all that decides its contents; names its directory
    wheelhouse: str  # a local directory
    wheels: Mapping[str, str]  # file name -> sha256
    python: str = "python3"  # the board's system interpreter


@dataclass(frozen=True)
class BoardState:
    name: str
    release: str = ""  # id; "" where a phase needs none
    unit: str = ""  # such as flowspec-verify@1.service
    environment: Environment | Image | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # path in the release's directory -> text
    power_mode: str = ""  # name in /etc/nvpmodel.conf; "" leaves it unchanged
    client_key: bool = False  # whether clients on other machines need an API key
    public: str = ""  # the public key of the pair that the release needs
    parts: tuple[str, ...] | None = None  # "MODEL/PART" to keep; None: all
    back: bool = False  # the release ran before: a rollback
    before: str = ""  # id of the release to return to; not ``current`` after an interrupted rollout


@dataclass(frozen=True)
class RequiredPart:
    name: str  # the model's directory name
    files: tuple[tuple[str, int, str], ...]  # path, size, sha256
    manifest_sha256: str


@dataclass(frozen=True)
class Action:
    """One step of a phase; ``files`` maps paths in the tar to texts or local files."""

    step: str
    commands: tuple[str, ...] = ()  # for a root shell, joined by &&; none: nothing to do
    files: Mapping[str, str | Path] = field(default_factory=dict)  # tar on the last command's stdin
    error: str = ""  # why the step cannot succeed, if known in advance
    timeout_s: float = 300.0  # for all commands together

    @property
    def changes(self) -> bool:
        return bool(self.commands or self.error)


@dataclass(frozen=True)
class Step:
    board: str
    name: str
    changed: bool  # in a plan: would change


@dataclass
class BoardOutcome:
    board: str
    steps: list[Step] = field(default_factory=list)
    error: str = ""  # one line that begins with the step; "" without an error

    @property
    def changes(self) -> int:
        return sum(step.changed for step in self.steps)


def ask_boards(inventory: Inventory, boards: Sequence[tuple[DeviceEntry, BoardState, RequiredPart | None]],
               end_others: bool = False) -> list[BoardFacts | FlowspecError]:
    """Ask each board for its facts; a board that fails gives an error that names it.

    end_others  first end commands of an interrupted run that still run on a board, because they would change the
                board after its facts were read
    """
    others = f"{SCOPE}-*.scope" if end_others else ""

    def ask_board(board: tuple[DeviceEntry, BoardState, RequiredPart | None]) -> BoardFacts | FlowspecError:
        device, state, part = board
        part_query = [part.name, [list(file) for file in part.files], part.manifest_sha256] if part else None
        try:
            return ask_deployment(inventory, device, state.environment.digest if isinstance(
                state.environment, Environment) else "", part_query, others)
        except FlowspecError as error:
            return error

    return on_each(ask_board, boards)


def run(inventory: Inventory, boards: Sequence[tuple[DeviceEntry, Sequence[Action]]], dry_run: bool = False,
        on_step: Callable[[Step], None] = lambda step: None,
        on_error: Callable[[str, str], None] = lambda board, error: None) -> list[BoardOutcome]:
    """Run each board's actions in order; one outcome per board.

    The callbacks are called from several threads.  ``dry_run`` reports the steps without running commands.
    """
    stopped = threading.Event()

    def act_on_board(board: tuple[DeviceEntry, Sequence[Action]]) -> BoardOutcome:
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
            return list(pool.map(act_on_board, boards))
        except BaseException:  # Ctrl-C: the pool waits for running commands, and starts no more
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
        raise FlowspecError(str(error).removeprefix(f"{runner.device_name}: ")) from error


def _write_tar(archive: IO[bytes], files: Mapping[str, str | Path]) -> None:
    """Write ``files`` to ``archive`` as a tar, each with mode 0644."""
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
