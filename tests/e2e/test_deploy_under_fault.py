"""Faults at steps of a deployment: a release answers, the same command completes (kits.fault_trials).

A few of the trials of ``fault_matrix.py``, which `make soak-fleet` runs; and releases that do not work, whose
control host dies before it can go back.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from kits import container_boards
from kits.fault_trials import DRAFT, STAGE, Case, Ground, Step, make_ground, survives, trial_on

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# What is wrong with a release, and for how long its draft device waits for stages.
BROKEN = {
    "the draft device ends": ("cli/serve/daemons.py", "    settings = load_toml(config, DraftConfig)\n",
                              '    raise UsageError("a release that does not work")\n'),
    "the stage ends": ("cli/serve/daemons.py", "    release = ReleaseLink(config)\n",
                       '    raise UsageError("a release that does not work")\n'),
}
WAITS = ("d0/config.py", "start_within_s: Positive = 600.0",
         "start_within_s: Positive = 5.0")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("ground") / "ground", commands=())


def step(board: int, name: str) -> Step:
    return Step(board, name, "systemd-run", f"*=flowspec deploy: {name}*")


@pytest.mark.parametrize("case", [
    Case("up", step(STAGE, "current release"), "control host killed, reboot", "after"),
    Case("rollback", step(DRAFT, "restarting"), "connection cut", "before"),
    Case("up", step(STAGE, "units"), "power cut", "after"),
    Case("rollback", step(STAGE, "current release"), "power cut", "after"),
    Case("rotate", Step(STAGE, "keep", "sudo", "*services.board_key keep*"), "power cut", "before"),
], ids=str)
def test_a_release_answers_and_the_command_completes(ground: Ground, case: Case) -> None:
    times = dict[str, float]()
    with trial_on(ground, case) as trial:
        survives(trial, case, times)
    print(times)


@pytest.mark.parametrize("what", BROKEN)
def test_boards_leave_a_faulty_release_without_the_control_host(
        ground: Ground, tmp_path: Path, what: str) -> None:
    """The control host dies when the draft device has been told to restart."""
    case = Case("up", step(DRAFT, "restarting"), "control host killed", "after")
    tree = tmp_path / "tree"
    shutil.copytree(ground.directory / "tree", tree)
    for name, text, other in (BROKEN[what], WAITS):
        file = tree / "flowspec_edge" / name
        assert text in file.read_text()
        file.write_text(file.read_text().replace(text, other))
    with trial_on(ground, case) as trial:
        working, trial.tree = trial.tree, tree
        trial.fleet.hold(DRAFT, case.when, case.step.program, case.step.pattern)
        with trial.start("up") as running:
            trial.fleet.held(DRAFT, running)
            os.killpg(running.pid, signal.SIGKILL)
            trial.fleet.let_go(DRAFT)
        assert trial.answers(ground.text) == ground.releases[1]
        refused = trial.cluster.flowspec("deploy", "rollback")
        assert refused.returncode == 1
        assert "which was deployed last, has never become ready" in refused.stderr, refused.stderr
        trial.tree = working
        trial.completes("up")
        assert trial.answers(ground.text) == trial.cluster.becomes_ready()["release"]
