"""The power mode, by name: the numbers of the modes differ between boards and releases."""

from __future__ import annotations

import re

from flowspec_edge.fleet.engine_board import Board, StepFailed, quote

_MODES = "/etc/nvpmodel.conf"
_MODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>")


def power(board: Board) -> None:
    """The state's power mode, and with it the highest clocks that the mode allows."""
    wanted = board.state.power_mode
    if not wanted:
        return
    modes = {name: number for number, name in _MODEL.findall(
        "\n".join(board.ask(f"cat {_MODES} 2>/dev/null || true")))}
    board.step = "power mode"
    if not modes:
        raise StepFailed(f"{wanted} is wanted, and this machine has none: there is no {_MODES}")
    if wanted not in modes:
        raise StepFailed(f"{_MODES} knows no {wanted}, but {', '.join(modes)}")
    number = modes[wanted]
    # Its last line is the mode's number, after the name.
    there = board.ask("nvpmodel -q")[-1:] == [number]
    set_it, is_set = f"nvpmodel -m {number}", f"nvpmodel -q | tail -n 1 | grep -qx {number}"
    advice = quote("echo", f"this change takes a reboot: run {set_it} there, and confirm it")
    board.run("power mode", [] if there else [
        set_it, f"{is_set} || {{ {advice} >&2; exit 1; }}",
        "! command -v jetson_clocks >/dev/null || jetson_clocks"])
