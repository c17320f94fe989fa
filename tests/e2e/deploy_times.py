"""How long `flowspec deploy` takes onto five whole boards: from bare, with nothing to do, for a change.

    python tests/e2e/deploy_times.py        (root; what `make test-fleet` needs)

The boards are containers on this machine and share its processor: five boards of their own take less.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kits import container_boards
from kits.deployments import Cluster
from rich.console import Console
from rich.table import Table


def main() -> None:
    """Print a table."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "fleet").mkdir()
        with container_boards.fleet(place / "fleet") as fleet:
            cluster = Cluster(fleet, place)
            for name, arguments, settings in (
                    ("up, from bare", ["up"], {}), ("up, nothing to do", ["up"], {}), ("plan", ["plan"], {}),
                    ("up, another context", ["up"], {"context": 640}), ("rollback", ["rollback"], {}),
                    ("restart", ["restart"], {}), ("down --purge", ["down", "--purge"], {})):
                cluster.write(**settings)
                told, seconds = cluster.timed(*arguments)
                assert told["ok"], told
                rows.append((name, f"{seconds:.0f}", str(told.get("changed", ""))))
    table = Table("five boards, one machine", "seconds", "changes", box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
