"""The boards of the other tests are what those take them for, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kits import container_boards, network_beds
from kits.container_boards import Fleet
from kits.process_clusters import until

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# Reports how a connection to each address ends.
_CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 22), 5).close()
        print("connected")
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.core
def test_they_are_reached_as_boards_are(fleet: Fleet) -> None:
    for board in range(fleet.boards):
        done = fleet.ssh(board, "id -un && hostname && sudo -n id -un")
        assert done.stdout.split() == ["jetson", fleet.name(board), "root"], done.stderr
    stranger = fleet.run(["ssh", "-F", str(fleet.ssh_config), "-l", "root", fleet.name(0), "true"])
    assert "Permission denied" in stranger.stderr


def test_torch_is_theirs_and_nothing_else(fleet: Fleet) -> None:
    script = "import torch; print(torch.ones(3, 3).matmul(torch.ones(3, 1)).sum().item())"
    done = fleet.ssh(1, f"python3 -c '{script}'; python3 -c 'import transformers'")
    assert done.stdout.strip() == "9.0"
    assert "No module named 'transformers'" in done.stderr
    made = fleet.ssh(1, "python3 -m venv --without-pip --system-site-packages v && "
                        "v/bin/python -c 'import torch'")
    assert made.returncode == 0, made.stderr
    fleet.shell(1, "rm -r ~jetson/v")


@pytest.mark.core
def test_they_reach_one_another_and_nothing_beyond(fleet: Fleet) -> None:
    beyond = "192.0.2.1"  # an address for documentation
    for board in range(fleet.boards):
        others = [fleet.address(other) for other in range(fleet.boards)]
        said = fleet.shell(board, f"python3 -c '{_CONNECT}' {' '.join(others)} {beyond}").splitlines()
        assert said == [*["connected"] * 5, "Network is unreachable"]


def test_a_board_that_restarts_has_its_files(fleet: Fleet) -> None:
    booted = "systemctl show -P UserspaceTimestampMonotonic"
    before = fleet.shell(2, f"echo kept > /srv/kept; {booted}")
    fleet.reboot(2)
    assert fleet.ssh(2, "sudo -n cat /srv/kept").stdout == "kept\n"
    fleet.shell(2, "echo more >> /srv/kept")
    fleet.cut_off(2)
    assert fleet.ssh(2, "true").returncode == 255
    fleet.start(2)
    assert fleet.shell(2, "cat /srv/kept; rm /srv/kept") == "kept\nmore\n"
    assert int(before) < int(fleet.shell(2, booted))
    assert "kept" not in fleet.shell(1, "ls /srv")


def test_a_fleet_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = ("import sys, pathlib\nfrom kits import container_boards\n"
              "fleet = container_boards.Fleet(pathlib.Path(sys.argv[1]), 2)\n"
              "print(*(fleet.leader(board) for board in range(2)), flush=True)\nsys.stdin.read()")
    paths = os.pathsep.join(str(path) for path in (Path(container_boards.__file__).parents[1], Path.cwd()))
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as process:
        assert process.stdout is not None
        leaders = [int(pid) for pid in process.stdout.readline().split()]
        assert len(leaders) == 2
        inside = network_beds.namespaces_of(leaders)
        process.send_signal(signal.SIGKILL)
    for leader in leaders:
        assert network_beds.ended(leader, container_boards.PATIENCE)
    for namespace in inside:
        for pid in network_beds.processes_in(namespace):
            assert network_beds.ended(pid, container_boards.PATIENCE)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()

    def removed() -> bool:
        container_boards.remove_stale_cgroups()  # not those in which a process is still ending
        with suppress(OSError):  # a group of another test may vanish meanwhile
            return not list(Path("/sys/fs/cgroup").glob(f"**/flowspec-fleet-{process.pid}-*"))
        return False

    until(removed, container_boards.PATIENCE)
