"""software: what a board needs before a release can run there.  Disturbs nothing that runs.

Debian packages, the user that the services run as, directories, the environment, the power mode.
"""

from __future__ import annotations

from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Groups
from pyinfra.operations import apt, files, server
from steps.environment import environment
from steps.power import power

from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board

_GPU_GROUPS = ("video", "render")  # whoever uses a Tegra's GPU is in them; not every release has both


def software(board: Board) -> None:
    """The whole phase."""
    packages(board)
    account(board)
    directories(board)
    environment(board)
    power(board)


def packages(board: Board) -> None:
    """Debian packages; apt is asked only where one is missing, so that a board may be offline."""
    missing = sorted(set(board.state.packages) - set(board.fact(DebPackages)))
    if missing:
        board.do(f"Debian packages {', '.join(missing)}", apt.packages, packages=missing, update=True,
                 no_recommends=True)
    else:
        board.unchanged("Debian packages")


def account(board: Board) -> None:
    """A user that nobody logs in as, in those of the GPU's groups that exist here."""
    there = board.fact(Groups)
    board.do(f"user {places.USER}", server.user, user=places.USER, system=True, home=places.STATE,
             shell="/usr/sbin/nologin", ensure_home=False, append=True,
             groups=[group for group in _GPU_GROUPS if group in there])


def directories(board: Board) -> None:
    """Only root writes programs, models and keys; nobody else reads the keys."""
    for path, owner, mode in ((places.HOME, "root", "755"), (places.RELEASES, "root", "755"),
                              (places.VENVS, "root", "755"), (places.WHEELS, "root", "755"),
                              (places.STATE, places.USER, "755"), (places.MODELS, "root", "755"),
                              (places.ETC, "root", "700")):
        board.do(f"directory {path}", files.directory, path=path, user=owner, group=owner, mode=mode)
