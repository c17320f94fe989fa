"""The torch device that a configuration names: an error where it is missing, and that of D0's models."""

from __future__ import annotations

import os

import pytest

from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.boards.ssh_stages import SshBoards
from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.drivers.processes.clusters import Services
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.errors import UsageError
from flowspec_edge.util import torchdevice


@pytest.mark.parametrize(("name", "says"), [
    ("cuda:99", "no cuda:99 here: "), ("gpu", "no torch device 'gpu': use cpu, cuda"),
    ("meta", "no torch device"),
    ("", "no torch device"), ("cuda:x", "no torch device")])
def test_what_is_not_there_is_one_line(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as told:
        torchdevice.require(name)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_configurations_device_is_that_of_the_models(device: str) -> None:
    """What a cluster of services is made with; it would need a GPU to be made."""
    config = DraftConfig(cluster="lab", model="m", name="m", control="tcp://127.0.0.1:1", device=device,
                         output="tcp://127.0.0.1:2", first="tcp://127.0.0.1:3", instances=["v1"],
                         unencrypted=True)
    assert Services(config, Notifier(os.environ)).spec.device == device


def test_boards_over_ssh_take_the_draft_devices_own() -> None:
    boards = [DeviceEntry(name="a", address="127.0.0.1", role="draft", torch_device="cuda:99"),
              DeviceEntry(name="b", address="127.0.0.2", role="verify")]
    inventory = Inventory(cluster=ClusterSettings(name="lab"), device=boards)
    with pytest.raises(UsageError, match="no cuda:99 here"):
        SshBoards(inventory, "m")
