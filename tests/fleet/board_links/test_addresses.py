"""Addresses that other boards cannot reach, as this machine's own names and routes give them."""

from __future__ import annotations

from pathlib import Path

import fleetkit
import pytest
import sshkit

from flowspec_edge.cli.main import main
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.board_links.addresses import address_problem, network_address, on_network, route_to
from flowspec_edge.fleet.board_links.namespaces import NetnsTestbed
from flowspec_edge.fleet.commands import is_here
from flowspec_edge.fleet.inventory import ClusterSettings, DeviceEntry, Inventory, load_inventory
from flowspec_edge.fleet.probe.checks import Needs, preflight


def cluster(*addresses: str) -> Inventory:
    return Inventory(cluster=ClusterSettings(name="lab"), device=[
        DeviceEntry(name=f"orin-{place}", address=address, role="verify" if place else "draft")
        for place, address in enumerate(addresses)])


def refusal(inventory: Inventory, place: int = 0) -> str:
    with pytest.raises(UsageError) as refused:
        network_address(inventory, inventory.device[place])
    return str(refused.value)


@fleetkit.needs_netns
def test_a_deploying_board_replaces_its_loopback_address() -> None:
    """With its address on the route to the others, which the testbed knows."""
    with NetnsTestbed(2) as bed, bed.entered(0):
        inventory = cluster("localhost", bed.address(1))
        message = refusal(inventory)
        for part in ("orin-0: ", "localhost", "127.0.0.1", f"({bed.address(0)} at {bed.interface(0)})"):
            assert part in message
        assert network_address(inventory, inventory.device[1]) == bed.address(1)
        assert is_here(inventory, inventory.device[0])
        assert [device.address for device in on_network(inventory).device] == [bed.address(0), bed.address(1)]
        assert route_to("198.51.100.1") is None  # the bed leads nowhere else


def test_loopback_addresses_alone_are_one_machine() -> None:
    inventory = cluster("127.0.0.1", "127.0.1.1")
    assert [network_address(inventory, device) for device in inventory.device] == ["127.0.0.1", "127.0.1.1"]
    assert on_network(inventory) == inventory
    mixed = cluster("127.0.1.1", "192.0.2.1")
    assert refusal(mixed).startswith("orin-0: 127.0.1.1, which other boards cannot reach: give its address")
    assert address_problem(mixed, mixed.device[1]) is None


def test_the_usb_device_port_of_every_jetson() -> None:
    found = refusal(cluster("10.0.0.10", "192.168.55.1"), 1)
    assert found.startswith("orin-1: 192.168.55.1, in the network of the USB device port, where every ")
    assert found.endswith(": give its address on the Ethernet (ip -4 -o addr on the board shows it) in the "
                          "cluster file")


def test_deploy_up_refuses_such_an_address_before_anything_else() -> None:
    (problem,) = preflight(cluster("127.0.1.1", "192.0.2.1"), {"orin-0": Needs()}).problems
    assert str(problem).startswith("orin-0: address: 127.0.1.1, which other boards cannot reach; give its ")


@sshkit.needs_boards
def test_init_writes_the_address_on_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sshkit.boards(1, tmp_path) as boards, boards.bed.entered(0):
        out, other = tmp_path / "cluster.toml.new", boards.bed.address(1)
        options = ["--user", "root", "--key", f"{tmp_path}/user", "--ssh-config", f"{tmp_path}/config",
                   "--out", str(out)]
        assert main(["deploy", "init", "localhost", other, *options]) == 0
        assert [device.address for device in load_inventory(out).device] == [boards.bed.address(0), other]
        out.unlink()
        capsys.readouterr()
        assert main(["deploy", "init", other, "192.168.55.1", *options]) == 2
        said = capsys.readouterr().err
        assert "192.168.55.1: 192.168.55.1, in the network of the USB device port" in said
        assert said.count("\n") == 1
        assert not out.exists()
