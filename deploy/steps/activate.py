"""activate: the release becomes the one that runs, on this board.

``current`` and ``previous`` are links that are replaced in one step; whatever ends this halfway, the next
run completes it: what is left to do is read off the board each time, never remembered.
"""

from __future__ import annotations

import hashlib

from steps.services import others, started, stop_and_forget

from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board, quote

_UNITS = "-maxdepth 1 -name 'flowspec-*.service'"
_KEPT = 3  # releases that may be gone back to, beside current and previous


def activate(board: Board) -> None:
    """The whole phase."""
    changed = units(board)
    links(board)
    stop_and_forget(board, "units of another role", others(board))
    enabled(board)
    started(board, changed)
    tidy(board)


def units(board: Board) -> bool:
    """The release's units where systemd reads them; whether one is new or different."""
    place = f"{places.release_dir(board.state.release)}/units"
    wanted = board.digests(place, _UNITS) or {  # in a dry run the release may not be there yet
        path.removeprefix("units/"): hashlib.sha256(text.encode()).hexdigest()
        for path, text in board.state.files.items() if path.startswith("units/")}
    there = board.digests(places.UNITS, _UNITS)
    commands = []
    for name in sorted(name for name, digest in wanted.items() if there.get(name) != digest):
        new = f"{places.UNITS}/.{name}.new"
        commands.append(f"install -m 644 {quote(f'{place}/{name}', new)} && "
                        f"mv -T {quote(new, f'{places.UNITS}/{name}')}")
    return board.run("units", [*commands, "systemctl daemon-reload"] if commands else [])


def enabled(board: Board) -> None:
    """The unit starts at boot."""
    unit = quote(board.state.unit)
    already = board.ask(f"systemctl is-enabled {unit} 2>/dev/null || true") == ["enabled"]
    board.run("enabled at boot", [] if already else [f"systemctl enable --quiet {unit}"])


def links(board: Board) -> None:
    """``current`` is the release; ``previous`` the one before it, and moves only when ``current`` does."""
    target = places.release_dir(board.state.release)
    now = board.ask(f"readlink {places.CURRENT} || true")
    commands = []
    if now != [target]:
        if now:
            commands.append(_link(now[0], places.PREVIOUS))
        commands.append(_link(target, places.CURRENT))
    board.run("current release", commands)


def _link(target: str, path: str) -> str:
    return f"ln -sfn {quote(target)} {path}.new && mv -T {path}.new {path}"


def tidy(board: Board) -> None:
    """Old releases go, and environments that no release uses."""
    newest = board.ask(f"cd {places.RELEASES} 2>/dev/null && find . -mindepth 1 -maxdepth 1 "
                       "-printf '%T@ %P\\n' | sort -rn | cut -d' ' -f2- || true")
    used = {_name(target) for target in board.ask(f"readlink {places.CURRENT} {places.PREVIOUS} || true")}
    used.add(board.state.release)
    spare = [name for name in newest if name not in used and not name.endswith((".partial", ".old"))]
    kept = used | {*spare[:_KEPT]}
    in_use = {_name(target) for release, target in _venvs(board) if release in kept}
    if board.state.environment:
        in_use.add(board.state.environment.digest)
    gone = [places.release_dir(name) for name in newest if name not in kept]
    gone += [f"{places.VENVS}/{name}" for name in board.ask(f"ls {places.VENVS} 2>/dev/null || true")
             if name not in in_use]
    board.run("old releases", [quote("rm", "-rf", "--", *gone)] if gone else [])


def _venvs(board: Board) -> list[tuple[str, str]]:
    """The releases there that have an environment, each with what its link says."""
    lines = board.ask(f"cd {places.RELEASES} 2>/dev/null && find . -mindepth 2 -maxdepth 2 -name venv "
                      "-type l -printf '%P %l\\n' || true")
    return [(place.removesuffix("/venv"), target) for place, target in (line.split(" ", 1) for line in lines)]


def _name(target: str) -> str:
    return target.rpartition("/")[2]
