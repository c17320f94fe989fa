"""The steps in deploy/steps on boards with a real systemd: what they bring about, and what comes between.

Two boards; what a step looks at is real, but for the power modes, which no machine here has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import imagekit
import nspawnkit
import pytest
from nspawnkit import Fleet

from flowspec_edge.fleet import places
from flowspec_edge.fleet.desired import BoardState, Environment, Outcome, Phase, Reach, Step
from flowspec_edge.fleet.own_wheel import build_wheel
from flowspec_edge.fleet.wheelhouse import Target, environment, fill

pytestmark = [pytest.mark.fleet, nspawnkit.needs_fleet]

PLACES = (1, 2)
PATIENCE = 600.0  # two environments on a machine that does much else
# Runs where the boards are in reach.
_RUN = """
import dataclasses, json, sys
from flowspec_edge.fleet.desired import BoardState
from flowspec_edge.fleet.engine import run
phase, dry_run, boards = json.loads(sys.argv[1])
print(json.dumps([dataclasses.asdict(outcome) for outcome in
                  run(phase, [BoardState.from_json(board) for board in boards], dry_run)]))
"""
# A service that says what it is, and is ready.
_UNIT = """
[Unit]
Description=Stage %i
[Service]
Type=notify
NotifyAccess=all
WorkingDirectory=/opt/flowspec/current
ExecStart=/bin/sh -c 'echo "stage %i of {release}"; {before} systemd-notify --ready; exec sleep infinity'
Restart=on-failure
RestartSec=0
User=flowspec
[Install]
WantedBy=multi-user.target
"""


@dataclass
class Bench:
    """Two boards of the fleet, and the engine at the control place."""

    fleet: Fleet
    environment: Environment

    def state(self, place: int, release: str = "first", before: str = "", stage: int = 0) -> BoardState:
        reach = Reach(self.fleet.address(place), user=nspawnkit.USER, config=str(self.fleet.ssh_config))
        unit = _UNIT.format(release=release, before=before)
        return BoardState(self.fleet.name(place), reach, release, places.verify_unit(stage or place),
                          self.environment, {"release.json": json.dumps(release), "etc/verify.toml": "",
                                             f"units/{places.VERIFY_UNIT}": unit}, ("python3", "rsync"))

    def run(self, phase: Phase, *boards: BoardState, dry_run: bool = False) -> list[Outcome]:
        """Carry out a phase, by default on both boards with the first release."""
        states = boards or tuple(self.state(place) for place in PLACES)
        job = json.dumps([phase, dry_run, [board.as_json() for board in states]])
        done = self.fleet.run([sys.executable, "-c", _RUN, job], PATIENCE)
        assert done.returncode == 0, done.stderr
        return [Outcome(outcome["board"], [Step(**step) for step in outcome["steps"]], outcome["error"])
                for outcome in json.loads(done.stdout)]

    def well(self, phase: Phase, *boards: BoardState, dry_run: bool = False) -> list[int]:
        """The same where nothing goes wrong: how much has changed on each."""
        outcomes = self.run(phase, *boards, dry_run=dry_run)
        assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
        return [outcome.changes for outcome in outcomes]

    def says(self, place: int) -> str:
        """What the service there said last."""
        return self.fleet.shell(place, f"journalctl --sync; journalctl -q -o cat -n 1 "
                                       f"_SYSTEMD_UNIT={places.verify_unit(place)}").strip()

    def pid(self, place: int) -> str:
        unit = places.verify_unit(place)
        return self.fleet.shell(place, f"systemctl show -p MainPID --value {unit}").strip()

    def traces(self, place: int) -> list[str]:
        """All that is there of flowspec: files, users, units that systemd knows of."""
        return self.fleet.shell(place, "find / -xdev -name '*flowspec*' -not -path '/proc/*'; "
                                       "getent passwd flowspec || getent group flowspec || true; "
                                       "systemctl list-units --all --no-legend 'flowspec*'").splitlines()


@pytest.fixture(scope="module")
def bench(fleet: Fleet) -> Iterator[Bench]:
    """Boards with the software."""
    house = imagekit.cache() / "wheelhouse"
    build_wheel(house)
    torch = fleet.shell(1, "python3 -c 'import torch; print(torch.__version__)'").strip()
    target = Target("3.11", "x86_64", torch)
    fill(house, [target])
    bench = Bench(fleet, environment(house, target))
    untouched = [bench.traces(place) for place in PLACES]
    for phase in ("release", "activate", "stop", "down", "purge"):
        bench.well(phase, dry_run=True)
    would = bench.well("software", dry_run=True)
    assert [bench.traces(place) for place in PLACES] == untouched
    assert bench.well("software") == would
    assert min(would) > 5
    yield bench
    bench.well("purge")
    assert [bench.traces(place) for place in PLACES] == untouched == [[], []]


@pytest.fixture
def running(bench: Bench) -> Iterator[Bench]:
    """Boards where the first release runs; afterwards nothing does."""
    bench.well("release")
    assert min(bench.well("activate")) > 0
    yield bench
    bench.well("down")
    for place in PLACES:
        bench.fleet.shell(place, f"rm -rf {places.RELEASES}/* {places.CURRENT} {places.PREVIOUS}")


def test_software_is_complete_and_changes_nothing_the_second_time(bench: Bench) -> None:
    assert bench.well("software") == [0, 0]
    python = f"{places.VENVS}/{bench.environment.digest}/bin/python"
    show = "import torch, flowspec_edge.cli.main as m; print(torch.__file__, m.__file__)"
    for place in PLACES:
        shell = bench.fleet.shell
        torch, own = shell(place, f'setpriv --reuid flowspec --clear-groups {python} -c "{show}"').split()
        assert torch.startswith("/usr/local/lib/python3.11/dist-packages/")
        assert own.startswith(places.VENVS)
        assert shell(place, f"id -nG {places.USER}").split() == ["flowspec", "video", "render"]
        assert shell(place, f"getent passwd {places.USER}").endswith(f":{places.STATE}:/usr/sbin/nologin\n")
        modes = shell(place, f"stat -c '%a %U' {places.ETC} {places.STATE} {places.MODELS} {places.HOME}")
        assert modes.split("\n")[:4] == ["700 root", "755 flowspec", "755 root", "755 root"]


def test_a_full_disk_is_one_boards_trouble_and_the_next_run_completes_what_is_there(bench: Bench) -> None:
    fleet, venv = bench.fleet, f"{places.VENVS}/{bench.environment.digest}"
    count = len(bench.environment.wheels)
    fleet.shell(1, f"rm -r {venv}/.complete {venv}/lib/python*/site-packages/transformers; "
                   f"mount -t tmpfs -o size=20m tmpfs {places.WHEELS}")
    try:
        first, second = bench.run("software")
    finally:
        fleet.shell(1, f"umount {places.WHEELS}")
    assert first.error.startswith(f"wheels ({count} of {count}): ")
    assert "No space left on device" in first.error
    assert (second.error, second.changes) == ("", 0)
    # Wheels that were half there, damaged, or are of no use any more.
    fleet.shell(1, f"cd {places.WHEELS} && rm msgpack-* && truncate -s -1 typer-* && echo > stranger.whl")
    first, second = bench.run("software")
    assert [step.name for step in first.steps if step.changed] == [f"wheels (2 of {count})", "environment"]
    assert (first.error, second.error, second.changes) == ("", "", 0)
    assert fleet.shell(1, f"ls {places.WHEELS} | wc -l").strip() == str(count)
    assert bench.well("software") == [0, 0]


def test_what_a_board_lacks_is_said_before_anything_runs_there(bench: Bench) -> None:
    fleet = bench.fleet
    no_root, no_package = bench.state(1), replace(bench.state(2), packages=("python3", "cowsay"))
    fleet.shell(1, f"mv /etc/sudoers.d/{nspawnkit.USER} /srv/")
    try:
        first, second = bench.run("software", no_root, no_package)
    finally:
        fleet.shell(1, f"mv /srv/{nspawnkit.USER} /etc/sudoers.d/")
    assert first.error == f"connect: {nspawnkit.USER} is not root and cannot become it: " \
                          "sudo: a password is required"
    assert second.error.startswith("Debian packages cowsay: E: ")  # there is no network to get it from


def test_the_power_mode_goes_by_its_name(bench: Bench) -> None:
    """Stand-ins for a Jetson's tools, with the words of theirs that count."""
    fleet = bench.fleet
    def on(mode: str) -> list[BoardState]:
        return [replace(bench.state(place), power_mode=mode) for place in PLACES]

    fleet.shell(1, """
        printf '%s\\n' '< POWER_MODEL ID=0 NAME=15W >' '< POWER_MODEL ID=2 NAME=MAXN_SUPER >' \
            '< PM_CONFIG DEFAULT=0 >' > /etc/nvpmodel.conf
        printf '%s\\n' '#!/bin/sh' 'mode=/run/nvpmodel' \
            '[ $1 = -q ] && echo "NV Power Mode: some" && cat $mode || echo $2 > $mode' \\
            > /usr/local/bin/nvpmodel
        printf '%s\\n' '#!/bin/sh' 'touch /run/fast' > /usr/local/bin/jetson_clocks
        chmod +x /usr/local/bin/*; echo 0 > /run/nvpmodel""")
    try:
        first, second = bench.run("software", *on("MAXN_SUPER"))
        assert (first.error, first.changes) == ("", 1)
        assert fleet.shell(1, "cat /run/nvpmodel; ls /run/fast").split() == ["2", "/run/fast"]
        assert second.error == "power mode: MAXN_SUPER is wanted, and this machine has none: " \
                               "there is no /etc/nvpmodel.conf"
        assert bench.well("software", on("MAXN_SUPER")[0]) == [0]
        (first,) = bench.run("software", on("MAXN")[0])
        assert first.error == "power mode: /etc/nvpmodel.conf knows no MAXN, but 15W, MAXN_SUPER"
    finally:
        fleet.shell(1, "rm /etc/nvpmodel.conf /usr/local/bin/nvpmodel /usr/local/bin/jetson_clocks /run/fast")


