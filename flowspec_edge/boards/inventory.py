"""cluster.toml: the boards of a cluster and their settings."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowspec_edge.boards.paths import PYTHON
from flowspec_edge.d0.request import SchedulingPolicy
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.draft_kinds import NAMED, OWN, NamedDraft
from flowspec_edge.model.manifest import CacheBits, HeadBits, ShardDtype
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.strategies.registry import require_pipelines
from flowspec_edge.util.tomlfile import (
    Count,
    KeyPath,
    Misplaced,
    Origin,
    Positive,
    StrictModel,
    is_toml,
    load_toml,
    matching,
    parse_toml,
    with_key,
)

Role = Literal["auto", "draft", "verify"]


class Unreached(FlowspecError):
    """The error for a board that gives no answer: its name is unknown, ssh failed, or it exceeded a time limit."""


Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}",
                               "a name of at most 63 letters, digits and . _ - that begins with a letter or "
                               "a digit")]
Interface = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}",
                                    "a network interface, such as eth0: see ip -o link")]
User = Annotated[str, matching(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)?", "a user's name")]
Address = Annotated[str, matching(r"[A-Za-z0-9.:_-]+", "an address to listen on, such as 0.0.0.0")]
Absolute = Annotated[str, matching(r"/[^\n]*", "an absolute path, one that begins with /")]


def _pair(value: object) -> object:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("give two numbers, [first, end], such as [0, 8] for layers 0 to 7")
    return tuple(value)


Layers = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]], BeforeValidator(_pair)]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


class ClusterSettings(StrictModel):
    name: Name
    interface: Interface = "eth0"  # that connects the boards
    python: Absolute = PYTHON  # the interpreter of flowspec's environment
    torch_device: Annotated[str, Field(min_length=1)] = "cpu"  # "cpu" or "cuda", on all boards including D0
    control_port: Port = 7701  # at the draft device; has priority on shaped links
    data_port: Port = 7702  # at every device
    peer_port: Port = 7703  # of link measurements, at every device
    ssh_config: str = ""  # for ssh -F; empty: the user's configuration
    # For `flowspec deploy`.  Relative paths are resolved against the cluster file's directory.
    model: str = ""  # a model in the package, a checkpoint's directory, or a sharded model
    draft: str = ""  # a draft head's checkpoint, if the model's directory has none; or "ngram", "mtp"
    dtype: Literal["auto", ShardDtype] = "auto"  # of the weights; auto: unchanged
    kv_cache: CacheBits = "16bit"  # of the stages' keys and values
    lm_head: Literal["auto", HeadBits] = "auto"  # of lm_head; auto: int8 with 4-bit weights
    context: Annotated[int, Field(ge=1)] = 4096  # KV cache tokens, over all concurrent requests
    at_once: Annotated[int, Field(ge=0)] = 0  # concurrent requests; 0: one per stage, at least 2
    scheduling_policy: SchedulingPolicy = "fair"  # how concurrent requests share the stages
    strategy: str = DEFAULT_STRATEGY
    keys: str = "keys"  # directory of the boards' public keys; private keys stay on the boards
    runtime: Literal["environment", "image"] = "environment"  # what the boards run flowspec from
    image: str = "image.tar"  # of docker save, for runtime "image"
    wheelhouse: str = "wheelhouse"  # directory of the boards' wheels
    board_python: str = "python3"  # the system Python, which has NVIDIA's torch
    power_mode: str = ""  # name in /etc/nvpmodel.conf; empty: unchanged
    serve_host: Address = "127.0.0.1"  # listen address; other than loopback requires an API key
    serve_port: Port = 8000
    forwarded_allow_ips: str = ""  # proxies whose X-Forwarded-For names the client
    cors_origins: list[Origin] = Field(default=[])  # of web pages that may ask; "*": all

    @property
    def draft_kind(self) -> NamedDraft:
        """What ``draft`` names; "own": a head, in the model's directory or the given one."""
        return self.draft if self.draft in [kind.name for kind in NAMED] else OWN

    @property
    def in_image(self) -> bool:
        return self.runtime == "image"

    @property
    def serves_others(self) -> bool:
        """Whether clients on other machines may connect, with the API key."""
        try:
            return not ipaddress.ip_address(self.serve_host).is_loopback
        except ValueError:
            return self.serve_host != "localhost"

    @property
    def serve_address(self) -> str:
        return "127.0.0.1" if self.serve_host in ("0.0.0.0", "::") else self.serve_host

    @field_validator("strategy")
    @classmethod
    def _is_a_pipelines(cls, value: str) -> str:
        try:
            require_pipelines([value])
        except UsageError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="before")
    @classmethod
    def _without_group_port(cls, values: Any) -> Any:
        """Ignore a key of releases that ran tensor-parallel groups on boards."""
        return {k: v for k, v in values.items() if k != "group_port"} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterSettings:
        ports = {"control_port": self.control_port, "data_port": self.data_port,
                 "peer_port": self.peer_port, "serve_port": self.serve_port}
        for key, port in ports.items():
            if list(ports.values()).count(port) > 1:
                other = next(name for name, other_port in ports.items() if other_port == port and name != key)
                raise Misplaced(f"port {port} is given to {other}, too: every one needs its own", key)
        return self


