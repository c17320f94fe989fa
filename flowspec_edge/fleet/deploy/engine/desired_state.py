"""Plain data of a deployment: a board's desired state, actions and their outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Phase = Literal["software", "release", "switch", "activate", "settle", "down", "purge"]
"""One thing to bring about, on all boards at a time.

software  clock, user, directories, the environment below ``venvs``, power mode; disturbs nothing that runs
release   the release's own files below ``releases``; disturbs nothing that runs
switch    ``current`` is this release, ``previous`` the one before; its units are installed and enabled; the
          draft device has been told to restart if something of its unit changed
activate  the units run this release: restarted only where something of theirs changed
settle    the rollout has ended: a stage no longer looks for the draft device's release (``UNSETTLED``)
down      the units neither run nor come back at a reboot; their files are gone; power mode and clocks are
          what they were before the first ``software`` changed them
purge     nothing of flowspec is left on the board
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
    environment: Environment | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # path in the release's directory -> text
    power_mode: str = ""  # name in /etc/nvpmodel.conf; "" leaves it unchanged
    client_key: bool = False  # whether clients on other machines need an API key
    parts: tuple[str, ...] | None = None  # "MODEL/PART" to keep; None: all
    back: bool = False  # the release ran before: a rollback
    before: str = ""  # id of the release to return to; not ``current`` after an interrupted rollout


@dataclass(frozen=True)
class PartWanted:
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
