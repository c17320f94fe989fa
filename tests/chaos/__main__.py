"""Faults of a seeded schedule under clients, who must get plain decoding's answers.

Three clients ask for answers of every strategy, at T = 0 and T = 1, with and without streaming. Stages are killed
(one, two, all, another one during a recovery), stopped and continued, and denied memory; the fork server is killed
and stopped; the server itself is stopped and killed, and starts with its clock set back; the disk is full; links
between network namespaces are cut and slowed. A fault without its tools (root, gcc, namespaces) is left out.

Every answer must be plain decoding's, token by token. An error must be a 503 or 429 with Retry-After, or a stream's
error of that kind; a connection may break only if the server was killed; the answer must come upon a repeated try.
At the end there must be no process, thread or file left over, no traceback in a log, and at most 4 descriptors and
48 MiB of resident memory (of D0, and of the largest stage) more than after the first faults. The report has these
figures for every server, and for each kind of fault the number, median, 95th percentile and maximum of the seconds
from the fault to the complete answer to a short request that was asked at that moment (docs/experiments/faults.md).

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
