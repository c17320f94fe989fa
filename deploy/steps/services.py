"""start, stop, down: the board's services, and what activate needs of them."""

from __future__ import annotations

import re

from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board, quote

_OURS = re.compile(r"flowspec-(draft|verify@\d+)\.service")


def start(board: Board) -> None:
    """The unit runs, and is ready."""
    started(board, False)


def stop(board: Board) -> None:
    """No unit of flowspec's runs; a reboot starts them again."""
    running = [unit for unit in known(board) if state_of(board, unit)["ActiveState"] not in _STOPPED]
    board.run("stopped", [f"systemctl stop {quote(*running)}"] if running else [])


def down(board: Board) -> None:
    """No unit of flowspec's runs or comes back; their files are gone."""
    stop_and_forget(board, "services stopped", known(board))
    there = board.ask(f"ls -d {places.UNITS}/flowspec-draft.service {places.UNITS}/flowspec-verify@.service "
                      "2>/dev/null || true")
    board.run("units removed", [quote("rm", "-f", *there), "systemctl daemon-reload"] if there else [])


_STOPPED = ("inactive", "failed")


def known(board: Board) -> list[str]:
    """Units of flowspec's that run here, have failed, or start at boot."""
    listed = board.ask("systemctl list-units --all --plain --no-legend 'flowspec-*.service' | cut -d' ' -f1; "
                       f"find {places.UNITS} -path '*.wants/flowspec-*' -printf '%f\\n'")
    return sorted({name for name in listed if _OURS.fullmatch(name)})


def others(board: Board) -> list[str]:
    """Those of them that this board is not to run, or not any more."""
    return [unit for unit in known(board) if unit != board.state.unit]


def stop_and_forget(board: Board, step: str, units: list[str]) -> None:
    """Stop units, have none of them start at boot, and let systemd forget that one has failed."""
    board.run(step, [f"systemctl disable --quiet --now {quote(*units)}",
                     f"systemctl reset-failed {quote(*units)} 2>/dev/null || true"] if units else [])


def state_of(board: Board, unit: str) -> dict[str, str]:
    """What systemd says of a unit: ActiveState, MainPID."""
    shown = board.ask(f"systemctl show --property=ActiveState,MainPID {quote(unit)}")
    return dict(line.split("=", 1) for line in shown)


def started(board: Board, changed: bool) -> None:
    """The unit runs what is current, and is ready; it is restarted only where that is not so.

    A unit's working directory is ``current``, so the process itself tells which release it was started
    in, whoever has restarted it since.
    """
    unit = board.state.unit
    state = state_of(board, unit)
    runs = board.ask(f"readlink /proc/{state['MainPID']}/cwd || true") if state["MainPID"] != "0" else []
    wanted = board.ask(f"readlink {places.CURRENT} || true")
    if state["ActiveState"] == "active" and runs == wanted and not changed:
        board.unchanged("running")
        return
    (before,) = board.ask("date +%s.%N")
    board.run("running", [f"systemctl reset-failed {quote(unit)} 2>/dev/null || true",
                          f"systemctl restart {quote(unit)}"], why=lambda: last_words(board, before))


def last_words(board: Board, since: str) -> str:
    """The last line that the unit's own program wrote since then; systemd's about it, if there is none."""
    unit = quote(board.state.unit)
    for match in (f"_SYSTEMD_UNIT={unit}", f"--unit={unit}"):
        # Synced first: what a program writes on its way out may still be on its way, too.
        lines = board.ask("journalctl --sync; journalctl --no-pager --quiet --output=cat --lines=20 "
                          f"--since=@{since} {match} || true")
        said = [line.strip() for line in lines if line.strip()]
        if said:
            return said[-1]
    return ""
