"""Addresses by which boards reach one another, as far as this machine can tell.

Loopback addresses and those of the USB device port mean a different machine on every board.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network

from flowspec_edge.boards.commands import is_here
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.interfaces import ipv4_addresses, is_inside_the_machine
from flowspec_edge.util.jetson import system

_ANY_PORT = 9


def network_address(inventory: Inventory, device: DeviceEntry) -> str:
    """Return the address of ``device`` for other boards.

    Raise FlowspecError if the name does not resolve here, UsageError if other boards cannot reach the address.
    """
    if problem := address_problem(inventory, device):
        raise UsageError(f"{device.name}: {': '.join(problem)} in the cluster file")
    return resolve(device)


def address_problem(inventory: Inventory, device: DeviceEntry) -> tuple[str, str] | None:
    """Return why other boards cannot reach ``device``, and a next step; None without a known problem.

    If all devices have loopback addresses they are one machine.
    """
    address = _address_or_none(device)
    if address is None:
        return None
    shown_address = address if device.address == address else f"{device.address} resolves to {address} here, which"
    if IPv4Address(address) in IPv4Network(system().usb_network.network):
        return (f"{shown_address} is in the network of the USB device port, where every Jetson has the same address",
                "give its address on the Ethernet (ip -4 -o addr on the board shows it)")
    bridge = next((name for name, addresses in ipv4_addresses().items()
                   if address in addresses and is_inside_the_machine(name)), "")
    others = [other for other in _elsewhere(inventory) if other != address]
    if not others or not (bridge or IPv4Address(address).is_loopback):
        return None
    inside = f"is the address of {bridge}, a network inside this machine, which" if bridge else "is an address that"
    route = route_to(others[0]) if is_here(inventory, device) else None
    example = f" ({route[0]} at {route[1]})" if route else ""
    return (f"{shown_address} {inside} other boards cannot reach",
            f"give its address on the network{example}")


def on_network(inventory: Inventory) -> Inventory:
    """Replace this machine's loopback address, unless all are loopback or there is no route to the others."""
    route = next((candidate for other in _elsewhere(inventory) if (candidate := route_to(other))), None)
    if route is None:
        return inventory

    def looped(device: DeviceEntry) -> bool:
        address = _address_or_none(device)
        return address is not None and IPv4Address(address).is_loopback and is_here(inventory, device)

    devices = [device.model_copy(update={"address": route[0]}) if looped(device) else device
               for device in inventory.device]
    return inventory.model_copy(update={"device": devices})


def route_to(address: str) -> tuple[str, str] | None:
    """Return the IPv4 address and interface of this machine on the route to ``address``; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))  # UDP: looks up the route without sending
        except OSError:
            return None
        local_address = str(probe.getsockname()[0])
    return next(((local_address, name) for name, addresses in ipv4_addresses().items()
                 if local_address in addresses), None)


def _elsewhere(inventory: Inventory) -> list[str]:
    """Return the devices' addresses that are not loopback."""
    addresses: Iterator[str | None] = (_address_or_none(device) for device in inventory.device)
    return [address for address in addresses if address and not IPv4Address(address).is_loopback]


def _address_or_none(device: DeviceEntry) -> str | None:
    with suppress(FlowspecError):
        return resolve(device)
    return None