class DeviceEntry(StrictModel):
    name: Name
    address: str  # IPv4 or host name, as seen from the other boards
    role: Role = "auto"  # auto: the planner decides
    layers: Layers | None = None  # [lo, hi), verify devices only; None: the planner decides
    ssh_user: User = ""  # empty: from ssh's configuration
    ssh_port: Port | None = None  # None: from ssh's configuration
    ssh_key: str = ""  # private key file; empty: from ssh's configuration
    interface: Interface | None = None
    python: Absolute | None = None
    torch_device: str | None = None
    profile: str = ""  # name or path of a device profile
    memory_mb: Positive | None = None  # in all, and
    cores: Count | None = None  # of its CPU: from these a profile is estimated, if none is named
    power_mode: str | None = None

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if ":" in value:
            raise ValueError(f"{value!r} is neither an IPv4 address nor a host name: boards reach each other "
                             "over IPv4")
        if not _HOST.fullmatch(value):
            raise ValueError(f"{value!r} is neither an IPv4 address nor a host name")
        if re.fullmatch(r"[0-9.]+", value):
            try:
                ipaddress.IPv4Address(value)
            except ValueError:
                raise ValueError(f"{value!r} is not an IPv4 address") from None
        return value

    @property
    def label(self) -> str:
        """The name and the address, or what is both, as errors of a connection begin."""
        return self.name if self.name == self.address else f"{self.name} ({self.address})"


class Inventory(StrictModel):
    cluster: ClusterSettings
    device: list[DeviceEntry]

    @field_validator("device")
    @classmethod
    def _is_a_cluster(cls, devices: list[DeviceEntry]) -> list[DeviceEntry]:
        for key in ("name", "address"):
            first_names: dict[str, str] = {}
            for number, device in enumerate(devices):
                value = str(getattr(device, key))
                if (folded := value.casefold()) in first_names:
                    raise Misplaced(f"{value!r} is another entry's {key}, too ({first_names[folded]}): every board "
                                    "needs its own", number, key)
                first_names[folded] = device.name if key == "address" else device.address
        _check_roles(devices)
        _check_layers(devices)
        return devices

    @property
    def decided(self) -> bool:
        return all(device.role != "auto" for device in self.device)

    @property
    def draft(self) -> DeviceEntry:
        """The entry of D0; raise UsageError while a role is "auto"."""
        return next(device for device in self._definite() if device.role == "draft")

    @property
    def verify(self) -> list[DeviceEntry]:
        """The entries of V1…VN in file order; raise UsageError while a role is "auto"."""
        return [device for device in self._definite() if device.role == "verify"]

    @property
    def ring(self) -> list[DeviceEntry]:
        """D0, the others in file order, and D0 again."""
        order = sorted(self.device, key=lambda device: device.role != "draft")
        return [*order, order[0]]

    def _definite(self) -> list[DeviceEntry]:
        if not self.decided:
            names = ", ".join(device.name for device in self.device if device.role == "auto")
            raise UsageError(
                f'cluster {self.cluster.name}: {names}: role is "auto", but this command needs definite '
                'roles: set role = "draft" for one [[device]] and role = "verify" for the others; '
                'flowspec deploy plan proposes them')
        return self.device

    def interface(self, device: DeviceEntry) -> str:
        return device.interface or self.cluster.interface

    def python(self, device: DeviceEntry) -> str:
        return device.python or self.cluster.python

    def torch_device(self, device: DeviceEntry) -> str:
        return device.torch_device or self.cluster.torch_device

    def power_mode(self, device: DeviceEntry) -> str:
        """Return the name of the power mode; "" leaves the board's own."""
        return self.cluster.power_mode if device.power_mode is None else device.power_mode


