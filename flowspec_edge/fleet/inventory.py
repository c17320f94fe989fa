"""The boards of a cluster: cluster.toml.

Knows which boards there are, what each is for, and how it is reached.  Does not know what runs on
them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flowspec_edge.config import Strict, load_toml
from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.places import PYTHON
from flowspec_edge.manifest import ShardDtype

Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")]
User = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$")]
Absolute = Annotated[str, Field(pattern=r"^/[^\n]*$")]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


class ClusterSettings(Strict):
    """What all boards share; a board's own entry goes before it."""

    name: Name
    interface: Interface = "eth0"  # that the boards reach one another by
    python: Absolute = PYTHON  # of the environment that flowspec is installed in
    torch_device: Annotated[str, Field(min_length=1)] = "cpu"  # where shards are: "cpu" or "cuda"
    control_port: Port = 7701  # at the draft device; goes first when links are shaped
    data_port: Port = 7702  # at every device
    peer_port: Port = 7703  # for measuring links, at every device
    group_port: Port = 7704  # where tensor-parallel ranks meet, at the first verify device
    ssh_config: str = ""  # a file for ssh's -F; empty: the user's own
    # What `flowspec deploy` puts on the boards.  Relative paths count from the cluster file's directory.
    model: str = ""  # one that comes with the package, a checkpoint's directory, or a sharded model
    draft: str = ""  # a draft head's checkpoint, where the model's directory has none
    dtype: ShardDtype | Literal["auto"] = "auto"  # the weights'; auto: as they are, a sharded model's own
    context: Annotated[int, Field(ge=1)] = 4096  # tokens of all requests' texts together that caches hold
    at_once: Annotated[int, Field(ge=0)] = 0  # requests that share the stages; 0: as many as there are stages
    strategy: str = "flowspec"
    keys: str = "keys"  # a directory for the boards' public keys; the private ones stay on the boards
    wheelhouse: str = "wheelhouse"  # a directory with the wheels that the boards get
    board_python: str = "python3"  # the boards' own, which has the torch that was made for them
    power_mode: str = ""  # by name, as in /etc/nvpmodel.conf; empty leaves it
    serve_host: str = "127.0.0.1"  # where the draft device answers clients; beyond loopback with a key alone
    serve_port: Port = 8000

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterSettings:
        ports = {"control_port": self.control_port, "data_port": self.data_port,
                 "peer_port": self.peer_port, "group_port": self.group_port}
        for key, port in ports.items():
            if list(ports.values()).count(port) > 1:
                raise ValueError(f"{key}: port {port} is given to another key, too")
        return self


class DeviceEntry(Strict):
    """One board."""

    name: Name
    address: str  # IPv4 or a host name, as the other boards reach it
    role: Literal["draft", "verify"]
    ssh_user: User = ""  # empty: what ssh's own configuration says
    ssh_port: Port = 22
    ssh_key: str = ""  # a private key file; empty: ssh's own
    interface: Interface | None = None
    python: Absolute | None = None
    torch_device: str | None = None
    profile: str = ""  # a device profile, by name or path
    power_mode: str | None = None

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError(f"{value!r} is neither an IPv4 address nor a host name")
        if re.fullmatch(r"[0-9.]+", value):
            try:
                ipaddress.IPv4Address(value)
            except ValueError:
                raise ValueError(f"{value!r} is not an IPv4 address") from None
        return value


class Inventory(Strict):
    """A whole cluster.toml."""

    cluster: ClusterSettings
    device: list[DeviceEntry]

    @field_validator("device")
    @classmethod
    def _is_a_cluster(cls, devices: list[DeviceEntry]) -> list[DeviceEntry]:
        for key in ("name", "address"):
            seen: dict[str, int] = {}
            for number, device in enumerate(devices):
                value = getattr(device, key)
                if value in seen:
                    raise ValueError(f"{key} {value!r} is given to entries {seen[value]} and {number}")
                seen[value] = number
        drafts = [device.name for device in devices if device.role == "draft"]
        if len(drafts) != 1:
            raise ValueError('exactly one entry needs role = "draft"'
                             + (f", not {' and '.join(drafts)}" if drafts else ", and none has it"))
        if len(drafts) == len(devices):
            raise ValueError('no entry has role = "verify"')
        return devices

    @property
    def draft(self) -> DeviceEntry:
        """D0's board."""
        return next(device for device in self.device if device.role == "draft")

    @property
    def verify(self) -> list[DeviceEntry]:
        """The boards of V1…VN, in the order in which they are listed."""
        return [device for device in self.device if device.role == "verify"]

    def interface(self, device: DeviceEntry) -> str:
        """The network interface of ``device``."""
        return device.interface or self.cluster.interface

    def python(self, device: DeviceEntry) -> str:
        """The Python interpreter on ``device`` that has flowspec."""
        return device.python or self.cluster.python

    def torch_device(self, device: DeviceEntry) -> str:
        """Where ``device`` keeps its shard."""
        return device.torch_device or self.cluster.torch_device

    def protected_ports(self) -> list[int]:
        """TCP ports that must stay quick on shaped links: the control channel's and ssh's."""
        return sorted({self.cluster.control_port, *(device.ssh_port for device in self.device)})


def load_inventory(path: Path) -> Inventory:
    """Read a cluster.toml; UsageError names the file and the key at fault."""
    return load_toml(path, Inventory)


def resolve(device: DeviceEntry) -> str:
    """The IPv4 address of ``device``; FlowspecError if its name is unknown here."""
    try:
        return socket.gethostbyname(device.address)
    except OSError as error:
        raise FlowspecError(f"{device.name}: the address {device.address} is unknown here: "
                            f"{error.strerror}") from error
