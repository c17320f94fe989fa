"""A whole check-up of the machine that runs this, as a line of JSON: for whoever asks over ssh.

    python -m flowspec_edge.fleet.checkup_run [STORAGE] [--power-mode NAME] [--fix]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from flowspec_edge.fleet.board import read_board
from flowspec_edge.fleet.checkup import Finding, check_system
from flowspec_edge.fleet.checkup_compute import check_compute
from flowspec_edge.fleet.checkup_fix import mend


def check_machine(storage: Path | None = None, power_mode: str = "", fix: bool = False) -> list[Finding]:
    """Everything that one machine can find out by itself.

    storage     where shards are to lie
    power_mode  that it is to be in, by name; "": any
    fix         put right what does no harm
    """
    own = Finding("flowspec", "ok", version("flowspec-edge"))
    system = check_system(storage=storage, power_mode=power_mode)
    if fix:
        system = mend(system, lambda: check_system(storage=storage, power_mode=power_mode))
    compute = check_compute(jetson=bool(read_board().l4t))
    found = [own, *system, *compute]
    return [replace(finding, fixed=bool(finding.fixed)) for finding in found] if fix else found


def main(arguments: Sequence[str]) -> None:
    """Exits with 0 whatever was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("storage", nargs="?", type=Path)
    parser.add_argument("--power-mode", default="")
    parser.add_argument("--fix", action="store_true")
    options = parser.parse_args(arguments)
    findings = check_machine(options.storage, options.power_mode, options.fix)
    print(json.dumps([finding.as_json() for finding in findings]))


if __name__ == "__main__":
    main(sys.argv[1:])
