"""Faults at steps of `up`, `rollback` and `keys rotate`, each a trial of its own on boards of its own.

All trials begin with the same boards: one release runs, another ran before it.  Their disks are made once
(``make_ground``), and a trial has only an overlay over them.  A step is held where it begins or has ended,
the fault comes about, and the step goes on.  Then, without further help:

1. a release answers, with plain decoding's text, and what each board has is whole;
2. the same command completes, and leaves nothing of an interrupted one; `up` then changes nothing, which is
   seen at two faults of each step.

The steps are those that the boards were seen to run.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowspec_edge.boards import paths
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from kits import board_images
from kits.deployments import PATIENCE, PROMPT, Cluster
from kits.power_cuts import PowerFleet, power_fleet

DRAFT, STAGE = 0, 1  # the boards
COMMANDS = {"up": ("deploy", "up"), "rollback": ("deploy", "rollback"), "rotate": ("keys", "rotate")}
FAULTS = ("connection cut", "control host killed", "control host killed, reboot", "disk full", "link down",
          "process killed", "reboot", "power cut")
BEFORE, NOW, NEXT = "before", "now", "next"  # the releases: of models that differ in a file alone
_ANSWERS = 600.0  # seconds within which a release has to answer
_COUNT = 12  # tokens
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
# The release of the process that answers, and the answer; or why there is none for a while.
_ASK = f"""python3 -c '
import json, os, subprocess, time, urllib.request
show = ["systemctl", "show", "--property=MainPID", "--value", "{paths.DRAFT_UNIT}"]
body = json.dumps(dict(model="demo", prompt="{PROMPT}", max_tokens={_COUNT}, temperature=0)).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body,
                               dict([("Content-Type", "application/json")]))
end, said = time.monotonic() + 20, ""  # its caller does not wait much longer than one answer may take
while time.monotonic() < end:
    try:
        release = os.readlink("/proc/" + subprocess.check_output(show, text=True).strip() + "/cwd")
        said = json.load(urllib.request.urlopen(asked, timeout=90))["choices"][0]["text"]
        print(json.dumps([release, said]))
        break
    except OSError as error:
        said = str(error)
        time.sleep(1)  # between two attempts: a refused connection tells nothing of when to ask again
else:
    print("none:", said)' 2>&1 | tail -n 1"""
# What is not whole: of the release that is current, and of the units.
_HALF = (f"current=$(readlink {paths.CURRENT}); cd $current && test -s release.json || echo $current; "
         f"find $current/ {paths.UNITS}/flowspec-* -type f -size 0 ! -name {paths.UNTRIED}; "
         "grep -qx $(basename $(readlink -f venv)) venv/.complete || echo $current/venv")
_LEFT = (f"ls -d {paths.RELEASES}/*.partial {paths.RELEASES}/*.old {paths.HOME}/*.new {paths.UNSETTLED} "
         f"2>/dev/null || true; ls -A {paths.ETC} | grep -v '^board.key$' || true; "
         "systemctl list-units --plain --no-legend 'deploy-flowspec-*.scope'; "
         f"grep -o newer {paths.KEY} || true")  # a second key pair


@dataclass(frozen=True)
class Step:
    """Of a command on a board, and how it is held."""

    board: int
    name: str
    program: str
    pattern: str


@dataclass(frozen=True)
class Case:
    """One trial.  ``when``: "before" or "after" the step."""

    command: str
    step: Step
    fault: str
    when: str

    @property
    def needs_new_code(self) -> bool:
        """Whether only a release with another environment and other units has that step."""
        return self.command == "up" and self.step.name.startswith(("wheels", "environment", "units"))

    def __str__(self) -> str:
        return f"{self.command}: {self.fault} {self.when} {self.step.name!r} on board {self.step.board}"


@dataclass(frozen=True)
class Ground:
    """What every trial begins with.

    boards    of a fleet that was switched off: board 0 and 1 run NOW, and BEFORE ran before it
    cluster   its cluster's directory
    tree      the source of the releases; ``changed``: one whose release has another environment
    before, now, next  the releases' models, which differ in a file that changes no answer
    steps     by command
    text      plain decoding's answer to PROMPT
    releases  BEFORE's and NOW's ids
    """

    directory: Path
    steps: dict[str, list[Step]]
    text: str
    releases: list[str]

    def cases(self) -> list[Case]:
        """All; each step is held before or after it in turn."""
        return [Case(command, step, fault, ("before", "after")[(place + number) % 2])
                for command, steps in self.steps.items() for place, step in enumerate(steps)
                for number, fault in enumerate(FAULTS)]


