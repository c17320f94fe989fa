"""What a board is to be like, and what bringing that about has changed.

Knows the words between the one who decides (``rollout``) and the engine that carries it out, in a
process of its own: plain data, JSON on the way.  Does not know how either works.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Phase = Literal["software", "release", "activate", "start", "stop", "down", "purge"]
"""One thing to bring about, on all boards at a time.

software  packages, user, directories, the environment below ``venvs``, power mode; disturbs nothing
release   the release's own files below ``releases``; disturbs nothing
activate  ``current`` is this release, ``previous`` the one before; its units are installed, enabled, and
          run it: restarted only where something of theirs changed
start     the unit runs
stop      the unit does not run
down      the unit neither runs nor comes back at a reboot; its file is gone
purge     nothing of flowspec is left on the board
"""


@dataclass(frozen=True)
class Reach:
    """How ssh gets there: what an inventory says of a device."""

    address: str
    port: int = 22
    user: str = ""
    key: str = ""
    config: str = ""  # a file for ssh's -F


@dataclass(frozen=True)
class Environment:
    """What a release's venv has, beside the board's own torch.

    digest     of all that decides what is installed; names its directory
    wheelhouse a directory here with the files ``wheels``, in the order of nothing
    python     the board's own interpreter, whose packages (torch) the venv sees
    """

    digest: str
    wheelhouse: str
    wheels: tuple[str, ...]
    python: str = "python3"


@dataclass(frozen=True)
class BoardState:
    """One board.

    release  its id; "" where a phase needs none
    unit     the unit that runs here, such as flowspec-verify@1.service
    files    path within the release's directory -> text: release.json, etc/…, units/…
    packages Debian packages that must be there
    power_mode  by name, as in /etc/nvpmodel.conf; "" leaves it
    """

    name: str
    reach: Reach
    release: str = ""
    unit: str = ""
    environment: Environment | None = None
    files: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    power_mode: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the engine's process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BoardState:
        """The inverse of :meth:`as_json`."""
        made = dict(data)
        made["reach"] = Reach(**made["reach"])
        if (environment := made["environment"]) is not None:
            made["environment"] = Environment(**{**environment, "wheels": tuple(environment["wheels"])})
        made["packages"] = tuple(made["packages"])
        return cls(**made)


@dataclass(frozen=True)
class Step:
    """One operation on one board; ``changed``: it changed something, or in a dry run would."""

    board: str
    name: str
    changed: bool


@dataclass
class Outcome:
    """What became of one board; ``error`` is one line that begins with the step, "" if all went well."""

    board: str
    steps: list[Step] = field(default_factory=list)
    error: str = ""

    @property
    def changes(self) -> int:
        """How many steps changed something."""
        return sum(step.changed for step in self.steps)