def test_what_runs_already_is_left_alone(running: Bench) -> None:
    """Also where systemd has restarted it, or the board."""
    assert [running.says(place) for place in PLACES] == ["stage 1 of first", "stage 2 of first"]
    before = [running.pid(place) for place in PLACES]
    assert running.well("release") == running.well("activate") == [0, 0]
    assert [running.pid(place) for place in PLACES] == before
    unit = places.verify_unit(1)
    # Then it is systemd's turn, which says nothing when it has had it.
    running.fleet.shell(1, f"systemctl kill -s KILL {unit}; "
                           f"until [ $(systemctl show -p MainPID --value {unit}) != {before[0]} ] && "
                           f"systemctl is-active {unit}; do sleep 0.1; done")
    running.fleet.reboot(2)
    assert running.well("activate") == [0, 0]
    assert running.well("stop") == [1, 1]
    assert running.well("stop") == [0, 0]
    assert running.well("start") == [1, 1]
    assert running.well("start") == [0, 0]


def test_an_upgrade_restarts_what_it_concerns(running: Bench) -> None:
    fleet, second = running.fleet, running.state(1, "second")
    other = running.pid(2)
    assert running.well("release", second, running.state(2)) == [1, 0]
    assert running.says(1) == "stage 1 of first"  # which a release alone does not touch
    (outcome, untouched) = running.run("activate", second, running.state(2))
    assert [step.name for step in outcome.steps if step.changed] == ["units", "current release", "running"]
    assert (untouched.changes, running.pid(2)) == (0, other)
    assert running.says(1) == "stage 1 of second"
    links = fleet.shell(1, f"readlink {places.CURRENT} {places.PREVIOUS}").split()
    assert links == [places.release_dir("second"), places.release_dir("first")]
    assert running.well("activate", second) == [0]
    # As an engine would leave it that was ended just before the restart.
    first = places.release_dir("first")
    fleet.shell(1, f"cp {first}/units/* {places.UNITS}; systemctl daemon-reload; "
                   f"ln -sfn {first} {places.CURRENT}")
    (outcome,) = running.run("activate", running.state(1))
    assert [step.name for step in outcome.steps if step.changed] == ["running"]
    assert running.says(1) == "stage 1 of first"