@dataclass
class Trial:
    """A pair of boards and their cluster, which a trial may spoil."""

    ground: Ground | None
    fleet: PowerFleet
    cluster: Cluster
    tree: Path
    model: str

    def start(self, command: str) -> subprocess.Popen[str]:
        self.cluster.write(dtype="fp32", model=self.model)
        line = [sys.executable, "-m", "flowspec_edge.cli.main", *COMMANDS[command], "--json", "--cluster"]
        return subprocess.Popen(self.fleet.command([*line, str(self.cluster.file)]), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.tree,
                                start_new_session=True)

    def completes(self, command: str) -> dict[str, Any]:
        """What it says, and it succeeds."""
        with self.start(command) as running:
            said, complaint = running.communicate(timeout=PATIENCE)
        assert running.returncode == 0, f"{command} does not complete: {said}{complaint}"
        told: dict[str, Any] = json.loads(said)
        return told

    def answers(self, text: str, within: float = _ANSWERS) -> str:
        """The release that answers, and it does so with that text, as soon as one does."""
        deadline = time.monotonic() + within
        while True:
            said = self.fleet.shell(DRAFT, _ASK, check=False)
            if said.startswith("["):
                release, answer = json.loads(said)
                assert answer == text, f"{release} answers {answer!r}"
                return str(release.rpartition("/")[2])
            assert time.monotonic() < deadline, f"no release answers: {said} {self.cluster.deploy('status')}"

    def is_whole(self) -> None:
        for board in (DRAFT, STAGE):
            half = self.fleet.shell(board, _HALF)
            assert not half, f"board {board} is not whole: {half}"

    def record(self, command: str) -> list[Step]:
        """The steps of an undisturbed run on both boards."""
        for board in (DRAFT, STAGE):
            self.fleet.record(board)
        self.completes(command)
        return [step for board in (DRAFT, STAGE) for step in _steps(board, self.fleet.recorded(board))]


def _steps(board: int, ran: list[str]) -> Iterator[Step]:
    found = dict.fromkeys((match.group(1), program, pattern) for line in ran
                          for regex, program, pattern in _STEPS if (match := re.search(regex, line)))
    for name, program, pattern in found:
        if name != "show":  # only reads
            # The count of wheels differs from run to run.
            yield Step(board, name, program, pattern.format(re.sub(r" \(.*", "", name)))


def make_ground(directory: Path, commands: Iterable[str] = tuple(COMMANDS)) -> Ground:
    """That in ``directory``; made if it is not there, with the steps of these commands: some minutes."""
    kept = directory / "ground.json"
    if not kept.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        told = _make(directory, commands)
        kept.write_text(json.dumps(told, indent=1))
    told = json.loads(kept.read_text())
    steps = {command: [Step(**step) for step in steps] for command, steps in told["steps"].items()}
    return Ground(directory, steps, told["text"], told["releases"])


def _make(directory: Path, commands: Iterable[str]) -> dict[str, Any]:
    tree, changed, text, releases = directory / "tree", directory / "changed", _plain_text(), []
    for place in (tree, changed):
        shutil.copytree(board_images.REPOSITORY, place, ignore=shutil.ignore_patterns(
            ".*", "tests", "docs", "__pycache__", "build", "dist"))
    (changed / "flowspec_edge" / "count.py").write_text("COUNT = 1\n")
    for unit in (changed / "deploy" / "units").glob("*.service"):
        unit.write_text(f"{unit.read_text()}# changed\n")
    for name in ("boards", "cluster"):
        (directory / name).mkdir()
    for name in (BEFORE, NOW, NEXT):
        model = directory / name / "demo"
        shutil.copytree(resolve_model("demo").path, model)
        config = model / "target" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "release": name}))
    with power_fleet(directory / "boards", 2) as fleet:
        trial = Trial(None, fleet, Cluster(fleet, directory / "cluster"), tree, "")
        for name in (BEFORE, NOW):
            trial.model = str(directory / name / "demo")
            trial.completes("up")
            releases.append(trial.answers(text))
        # As earlier releases would have left them, so that old ones and their shards are removed.
        for board in (DRAFT, STAGE):
            fleet.shell(board, f"cd {paths.RELEASES}; for i in 1 2 3 4; do cp -r {releases[0]} old$i; "
                               f"touch -d 2020-01-0$i old$i; done; cd {paths.MODELS}; "
                               "cp -r $(ls | head -n 1) old; sync")
            fleet.switch_off(board)
    ground, steps = Ground(directory, {}, text, releases), {}
    for command in commands:
        with trial_on(ground, Case(command, Step(DRAFT, "environment", "", ""), "", "")) as trial:
            steps[command] = trial.record(command)
            trial.answers(text)
            if command == "up":  # its shards are cut, so that a trial has not to do it
                for made in (trial.cluster.file.parent / ".flowspec").rglob("*"):
                    kept = directory / "cluster" / made.relative_to(trial.cluster.file.parent)
                    if made.is_dir():
                        kept.mkdir(exist_ok=True)
                    elif not kept.exists():
                        os.link(made, kept)
    return {"steps": {command: [asdict(step) for step in found] for command, found in steps.items()},
            "text": text, "releases": releases}


