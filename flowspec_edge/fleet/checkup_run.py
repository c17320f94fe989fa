"""A whole check-up of the machine that runs this, as a line of JSON: for whoever asks over ssh.

    python -m flowspec_edge.fleet.checkup_run [STORAGE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from flowspec_edge.fleet.board import read_board
from flowspec_edge.fleet.checkup import Finding, check_system
from flowspec_edge.fleet.checkup_compute import check_compute


def check_machine(storage: Path | None = None) -> list[Finding]:
    """Everything that one machine can find out by itself; ``storage`` is where shards are to lie."""
    own = Finding("flowspec", "ok", version("flowspec-edge"))
    return [own, *check_system(storage=storage), *check_compute(jetson=bool(read_board().l4t))]


def main(arguments: Sequence[str]) -> None:
    """Exits with 0 whatever was found."""
    print(json.dumps([asdict(finding) for finding in check_machine(*map(Path, arguments[:1]))]))


if __name__ == "__main__":
    main(sys.argv[1:])
