"""Addresses that other boards cannot reach, as this machine's own names and routes give them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kits import network_beds, ssh_boards

from flowspec_edge.boards.commands import is_here
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory, load_inventory
from flowspec_edge.boards.links.addresses import address_problem, network_address, on_network, route_to
from flowspec_edge.boards.probe.checks import Needs, preflight
from flowspec_edge.cli.main import main
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.links.namespaces import NetnsTestbed
from flowspec_edge.util.interfaces import ipv4_addresses


def cluster(*addresses: str) -> Inventory:
    return Inventory(cluster=ClusterSettings(name="lab"), device=[
        DeviceEntry(name=f"orin-{place}", address=address, role="verify" if place else "draft")
        for place, address in enumerate(addresses)])


def refusal(inventory: Inventory, place: int = 0) -> str:
    with pytest.raises(UsageError) as refused:
        network_address(inventory, inventory.device[place])
    return str(refused.value)


@network_beds.needs_netns
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
    assert refusal(mixed).startswith("orin-0: 127.0.1.1 is an address that other boards cannot reach: give its address")
    assert address_problem(mixed, mixed.device[1]) is None


def test_deploy_up_refuses_such_an_address_before_anything_else() -> None:
    (problem,) = preflight(cluster("127.0.1.1", "192.0.2.1"), {"orin-0": Needs()}).problems
    assert str(problem).startswith("orin-0: address: 127.0.1.1 is an address that other boards cannot reach; give its ")


@ssh_boards.needs_boards
def test_init_writes_the_address_on_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ssh_boards.boards(1, tmp_path) as boards, boards.bed.entered(0):
        out, other = tmp_path / "cluster.toml.new", boards.bed.address(1)
        options = ["--user", "root", "--key", f"{tmp_path}/user", "--ssh-config", f"{tmp_path}/config",
                   "--out", str(out)]
        assert main(["deploy", "init", "localhost", other, *options]) == 0
        assert [device.address for device in load_inventory(out).device] == [boards.bed.address(0), other]
        out.unlink()
        capsys.readouterr()
        assert main(["deploy", "init", other, "192.168.55.1", *options]) == 2
        said = capsys.readouterr().err
        assert ": 192.168.55.1 is in the network of the USB device port" in said
        assert said.count("\n") == 1
        assert not out.exists()


@network_beds.needs_netns
def test_this_machine_where_sockets_may_be_bound_to_foreign_addresses() -> None:
    """The sysctl is the bed's own."""
    with NetnsTestbed(2) as bed, bed.entered(0):
        subprocess.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"], check=True)
        own, second = bed.address(0), "10.99.0.1"
        subprocess.run(["ip", "addr", "add", f"{second}/24", "dev", bed.interface(0)], check=True)
        inventory = cluster(own, bed.address(1), second)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anywhere:
            anywhere.bind((bed.address(1), 0))  # which proves nothing here
        assert [is_here(inventory, device) for device in inventory.device] == [True, False, True]
        assert route_to(bed.address(1)) == (own, bed.interface(0))


@network_beds.needs_netns
def test_the_kernels_list_of_addresses_is_that_of_ip() -> None:
    """Further addresses of an interface included."""
    with NetnsTestbed(1) as bed, bed.entered(0):
        for command in ("addr add 10.99.0.1/24 dev eth0", "addr add 10.99.0.2/24 dev eth0 label eth0:two",
                        "addr add fe80::99/64 dev eth0"):
            subprocess.run(["ip", *command.replace("eth0", bed.interface(0)).split()], check=True)
        shown = json.loads(subprocess.run(["ip", "-4", "-j", "addr"], capture_output=True, text=True,
                                          check=True).stdout)
        assert ipv4_addresses() == {
            link["ifname"]: [entry["local"] for entry in link["addr_info"]]
            for link in shown if link.get("addr_info")}


_BRIDGE = """
import sys
from flowspec_edge.boards.links.addresses import address_problem
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
lab = Inventory(cluster=ClusterSettings(name="lab"), device=[
    DeviceEntry(name=f"orin-{place}", address=address, role="verify" if place else "draft")
    for place, address in enumerate(sys.argv[1:])])
for device in lab.device:
    print(address_problem(lab, device))
"""


@network_beds.needs_netns
def test_a_bridge_inside_the_machine_is_no_board_network() -> None:
    """Docker's has one address on all boards; a bridge with a network card leads to them."""
    make = ("mount -t sysfs sysfs /sys && ip link add docker0 type bridge && "
            "ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up && "
            "ip link add eth0 type veth peer name eth1 && ip addr add 10.0.0.1/24 dev eth0 && "
            'ip link set eth0 up && ip link set eth1 up && exec "$@"')
    ask = [sys.executable, "-c", _BRIDGE, "172.17.0.1", "10.0.0.2", "10.0.0.1"]
    shown = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", make, "sh", *ask],
        capture_output=True, text=True, check=True).stdout.splitlines()
    assert "172.17.0.1 is the address of docker0, a network inside this machine, which other " in shown[0]
    assert "(10.0.0.1 at eth0)" in shown[0]
    assert shown[1:] == ["None", "None"]


@network_beds.needs_netns
def test_a_name_with_several_addresses_is_reached_at_the_one_on_the_network(
        tmp_path: Path) -> None:
    """Ubuntu's /etc/hosts has 127.0.1.1 for the board's own name, often before the real address."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 orin-0\n10.0.0.10 orin-0\nfe80::1 orin-6\n")
    ask = ("from flowspec_edge.boards.inventory import DeviceEntry, addresses_of, resolve\n"
           "one, six = (DeviceEntry(name=name, address=name) for name in ('orin-0', 'orin-6'))\n"
           "print(addresses_of(one), resolve(one))\n"
           "try: resolve(six)\n"
           "except Exception as error: print(error)\n")
    make = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    shown = subprocess.run(
        ["unshare", "--mount", "sh", "-c", make, "sh", str(hosts), sys.executable, "-c", ask],
        capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0] == "['127.0.1.1', '10.0.0.10'] 10.0.0.10"
    assert shown[1].startswith("orin-6: the name orin-6 has no IPv4 address here")
