"""The power mode, by name, because mode numbers differ between boards and releases.

``POWER_BEFORE`` keeps the state before the first change, which ``down`` restores:

    mode      the number from nvpmodel -q
    clocks    the file of jetson_clocks --store
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import Action, BoardState, quote
from flowspec_edge.boards.probe.board import mode_numbers
from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.util.resources import resource_dir

_MODES = "/etc/nvpmodel.conf"
_BEFORE = paths.POWER_BEFORE
_UNIT_FILE = f"{paths.UNITS}/{paths.POWER_UNIT}"
_RESTORE = """
number=$(cat $1/mode)
is_set() { [ "$(nvpmodel -q | tail -n 1)" = "$number" ]; }
is_set || nvpmodel -m "$number" < /dev/null || true
again="run nvpmodel -m $number there, confirm it, then flowspec deploy down again"
is_set || { echo "going back takes a reboot: $again" >&2; exit 1; }
[ ! -e $1/clocks ] || jetson_clocks --restore $1/clocks
rm -r $1
"""


def power_script(mode: str) -> str:
    """Return the script that sets the power mode: ``deploy up`` runs it, and flowspec-power.service at boot.

    The script is for ``sh -e``.  On an error it prints one line.
    """
    text = (resource_dir("deploy") / "units" / "power-mode.sh").read_text(encoding="utf-8")
    return f"mode={shlex.quote(mode)}\n{text}"


def power(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    """Set the power mode, and the highest clocks in it."""
    mode = state.power_mode
    if not mode:
        return
    modes = mode_numbers(facts.power_modes)
    if mode not in modes:
        yield Action("power mode", error=(
            f"{_MODES} knows no {mode}, but {', '.join(modes)}" if modes else
            f"{mode} is wanted, and this machine has none: there is no {_MODES}"))
        return
    # In a new directory, because jetson_clocks asks before it overwrites a file.
    keep = () if facts.power_kept else (
        f"rm -rf {_BEFORE}.new && mkdir {_BEFORE}.new",
        f"nvpmodel -q | tail -n 1 > {_BEFORE}.new/mode",
        f"! command -v jetson_clocks >/dev/null || jetson_clocks --store {_BEFORE}.new/clocks",
        f"sync -f {_BEFORE}.new && mv -T {_BEFORE}.new {_BEFORE}")
    is_set = facts.power_kept and facts.power_number == modes[mode]
    yield Action("power mode", () if is_set else (*keep, f"sh -ec {quote(power_script(mode))}"))


def power_at_boot(state: BoardState, facts: BoardFacts, switched: bool) -> Iterator[Action]:
    """Yield the action that sets the power mode at boot, or no longer; ``switched``: another release became current."""
    unit, there = paths.POWER_UNIT, facts.releases.get(state.release)
    if f"units/{unit}" in (state.files or (there.files if there else {})):
        runs = facts.power_unit_runs and not switched
        yield Action("power mode at boot", () if runs else (
            f"systemctl enable --quiet {unit}", f"systemctl restart {unit}"))
    elif facts.power_unit_installed:
        yield not_at_boot(facts)


def not_at_boot(facts: BoardFacts) -> Action:
    return Action("power mode at boot", (
        f"systemctl disable --quiet --now {paths.POWER_UNIT}; rm -f {_UNIT_FILE}",
        "systemctl daemon-reload") if facts.power_unit_installed else ())


def power_restored(facts: BoardFacts) -> Iterator[Action]:
    if facts.power_kept:
        yield Action("power mode as it was", (quote("sh", "-ec", _RESTORE, "sh", _BEFORE),))
