"""The environment: a venv on the board's own Python and torch, filled from wheels, without a network.

    /opt/flowspec/wheels/           what the newest environment was made of, so that only news travel
    /opt/flowspec/venvs/DIGEST/     .complete is written last; one without it is made anew
"""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board, StepFailed, quote, sha256_of

_CHECK = Path(__file__).with_name("environment_check.py")


def environment(board: Board) -> None:
    """The state's environment, complete and tried out."""
    wanted = board.state.environment
    if wanted is None:
        return
    venv = f"{places.VENVS}/{wanted.digest}"
    mark = quote(f"{venv}/.complete")
    if board.ask(f"cat {mark} 2>/dev/null || true") == [wanted.digest]:
        board.unchanged("environment")
        return
    wheels(board)
    pip, *others = sorted(wanted.wheels, key=lambda name: not name.startswith("pip-"))
    if not pip.startswith("pip-"):
        raise FlowspecError(f"the wheelhouse {wanted.wheelhouse} has no wheel of pip")
    install = [quote(f"{venv}/bin/python", f"{places.WHEELS}/{pip}/pip"), "install", "--quiet", "--no-index",
               "--no-deps", "--no-compile", "--no-cache-dir", "--ignore-installed",
               "--disable-pip-version-check", "--root-user-action=ignore",
               quote(*(f"{places.WHEELS}/{name}" for name in others))]
    # The trial imports what the services will, and so leaves compiled just what they need.
    board.run("environment", [
        # Nothing but the end of a run that was broken off can be at work in one that is not complete.
        f"pkill -KILL -f {quote(f'^{venv}/bin/python')}; {quote('rm', '-rf', venv)}",
        quote(wanted.python, "-m", "venv", "--system-site-packages", "--without-pip", venv),
        " ".join(install),
        quote(f"{venv}/bin/python", "-c", _CHECK.read_text()),
        f"{quote('echo', wanted.digest)} > {mark}",
    ])


def wheels(board: Board) -> None:
    """The environment's wheels in the board's own cache, whole, and nothing else there."""
    wanted = board.state.environment
    assert wanted is not None
    house = Path(wanted.wheelhouse)
    try:
        sums = {name: sha256_of(house / name) for name in wanted.wheels}
    except OSError as error:
        raise StepFailed(f"{error.filename}: {error.strerror}") from error
    there = board.digests(places.WHEELS)
    missing = [name for name in wanted.wheels if there.get(name) != sums[name]]
    stale = sorted(set(there) - set(sums))
    listed = "".join(f"{sums[name]}  {name}\n" for name in missing)
    board.send(f"wheels ({len(missing)} of {len(sums)})", house, missing,
               f"cd {places.WHEELS} && {quote('rm', '-f', '--', *stale)} && tar -xf - --no-same-owner && "
               f"{quote('printf', '%s', listed)} | sha256sum --check --quiet --strict -")
