"""Faults under clients; see docs/serving.md.

    python -m tests.chaos --seed 1 --faults 1000 --report build/chaos.json
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.chaos.run import chaos
from tests.chaos.schedule import SETUPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--report", type=Path, default=Path("build/chaos.json"))
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--only", help="servers whose place and strategy contain this, such as links")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the servers, too
    setups = [one for one in SETUPS if (arguments.only or "") in f"{one.where} {one.strategy}"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        report = chaos(arguments.seed, arguments.faults, Path(directory), arguments.report, setups=setups,
                       clients=arguments.clients)
    print(report.text())
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
