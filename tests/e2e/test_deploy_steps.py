"""The deployment's steps on boards with a real systemd: what they bring about, and what comes between.

Two boards; what a step looks at is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from kits import container_boards
from kits.deployment_phases import PLACES, Bench

from flowspec_edge.boards import paths

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# Runs a step that never ends, where the boards are in reach.  setsid: a sudo with use_pty ends the command's
# process group with the connection, and nothing beyond.
_ENDLESS = """
import sys
from pathlib import Path
from flowspec_edge.boards.deploy.actions import Action
from flowspec_edge.boards.deploy.actions import run
from flowspec_edge.boards.inventory import load_inventory
inventory = load_inventory(Path(sys.argv[1]))
[outcome] = run(inventory, [(inventory.device[int(sys.argv[2])], [
    Action("endless", ("setsid sleep infinity",), timeout_s=float(sys.argv[3]))])])
print(outcome.error)
"""
_SCOPES = "systemctl list-units --plain --no-legend 'deploy-flowspec-*.scope'"


def test_software_is_complete_and_installed_once(bench: Bench) -> None:
    assert bench.well("software") == [0, 0]
    python = f"{paths.VENVS}/{bench.environment.digest}/bin/python"
    show = "import torch, flowspec_edge.cli.main as m; print(torch.__file__, m.__file__)"
    for place in PLACES:
        shell = bench.fleet.shell
        torch, own = shell(place, f'setpriv --reuid flowspec --clear-groups {python} -c "{show}"').split()
        assert torch.startswith("/usr/local/lib/python3.11/dist-packages/")
        assert own.startswith(paths.VENVS)
        assert shell(place, f"id -nG {paths.USER}").split() == ["flowspec", "video", "render"]
        assert shell(place, f"getent passwd {paths.USER}").endswith(f":{paths.STATE}:/usr/sbin/nologin\n")
        modes = shell(place, f"stat -c '%a %U' {paths.ETC} {paths.STATE} {paths.MODELS} {paths.HOME}")
        assert modes.split("\n")[:4] == ["700 root", "755 flowspec", "755 root", "755 root"]


def test_after_a_full_disk_the_next_run_completes(bench: Bench) -> None:
    fleet, venv = bench.fleet, f"{paths.VENVS}/{bench.environment.digest}"
    count = len(bench.environment.wheels)
    fleet.shell(1, f"rm -r {venv}/.complete {venv}/lib/python*/site-packages/transformers")
    with fleet.changed(1, f"mount -t tmpfs -o size=20m tmpfs {paths.WHEELS}", f"umount {paths.WHEELS}"):
        first, second = bench.run("software")
    assert first.error.startswith(f"wheels ({count} of {count}): ")
    assert "No space left on device" in first.error
    assert (second.error, second.changes) == ("", 0)
    # Wheels that were half there, damaged, or are of no use any more.
    fleet.shell(1, f"cd {paths.WHEELS} && rm msgpack-* && truncate -s -1 typer-* && echo > stranger.whl")
    first, second = bench.run("software")
    assert [step.name for step in first.steps if step.changed] == [f"wheels (2 of {count})", "environment"]
    assert (first.error, second.error, second.changes) == ("", "", 0)
    assert fleet.shell(1, f"ls {paths.WHEELS} | wc -l").strip() == str(count)
    assert bench.well("software") == [0, 0]


def test_an_interrupted_run_ends_before_the_next_begins(bench: Bench) -> None:
    """The control host is killed, with its connections."""
    endless = [sys.executable, "-c", _ENDLESS, str(bench.cluster), "1", "3000"]
    with subprocess.Popen(bench.fleet.command(endless), start_new_session=True) as control:
        bench.fleet.shell(1, f"until {_SCOPES} | grep 'flowspec deploy: endless'; do sleep 0.2; done")
        os.killpg(control.pid, signal.SIGKILL)
    assert bench.well("software", dry_run=True) == [0, 0]
    assert bench.fleet.shell(1, _SCOPES)
    assert bench.well("software") == [0, 0]
    bench.fleet.shell(1, f"while {_SCOPES} | grep .; do sleep 0.2; done; ! pgrep -x sleep")


def test_a_board_ends_a_step_that_exceeds_its_limit(bench: Bench) -> None:
    done = bench.fleet.run([sys.executable, "-c", _ENDLESS, str(bench.cluster), "1", "2"])
    assert done.stdout.startswith("endless: sh did not finish within 2 s"), done
    bench.fleet.shell(1, f"while {_SCOPES} | grep .; do sleep 0.2; done; ! pgrep -x sleep")


def test_what_a_board_lacks_is_said_before_anything_runs_there(bench: Bench) -> None:
    fleet = bench.fleet
    with fleet.changed(1, f"mv /etc/sudoers.d/{container_boards.USER} /srv/",
                       f"mv /srv/{container_boards.USER} /etc/sudoers.d/"):
        first, second = bench.run("software")
    assert first.error == f"connect: board-1 ({fleet.address(1)}): sudo: a password is required"
    assert (second.error, second.changes) == ("", 0)


def test_a_board_with_another_role_forgets_the_one_before(running: Bench) -> None:
    moved = running.state(1, stage=7)
    (outcome,) = running.run("activate", moved)
    assert [step.name for step in outcome.steps if step.changed] == [
        "enabled at boot", "units of another role", "running"]
    wants = running.fleet.shell(1, f"ls {paths.UNITS}/multi-user.target.wants | grep flowspec; "
                                   "systemctl list-units --plain --no-legend 'flowspec-*' | cut -d' ' -f1")
    assert wants.split() == [paths.verify_unit(7)] * 2
    assert running.well("activate", moved) == [0]


def test_old_releases_and_what_only_they_used_go(running: Bench) -> None:
    fleet, releases = running.fleet, paths.RELEASES
    fleet.shell(1, f"cd {releases}; mkdir {paths.VENVS}/unused {paths.VENVS}/used; mkdir half.partial; "
                   "mkdir old1 old2 old3 old4 old5; ln -s ../../venvs/used old4/venv; "
                   "ln -s ../../venvs/unused old1/venv; "
                   "for i in 1 2 3 4 5; do touch -d 2020-01-0$i old$i; done; "
                   f"ln -sfn {releases}/old2 {paths.PREVIOUS}")
    # Of old2 … old5 one is `previous`, three may be gone back to.
    (outcome,) = running.run("activate", running.state(1))
    assert [step.name for step in outcome.steps if step.changed] == ["old releases"]
    assert fleet.shell(1, f"ls {releases}").split() == ["first", "old2", "old3", "old4", "old5"]
    assert fleet.shell(1, f"ls {paths.VENVS}").split() == sorted([running.environment.digest, "used"])
    assert running.well("activate", running.state(1)) == [0]
    fleet.shell(1, f"rm -r {paths.VENVS}/used")


def test_a_release_that_was_touched_is_put_right(running: Bench) -> None:
    place = paths.release_dir("first")
    running.fleet.shell(1, f"echo more >> {place}/etc/verify.toml; touch {place}/etc/stranger")
    assert running.well("release") == [1, 0]
    assert running.fleet.shell(1, f"cat {place}/etc/verify.toml; ls {place}/etc").split() == ["verify.toml"]
    assert running.well("release") == [0, 0]
