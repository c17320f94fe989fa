"""Every fault at every step of `up`, `rollback` and `keys rotate` (kits.fault_trials), each on boards of its own.

    python tests/e2e/fault_matrix.py DIRECTORY                (root; what `make test-fleet` needs)
    python tests/e2e/fault_matrix.py DIRECTORY --table        prints what has run, as Markdown

Every trial that has ended is a line of DIRECTORY/results.jsonl, and one with that line is not run again: a
run that was interrupted, or has reached ``--hours``, is continued by the same command.  Trials with a line in
docs/experiments/fault-matrix.jsonl, the record of earlier runs, come last.  The boards' journals of a trial
that failed are in DIRECTORY/failed.  Exit code 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kits.fault_trials import FAULTS, Case, Ground, Trial, make_ground, survives, trial_on

_RECORD = Path(__file__).resolve().parents[2] / "docs" / "experiments" / "fault-matrix.jsonl"
_EVIDENCE = ("ls -l /opt/flowspec /opt/flowspec/releases /etc/flowspec; "
             "journalctl --no-pager --output=short-precise -n 400 | cut -c -300")


def main() -> int:
    parser = argparse.ArgumentParser(description="Every fault at every step of a deployment.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--hours", type=float, default=4.0, help="begin no trial after so many")
    parser.add_argument("--only", default="", metavar="TEXT", help="trials whose name contains it")
    parser.add_argument("--again", action="store_true", help="also those that failed")
    parser.add_argument("--table", action="store_true", help="print the results")
    given = parser.parse_args()
    ground = make_ground(given.directory.absolute() / "ground")
    results = given.directory / "results.jsonl"
    if not given.table:
        run(ground, results, given.jobs, time.monotonic() + given.hours * 3600, given.only, given.again)
    found = read(results)
    print(table(ground.cases(), found))
    return int(not all(result["passed"] for result in found.values()))


def run(ground: Ground, results: Path, jobs: int, until: float, only: str, again: bool) -> None:
    """Those that have no result, until that moment."""
    done = {name for name, result in read(results).items() if result["passed"] or not again}
    left = [case for case in ground.cases() if only in str(case) and str(case) not in done]
    random.Random(0).shuffle(left)  # a part of the matrix has something of all of it
    recorded = read(_RECORD)
    left.sort(key=lambda case: str(case) in recorded)
    for stale in ground.directory.glob("trial-*"):  # of a run that was killed
        shutil.rmtree(stale)
    with ProcessPoolExecutor(jobs) as pool, results.open("a") as out:
        running = [pool.submit(result_of, ground, case, until, results.parent / "failed") for case in left]
        for future in as_completed(running):
            if result := future.result():
                print(json.dumps(result), file=out, flush=True)
                print("passed" if result["passed"] else "FAILED", result["case"], result["times"],
                      result["error"][:300], flush=True)


def result_of(ground: Ground, case: Case, until: float, failed: Path) -> dict[str, Any] | None:
    """None if its time is over."""
    if time.monotonic() > until:
        return None
    began, error, times = time.monotonic(), "", dict[str, float]()
    try:
        with trial_on(ground, case) as trial:
            try:
                survives(trial, case, times)
            except BaseException:
                _keep(trial, failed / f"{str(case).replace('/', '_')}.log")
                raise
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return {"case": str(case), "passed": not error, "times": times, "error": error,
            "seconds": round(time.monotonic() - began, 1), "load": os.getloadavg()[0]}


def _keep(trial: Trial, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    place.write_text("\n".join(trial.fleet.shell(board, _EVIDENCE, check=False) for board in (0, 1)))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """By case, the newest."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {result["case"]: result for result in map(json.loads, lines)}


def table(cases: list[Case], found: dict[str, dict[str, Any]]) -> str:
    """Passed of those that ran, of all; median and worst seconds from the fault until a release answered."""
    rows = ["| command | fault | passed | ran | of | answers after, median, s | worst |",
            "|---|---|---|---|---|---|---|"]
    for command in dict.fromkeys(case.command for case in cases):
        for fault in FAULTS:
            names = [str(case) for case in cases if (case.command, case.fault) == (command, fault)]
            ran = [found[name] for name in names if name in found]
            waits = [*_waits(ran)]
            rows.append(f"| `{command}` | {fault} | {sum(result['passed'] for result in ran)} | {len(ran)} | "
                        f"{len(names)} | " + (f"{statistics.median(waits):.0f} | {max(waits):.0f} |" if waits
                                              else "| |"))
    rows += ["", *(f"- failed: {name}: {result['error'][:300]}" for name, result in found.items()
                   if not result["passed"])]
    return "\n".join(rows)


def _waits(ran: list[dict[str, Any]]) -> Iterator[float]:
    for result in ran:
        if "answers" in result["times"]:
            yield result["times"]["answers"] - result["times"]["held"]


if __name__ == "__main__":
    sys.exit(main())
