"""A look at boards on which nothing of ours is yet, over ssh.

Knows how they are asked, all at once, and what their answers mean.  Does not know what becomes of it
(``survey_toml``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from flowspec_edge.config import load_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet import places, survey_probe
from flowspec_edge.fleet.board import Board, power_modes, read_board
from flowspec_edge.fleet.inventory import ClusterSettings, DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.services import board_runner

_PATIENCE_S = 180.0  # a board reads torch from its card
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
_HOST = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>[^:@]+)(?::(?P<port>\d{1,5}))?")
# What L4T calls a board, and the profiles that may be of it, the one of a faster power mode first.
_PROFILES = (("Orin Nano", ("orin-nano-8gb-super", "orin-nano-8gb")), ("Orin NX", ("orin-nx-16gb",)),
             ("AGX Orin", ("agx-orin-64gb",)), ("Thor", ("thor-t5000",)))
_FAST_MODES = re.compile(r"SUPER|25W")
_SAME_MEMORY = 0.1  # boards of one name come with several sizes, half or twice as large


@dataclass(frozen=True)
class Found:
    """A board, and what it said.

    device      how it is reached; the name is its own host name, or the address where that is no name
    interface   the network interface that has the address; "" if none says so
    python      version of the board's own python3
    torch       version of the one that this Python has; None without one
    cuda        whether that torch sees a GPU
    problem     why torch is there and cannot be imported; "" if it can, or is not there
    gpu         whether the system has an NVIDIA GPU, whatever torch says
    modes       names of its power modes
    disk_mb     free where releases and shards will lie, 10^6 bytes
    profile     the profile that comes with the package for such a board; "" without one
    """

    device: DeviceEntry
    hostname: str
    arch: str
    board: Board
    interface: str
    python: str
    torch: str | None
    cuda: bool
    problem: str
    gpu: bool
    modes: tuple[str, ...]
    disk_mb: float
    profile: str

    @property
    def torch_device(self) -> str:
        """On what it is to compute: a Jetson on its GPU, even if the torch that is there cannot yet; another
        machine on its GPU unless its torch cannot."""
        return "cuda" if self.cuda or self.board.l4t or (self.gpu and self.torch is None) else "cpu"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        board = self.board
        return {"name": self.device.name, "address": self.device.address, "hostname": self.hostname,
                "machine": board.machine, "arch": self.arch, "l4t": board.l4t, "total_mb": board.total_mb,
                "available_mb": board.available_mb, "disk_mb": self.disk_mb, "interface": self.interface,
                "python": self.python, "torch": self.torch, "cuda": self.cuda, "gpu": self.gpu,
                "torch_device": self.torch_device, "power_mode": board.power_mode,
                "power_modes": list(self.modes), "profile": self.profile, "problem": self.problem}


def targets(hosts: Sequence[str], user: str = "", port: int = 22, key: str = "", ssh_config: str = ""
            ) -> Inventory:
    """Boards as [USER@]HOST[:PORT]; the others as ssh is to reach them where a host does not say.

    UsageError for what is no host, for one that is given twice, and for fewer than two.
    """
    if len(hosts) < 2:
        raise UsageError("a cluster needs two boards at least, one that drafts and one that verifies: give "
                         "more hosts")
    devices: list[DeviceEntry] = []
    for text in hosts:
        parts = _HOST.fullmatch(text)
        if parts is None:
            raise UsageError(f"{text!r} is not [USER@]HOST[:PORT]")
        host = parts["host"]
        if any(device.address.casefold() == host.casefold() for device in devices):
            raise UsageError(f"{host} is given twice: every board has an address of its own")
        try:
            devices.append(DeviceEntry(name=host[:63], address=host, ssh_user=parts["user"] or user,
                                       ssh_port=int(parts["port"] or port), ssh_key=key))
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UsageError(f"{text}: {message[:1].lower()}{message[1:]}") from error
    return Inventory(cluster=ClusterSettings(name="survey", ssh_config=ssh_config), device=devices)


def survey(inventory: Inventory, done: Callable[[str], None] = lambda name: None) -> list[Found]:
    """Look at all boards; ``done`` is called with the name of each that has answered.

    FlowspecError that names every board which could not be asked, and why.
    """
    def ask(device: DeviceEntry) -> Found | str:
        try:
            found = _look(inventory, device)
        except FlowspecError as error:
            return str(error)
        done(device.name)
        return found

    with ThreadPoolExecutor(len(inventory.device)) as pool:
        answers = list(pool.map(ask, inventory.device))
    wrong = [answer for answer in answers if isinstance(answer, str)]
    if wrong:
        raise FlowspecError(f"{'; '.join(wrong)}: ssh there by hand; the board must be up, its host key "
                            "known, and your key let in without a password")
    return named([answer for answer in answers if isinstance(answer, Found)])


def _look(inventory: Inventory, device: DeviceEntry) -> Found:
    try:
        address = resolve(device)
    except FlowspecError as error:
        raise FlowspecError(f"{error}: ssh's own configuration may know it, but boards do not: give an IPv4 "
                            "address, or a name that /etc/hosts or DNS knows") from error
    script = Path(survey_probe.__file__).read_text(encoding="utf-8")
    runner, python = board_runner(inventory, device, _PATIENCE_S), inventory.cluster.board_python
    said = runner.run([python, "-", address, places.HOME], script)
    try:
        return read_answer(device, json.loads(said.splitlines()[-1]))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise FlowspecError(f"{runner.where}: {python} gave no answer that can be read") from error


def read_answer(device: DeviceEntry, told: dict[str, Any]) -> Found:
    """What a board's answer to ``survey_probe`` means; KeyError or TypeError for what is none."""
    with TemporaryDirectory(prefix="flowspec-") as directory:
        root = Path(directory)
        for name in survey_probe.FILES:
            if content := told["files"][name]:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content, encoding="utf-8")
        board, modes = read_board(root), power_modes(root)
    torch = told["torch"]
    return Found(
        device=device, hostname=told["hostname"], arch=told["arch"], board=board,
        interface=told["interface"], python=told["python"], torch=torch["version"], cuda=torch["cuda"],
        problem=torch["error"], gpu=told["gpu"] or bool(board.l4t), modes=tuple(modes),
        disk_mb=told["disk_free"] / 1e6, profile=profile_of(board))


def profile_of(board: Board) -> str:
    """The profile of such a board, by what L4T calls it, its memory and its power mode; "" without one."""
    for model, names in _PROFILES:
        if model not in board.machine or board.total_mb is None:
            continue
        for name in names:
            memory = load_profile(name).memory
            alike = memory and abs(board.total_mb / memory.total_mb - 1) <= _SAME_MEMORY
            fast = name == names[-1] or _FAST_MODES.search(board.power_mode)
            if alike and fast:
                return name
    return ""


def named(boards: list[Found]) -> list[Found]:
    """Each board under its own host name, where that is a name and no other board has it."""
    taken = {board.device.name.casefold() for board in boards}
    found = []
    for board in boards:
        name, own = board.hostname.partition(".")[0], board.device
        if _NAME.fullmatch(name) and name != "localhost":
            wanted = name
            for number in range(2, len(boards) + 2):
                if wanted.casefold() == own.name.casefold() or wanted.casefold() not in taken:
                    break
                wanted = f"{name}-{number}"
            taken.add(wanted.casefold())
            own = own.model_copy(update={"name": wanted})
        found.append(replace(board, device=own))
    return found
