"""Stages over a real ssh: they answer, and they end with the connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kits import network_beds, ssh_boards
from kits.process_clusters import until

from flowspec_edge.boards.ssh_stages import SshBoards, ring_addresses
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import module_command

COMMAND = module_command("flowspec_edge.drivers.stage", "--config", "/dev/fd/3", python=sys.executable)
WORKER = " ".join(COMMAND)
pytestmark = ssh_boards.needs_boards
PATIENCE_S = 60.0  # only a failing test waits so long


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(0):
        yield boards


_CONTROLLER = """
import sys
from pathlib import Path
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.ssh_stages import SshBoards
stages = SshBoards(load_inventory(Path(sys.argv[1])), sys.argv[2])
stages.connect()
print("started", flush=True)
sys.stdin.read()
"""


def test_every_board_without_an_address_is_named(boards: ssh_boards.Boards) -> None:
    draft, *stages = boards.inventory.device
    unknown = [device.model_copy(update={"address": f"{device.name}.invalid"}) for device in stages]
    with pytest.raises(FlowspecError) as raised:
        ring_addresses(boards.inventory.model_copy(update={"device": [draft, *unknown]}))
    for device in unknown:
        assert f"{device.label}: the name {device.address} is unknown here" in str(raised.value)


@pytest.mark.slow
def test_stages_end_when_the_controller_is_killed(boards: ssh_boards.Boards, model: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, str(boards.file), str(model)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "started\n"
        until(lambda: all(boards.running(place, WORKER) for place in (1, 2)))
        workers = [pid for place in (1, 2) for pid in boards.running(place, WORKER)]
        controller.send_signal(signal.SIGKILL)
    assert all(network_beds.ended(pid, PATIENCE_S) for pid in workers)


def test_a_stage_that_cannot_start_says_why(boards: ssh_boards.Boards) -> None:
    stages = SshBoards(boards.with_cluster(python="/nowhere/python"), "/model")
    with ExitStack() as cleanup:
        cleanup.callback(stages.disconnect)
        place = stages.connect()
        for stage in stages._stages:
            stage.client.wait(PATIENCE_S)
        cause = place.watch()
    assert cause is not None
    assert cause.startswith("board-1: ")
    assert "/nowhere/python" in cause


@pytest.mark.parametrize("killed", ["client", "worker"])
def test_a_lost_connection_is_not_called_the_workers_exit(boards: ssh_boards.Boards, model: Path, killed: str
                                                          ) -> None:
    stages = SshBoards(boards.inventory, str(model))
    with ExitStack() as cleanup:
        cleanup.callback(stages.disconnect)
        place = stages.connect()
        first = stages._stages[0]
        until(lambda: bool(boards.running(1, WORKER)))
        if killed == "client":
            first.client.kill()
        else:
            os.kill(boards.running(1, WORKER)[0], signal.SIGKILL)
        first.client.wait(PATIENCE_S)
        cause = place.watch()
    assert cause == "board-1: ssh: " + {
        "client": "the connection is lost: its client on this machine was killed by SIGKILL",
        "worker": "the connection was lost, or flowspec worker was killed on the board: see the board's "
                  "kernel log (dmesg)"}[killed]