def _plain_text() -> str:
    model = resolve_model("demo")
    tokenizer = Tokenizer(model)
    return tokenizer.decode(PlainDecoder(model.path).generate(
        tokenizer.encode(PROMPT), _COUNT, Sampling(), model.stop_ids)[0])


@contextmanager
def trial_on(ground: Ground, case: Case) -> Iterator[Trial]:
    """Boards as the ground has them, where a release answers; the case's command is to be run there."""
    place = ground.directory / f"trial-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "boards").mkdir(parents=True)
    try:
        # Links: what a command makes or replaces there is renamed into its place.
        shutil.copytree(ground.directory / "cluster", place / "cluster", copy_function=os.link)
        for own in (place / "cluster/cluster.toml", *(place / "cluster").glob(".flowspec/*/lock")):
            own.unlink()
        with power_fleet(place / "boards", 2, ground.directory / "boards") as fleet:
            model = ground.directory / (NEXT if case.command == "up" else NOW) / "demo"
            tree = ground.directory / ("changed" if case.needs_new_code else "tree")
            trial = Trial(ground, fleet, Cluster(fleet, place / "cluster"), tree, str(model))
            trial.answers(ground.text)
            yield trial
    finally:
        shutil.rmtree(place, ignore_errors=True)


def survives(trial: Trial, case: Case, times: dict[str, float]) -> None:
    """``times`` gets the seconds until the fault, the command's end, an answer, and its completion."""
    assert trial.ground
    fleet, board = trial.fleet, case.step.board
    before, now = trial.ground.releases
    began = time.monotonic()

    def passed(what: str) -> None:
        times[what] = round(time.monotonic() - began, 1)

    fleet.hold(board, case.when, case.step.program, case.step.pattern)
    with trial.start(case.command) as running:
        fleet.held(board, running)
        passed("held")
        _bring_about(fleet, board, case.fault, running)
        said, complaint = running.communicate(timeout=PATIENCE)
    passed("ended")
    if case.fault == "link down":
        fleet.shell(board, "ip link set eth0 up")
    if not case.fault.startswith("control host killed"):
        assert running.returncode in (0, 1), (running.returncode, said, complaint)
        assert "Traceback" not in complaint, complaint
        assert not running.returncode or fleet.name(board) in said + complaint, said + complaint
    elif case.fault.endswith("reboot"):
        fleet.reboot(board)
    answered = trial.answers(trial.ground.text)
    passed("answers")
    trial.is_whole()
    if case.fault == "disk full":
        fleet.shell(board, _EMPTY)
    trial.completes(case.command)
    passed("complete")
    release = _complete(trial, case, running.returncode, {"rollback": (before, now)}.get(case.command, ()))
    if case.command != "rotate":  # which begins anew where the interrupted one was complete
        assert answered in (before, now, release), answered
    passed("all")


def _bring_about(fleet: PowerFleet, board: int, fault: str, running: subprocess.Popen[str]) -> None:
    """And what was held goes on."""
    if fault == "reboot":
        return fleet.reboot(board)
    if fault == "power cut":
        fleet.cut_power(board)
        return fleet.start(board)
    if fault == "process killed":
        return fleet.kill_held(board)
    if fault.startswith("control host killed"):
        os.killpg(running.pid, signal.SIGKILL)
    else:
        fleet.shell(board, {"connection cut": _CUT, "disk full": _FILL,
                            "link down": "ip link set eth0 down"}[fault])
    return fleet.let_go(board)


def _complete(trial: Trial, case: Case, code: int, ends: tuple[str, ...]) -> str:
    """The release that the command has completed: on all boards, with nothing left of the interrupted one.

    ends  the releases that a rollback may end with: the first, unless the interrupted one was complete, which
          the second undid
    """
    assert trial.ground
    status = trial.cluster.becomes_ready()
    release = trial.answers(trial.ground.text)
    assert release == status["release"], status
    trial.is_whole()
    for board in (DRAFT, STAGE):
        left = trial.fleet.shell(board, _LEFT)
        assert not left, f"board {board} still has: {left}"
    if ends:
        assert release in (ends if not code or case.step.name == "settled" else ends[:1]), release
    elif case.command == "up" and case.fault in ("control host killed", "power cut"):
        again = trial.completes("up")
        assert again["changed"] == 0, again
    keys = json.loads(trial.cluster.flowspec("keys", "show", "--json").stdout)["boards"]
    assert all(key["public"] == key["recorded"] for key in keys), keys
    return release