def load_inventory(path: Path) -> Inventory:
    """Read a cluster file; relative ssh paths are resolved from the file's directory.

    UsageError names the file, line and key.
    """
    if not path.exists():
        raise UsageError(f"there is no cluster file {path}: give another with --cluster, or write one for "
                         f"your boards: flowspec deploy init HOST HOST… --out {shlex.quote(str(path))}")
    inventory = load_toml(path, Inventory)
    cluster = inventory.cluster.model_copy(update={"ssh_config": _anchored(inventory.cluster.ssh_config, path)})
    devices = [device.model_copy(update={"ssh_key": _anchored(device.ssh_key, path)})
               for device in inventory.device]
    return inventory.model_copy(update={"cluster": cluster, "device": devices})


def with_settings(path: Path, settings: Mapping[str, str], boards: Sequence[str] = ()) -> str:
    """Return the text of the cluster file ``path`` with other values, which are checked.

    settings  key → value, "" to leave the key out; keys of [cluster], else of every [[device]]
    boards    names; the keys are of their [[device]] entries

    Raise UsageError for an unknown key or board, a wrong value, or a file that is written in another way.
    """
    inventory, text = load_inventory(path), path.read_bytes().decode()
    numbers = {device.name: number for number, device in enumerate(inventory.device)}
    for name in boards:
        if name not in numbers:
            raise UsageError(f"no board {name!r} in {path}; there are {', '.join(numbers)}")
    for key, value in settings.items():
        is_setting = not boards and key in ClusterSettings.model_fields
        fields = (ClusterSettings if is_setting else DeviceEntry).model_fields
        if key not in fields:
            raise UsageError(_no_key(key, is_setting=key in ClusterSettings.model_fields))
        as_text = _is_text(fields[key].annotation) or "\n" in value or not is_toml(f"{key} = {value}")
        written = None if not value else json.dumps(value, ensure_ascii=False) if as_text else value
        tables: list[KeyPath] = [("cluster",)] if is_setting else [
            ("device", numbers[name]) for name in boards or numbers]
        for table in tables:
            try:
                text = with_key(text, table, key, written)
            except LookupError as error:
                raise UsageError(f"{path}: {error.args[0]} is not one that begins with a line [cluster] or "
                                 "[[device]]: edit the file by hand") from error
    try:
        changed = parse_toml(text.encode(), path, Inventory)
        for device in changed.device if "profile" in settings else ():
            device_profile(device, path)
    except UsageError as error:
        raise UsageError(f"{error}; {path} is not changed") from error
    return text


def _no_key(key: str, is_setting: bool) -> str:
    """Return the error for a missing key; ``is_setting``: it is a key of [cluster], and a board's was looked for."""
    if is_setting:
        return f"{key} is of the whole cluster, not of a board: leave --board out"
    near = get_close_matches(key, [*ClusterSettings.model_fields, *DeviceEntry.model_fields], n=1)
    advice = f"did you mean {near[0]!r}?" if near else "deploy/cluster.example.toml has all keys"
    return f"no key {key!r} in a cluster file: {advice}"


def _is_text(annotation: object) -> bool:
    """Return whether the type is or may be a text; a list of texts is none."""
    return (annotation is str or isinstance(annotation, str)
            or (get_origin(annotation) is not list and any(map(_is_text, get_args(annotation)))))


