"""Faults at steps of `up`, `rollback` and `keys rotate`: a release answers, the same command completes.

The steps are those that the boards were seen to run.  A step is held where it begins or has ended, the fault
comes about, and the step goes on.  The tests follow one another: each finds the cluster as the one before it
left it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import imagekit
import nspawnkit
import pytest
from deploykit import PATIENCE, PROMPT, Cluster
from powercutkit import PowerFleet, power_fleet

pytestmark = [pytest.mark.fleet, nspawnkit.needs_fleet]

DRAFT, STAGE = 0, 1  # the boards
DTYPES = ("fp32", "bf16", "int4")  # of the releases, in turn: a board keeps the shards of two
FAULTS = ("connection cut", "control host killed", "disk full", "link down", "reboot")
SOME_FAULTS = {"up": FAULTS, "rollback": FAULTS[:2], "rotate": FAULTS[1:4]}
# Each takes minutes: the others are among `make soak-fleet`.
USUAL = {("up", 1), ("rollback", 0)}
SOME = [pytest.param(command, place, marks=[] if (command, place) in USUAL else pytest.mark.soak)
        for command, faults in SOME_FAULTS.items() for place in range(len(faults))]
# The control host dies once a board has ended a step, and another board reboots then: (command, board, step,
# the board that reboots).  Some boards have switched to the release, others have not, or not restarted.
KILLED = (("up", DRAFT, "restarting", None), ("up", STAGE, "current release", STAGE),
          ("up", DRAFT, "current release", DRAFT), ("rollback", STAGE, "current release", STAGE),
          ("rollback", DRAFT, "restarting", None), ("rotate", STAGE, "current release", STAGE),
          ("rotate", DRAFT, "restarting", STAGE))
COMMANDS = {"up": ("deploy", "up"), "rollback": ("deploy", "rollback"), "rotate": ("keys", "rotate")}
# (what a board ran, the command and the pattern that hold it there)
_STEPS = (
    (r"--description=flowspec deploy: (.+?) --property", "systemd-run", "*=flowspec deploy: {}*"),
    (r"services\.board_key (\w+)", "sudo", "*services.board_key {}*"),
    (r"(transfer\.receive)", "sudo", "*{}*"),
)
_CUT = "pkill -KILL -f '^sshd(-session)?: jetson' || true"
_FILL = ("stat -f -c '%f %S' /opt/flowspec | { read free size; "
         "fallocate --length $((free * size)) /opt/flowspec/full || true; }; "
         "cat /dev/zero > /opt/flowspec/rest 2>/dev/null || true")
_EMPTY = "rm -f /opt/flowspec/full /opt/flowspec/rest"
_ASK = f"""python3 -c '
import json, urllib.request
body = json.dumps(dict(model="demo", prompt="{PROMPT}", max_tokens=8, temperature=0)).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body,
                               dict([("Content-Type", "application/json")]))
print(json.load(urllib.request.urlopen(asked, timeout=60))["usage"]["completion_tokens"])
' 2>&1 | tail -n 1"""


@dataclass(frozen=True)
class Step:
    """Of a command on a board, and how it is held."""

    board: int
    name: str
    program: str
    pattern: str


@dataclass
class Trial:
    """Two boards that get one release of this package after another."""

    fleet: PowerFleet
    cluster: Cluster
    tree: Path
    steps: dict[str, list[Step]] = field(default_factory=dict)
    said: str = ""  # by the last request
    _count: int = 0

    def another(self) -> None:
        """From now on the cluster file and the source tree make another release."""
        self._count += 1
        (self.tree / "flowspec_edge" / "count.py").write_text(f"COUNT = {self._count}\n")
        self.cluster.write(dtype=DTYPES[self._count % len(DTYPES)])

    def start(self, command: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "flowspec_edge.cli.main", *COMMANDS[command], "--json", "--cluster"]
        return subprocess.Popen(self.fleet.command([*line, str(self.cluster.file)]), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.tree,
                                start_new_session=True)

    def completes(self, command: str) -> str:
        """The release that runs then."""
        with self.start(command) as running:
            said, complaint = running.communicate(timeout=PATIENCE)
        assert running.returncode == 0, said + complaint
        release: str = self.cluster.becomes_ready()["release"]
        assert release
        assert self.answers(), self.said
        return release

    def answers(self) -> bool:
        """Whether a release answers over HTTP."""
        self.said = self.fleet.shell(DRAFT, _ASK).strip()
        return self.said == "8"

    def seen(self, command: str) -> list[Step]:
        """The steps of ``command`` on both boards, in an undisturbed run."""
        if command not in self.steps:
            for board in (DRAFT, STAGE):
                self.fleet.record(board)
            self.completes(command)
            self.steps[command] = [step for board in (DRAFT, STAGE)
                                   for step in _steps(board, self.fleet.recorded(board))]
            print(command, *self.steps[command], sep="\n  ")
        return self.steps[command]