def test_a_release_that_does_not_start_says_why_in_its_own_words(running: Bench) -> None:
    broken = running.state(1, "broken", "echo no shard for me; exit 2;")
    assert running.well("release", broken, running.state(2, "broken")) == [1, 1]
    first, second = running.run("activate", broken, running.state(2, "broken"))
    assert first.error == "running: no shard for me"
    assert second.error == ""
    assert running.says(2) == "stage 2 of broken"
    assert min(running.well("activate")) > 0  # back, though systemd has seen too many starts
    assert [running.says(place) for place in PLACES] == ["stage 1 of first", "stage 2 of first"]
    assert running.well("activate") == [0, 0]


def test_a_board_with_another_role_forgets_the_one_before(running: Bench) -> None:
    moved = running.state(1, stage=7)
    (outcome,) = running.run("activate", moved)
    assert [step.name for step in outcome.steps if step.changed] == [
        "units of another role", "enabled at boot", "running"]
    wants = running.fleet.shell(1, f"ls {places.UNITS}/multi-user.target.wants | grep flowspec; "
                                   "systemctl list-units --plain --no-legend 'flowspec-*' | cut -d' ' -f1")
    assert wants.split() == [places.verify_unit(7)] * 2
    assert running.well("activate", moved) == [0]


def test_old_releases_and_what_only_they_used_go(running: Bench) -> None:
    fleet, releases = running.fleet, places.RELEASES
    fleet.shell(1, f"cd {releases}; mkdir {places.VENVS}/unused {places.VENVS}/used; mkdir half.partial; "
                   "mkdir old1 old2 old3 old4 old5; ln -s ../../venvs/used old4/venv; "
                   "ln -s ../../venvs/unused old1/venv; "
                   "for i in 1 2 3 4 5; do touch -d 2020-01-0$i old$i; done; "
                   f"ln -sfn {releases}/old2 {places.PREVIOUS}")
    # Of old2 … old5 one is `previous`, three may be gone back to.
    (outcome,) = running.run("activate", running.state(1))
    assert [step.name for step in outcome.steps if step.changed] == ["old releases"]
    assert fleet.shell(1, f"ls {releases}").split() == ["first", "old2", "old3", "old4", "old5"]
    assert fleet.shell(1, f"ls {places.VENVS}").split() == sorted([running.environment.digest, "used"])
    assert running.well("activate", running.state(1)) == [0]
    fleet.shell(1, f"rm -r {places.VENVS}/used")


def test_a_release_that_was_touched_is_put_right(running: Bench) -> None:
    place = places.release_dir("first")
    running.fleet.shell(1, f"echo more >> {place}/etc/verify.toml; touch {place}/etc/stranger")
    assert running.well("release") == [1, 0]
    assert running.fleet.shell(1, f"cat {place}/etc/verify.toml; ls {place}/etc").split() == ["verify.toml"]
    assert running.well("release") == [0, 0]


def test_down_leaves_nothing_that_starts(running: Bench) -> None:
    would = running.well("down", dry_run=True)
    assert would == [2, 2]
    assert running.says(1) == "stage 1 of first"
    assert running.well("down") == would
    assert running.well("down") == [0, 0]
    assert running.fleet.shell(1, f"systemctl list-units --all --no-legend 'flowspec*'; "
                                  f"find {places.UNITS} -name '*flowspec*'") == ""