def beside(path: Path, path_text: str) -> Path:
    """Resolve ``path_text`` against the directory of the cluster file ``path``; expands ~."""
    return path.absolute().parent / Path(path_text).expanduser()


def _anchored(path_text: str, path: Path) -> str:
    return str(beside(path, path_text)) if path_text else ""


def _check_roles(devices: list[DeviceEntry]) -> None:
    drafts = [number for number, device in enumerate(devices) if device.role == "draft"]
    auto = any(device.role == "auto" for device in devices)
    if len(drafts) > 1:
        raise Misplaced(f'exactly one entry needs role = "draft", and {devices[drafts[0]].name} has it '
                        'already: give this one role = "verify"', drafts[1], "role")
    if not drafts and not auto:
        raise ValueError('exactly one entry needs role = "draft", and none has it')
    if len(devices) == 1:
        raise Misplaced("a cluster needs two boards at least, one that drafts and one that verifies", 0)
    if not auto and len(drafts) == len(devices):
        raise ValueError('no entry has role = "verify"')


def _check_layers(devices: list[DeviceEntry]) -> None:
    """Raise Misplaced unless all verify devices have layers or none has, in contiguous ranges from layer 0."""
    if all(device.layers is None for device in devices):
        return
    before, at = "", 0
    for number, device in enumerate(devices):
        if device.role != "verify" and device.layers is not None:
            raise Misplaced('only a device with role = "verify" has layers', number, "layers")
        if device.role == "draft":
            continue
        if device.layers is None:
            raise Misplaced(f"other devices have layers, but {device.name} has none: either give every device except "
                            'the draft device role = "verify" and layers = [first, end], or give no device layers',
                            number)
        lo, hi = device.layers
        if hi <= lo:
            raise Misplaced(f"[{lo}, {hi}] holds no layer: give [first, end], and the end is not included",
                            number, "layers")
        if lo < at:
            raise Misplaced(f"[{lo}, {hi}] overlaps the layers up to {at} of the devices before it: begin "
                            f"with {at}, and list the devices in the order of their layers", number, "layers")
        if lo > at:
            raise Misplaced(f"[{lo}, {hi}] leaves {_layers(at, lo)} without a device: begin with {at}, where "
                            f"{before} ends, and list the devices in the order of their layers"
                            if before else f"[{lo}, {hi}] leaves {_layers(at, lo)} without a device: the "
                            "first verify device begins with 0", number, "layers")
        before, at = device.name, hi


def _layers(lo: int, hi: int) -> str:
    return f"layer {lo}" if hi - lo == 1 else f"layers {lo} to {hi - 1}"


def device_profile(device: DeviceEntry, path: Path) -> Profile | None:
    """Return the board's profile, None if it names none; raise UsageError if the profile does not exist."""
    if not device.profile:
        return None
    profile_file = beside(path, device.profile)
    return load_profile(str(profile_file) if profile_file.is_file() else device.profile)


def resolve(device: DeviceEntry) -> str:
    """Return the IPv4 address of ``device`` as seen from here.

    It is a loopback address only if the name has no other.  Raise Unreached if the name does not resolve.
    """
    addresses = addresses_of(device)
    return next((address for address in addresses if not ipaddress.IPv4Address(address).is_loopback), addresses[0])


def addresses_of(device: DeviceEntry) -> list[str]:
    """Return all IPv4 addresses that the device's name has here; raise Unreached without one."""
    try:
        return socket.gethostbyname_ex(device.address)[2]  # within the limits of /etc/resolv.conf
    except OSError as error:
        with suppress(OSError):
            other = socket.getaddrinfo(device.address, None, socket.AF_INET6)[0][4][0]
            raise Unreached(f"{device.label}: the name {device.address} has no IPv4 address here, which boards need: "
                            f"it has {other} alone") from error
        # An unknown name needs no reason; what else failed, such as a name server, is one.
        why = "" if error.errno == socket.EAI_NONAME else f": {error.strerror}"
        raise Unreached(f"{device.label}: the name {device.address} is unknown here{why}") from error