def _steps(board: int, ran: list[str]) -> Iterator[Step]:
    found = dict.fromkeys((match.group(1), program, pattern) for line in ran
                          for regex, program, pattern in _STEPS if (match := re.search(regex, line)))
    for name, program, pattern in found:
        if name != "show" and not name.startswith("old "):  # reads; has not always something to remove
            # The count of wheels differs from run to run.
            yield Step(board, name, program, pattern.format(re.sub(r" \(.*", "", name)))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    tree = tmp_path_factory.mktemp("package") / "tree"
    shutil.copytree(imagekit.REPOSITORY, tree, ignore=shutil.ignore_patterns(
        ".*", "tests", "docs", "__pycache__", "build", "dist"))
    with power_fleet(tmp_path_factory.mktemp("boards"), 2) as fleet:
        trial = Trial(fleet, Cluster(fleet, tmp_path_factory.mktemp("cluster")), tree)
        trial.another()
        trial.completes("up")
        trial.another()
        trial.seen("up")  # so that there is a release to go back to
        yield trial


def survives(trial: Trial, command: str, step: Step, fault: str, when: str, reboots: int | None = None
             ) -> None:
    """The fault comes about while that step is held; a board ``reboots``; a release answers; then the same
    command runs again."""
    print(f"\n{command}: {fault} {when} {step.name!r} on board {step.board}", flush=True)
    begun = time.monotonic()
    fleet, board = trial.fleet, step.board
    if command == "up":
        trial.another()
    wanted = trial.cluster.deploy("status")["boards"][DRAFT]["previous"] if command == "rollback" else None
    fleet.hold(board, when, step.program, step.pattern)
    with trial.start(command) as running:
        fleet.held(board, running)
        if fault == "connection cut":
            fleet.shell(board, _CUT)
        elif fault == "control host killed":
            os.killpg(running.pid, signal.SIGKILL)
        elif fault == "disk full":
            fleet.shell(board, _FILL)
        elif fault == "link down":
            fleet.shell(board, "ip link set eth0 down")
        if fault == "reboot":
            fleet.reboot(board)
        else:
            fleet.let_go(board)
        said, complaint = running.communicate(timeout=PATIENCE)
    if fault == "link down":
        fleet.shell(board, "ip link set eth0 up")
    if fault != "control host killed":
        assert running.returncode in (0, 1)
        assert "Traceback" not in complaint
        assert not running.returncode or fleet.name(board) in said + complaint, said + complaint
    boards = json.loads(said)["boards"] if said else []
    print(running.returncode, complaint, *(board.get("error") for board in boards))
    if reboots is not None:
        fleet.reboot(reboots)
    deadline = time.monotonic() + PATIENCE
    while not trial.answers():
        status = trial.cluster.deploy("status")
        assert time.monotonic() < deadline, (trial.said, status)
    print(f"{time.monotonic() - begun:.0f} s until it answers", flush=True)
    if fault == "disk full":
        fleet.shell(board, _EMPTY)
    release = trial.completes(command)
    if running.returncode and step.name != "settled":  # else a rollback was complete, and goes back again
        assert wanted in (None, release)
    print(f"{time.monotonic() - begun:.0f} s until it is complete", flush=True)


@pytest.mark.parametrize(("command", "place"), SOME)
def test_some_faults(trial: Trial, command: str, place: int) -> None:
    """At steps spread over the command."""
    faults, steps = SOME_FAULTS[command], trial.seen(command)
    step = steps[min(place * len(steps) // len(faults) + 1, len(steps) - 1)]
    survives(trial, command, step, faults[place], ("before", "after")[place % 2])


@pytest.mark.parametrize(("command", "board", "name", "reboots"), [
    pytest.param(*case, marks=[] if place < 2 else pytest.mark.soak) for place, case in enumerate(KILLED)])
def test_the_control_host_dies_between_two_boards(trial: Trial, command: str, board: int, name: str,
                                                  reboots: int | None) -> None:
    [step] = [step for step in trial.seen(command) if (step.board, step.name) == (board, name)]
    survives(trial, command, step, "control host killed", "after", reboots)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_fault_at_every_step(trial: Trial, command: str, fault: str) -> None:
    for place, step in enumerate(trial.seen(command)):
        survives(trial, command, step, fault, ("before", "after")[place % 2])
