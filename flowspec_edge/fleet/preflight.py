"""Whether boards can take what `flowspec deploy` is to put on them, before any is touched.

Knows what each board needs and what makes that impossible, in words with a next step.  Asks each board
once, over ssh, by its own Python (``preflight_probe``).  Does not know how anything gets there.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import preflight_probe
from flowspec_edge.fleet.board import l4t_release
from flowspec_edge.fleet.checkup import TOO_OLD
from flowspec_edge.fleet.commands import LocalRunner, Runner
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import HOME, STATE
from flowspec_edge.fleet.ssh import SshRunner, is_here

_PATIENCE_S = 300.0  # a small board reads torch from its card
_PYTHON = (3, 10)
_TORCH = (2, 6)  # transformers switches PyTorch off below
_SYSTEMD = 247  # LoadCredential=
_SKEW_S = 30.0
_ORIN = [8, 7]  # its GPU's compute capability

# Root where that can be had: whose a port is, nobody else may know.
_START = """
command -v "$1" >/dev/null || { echo '{"python": null}'; exit; }
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then exec sudo -n -- "$1" -; fi
exec "$1" -
"""

# What ssh says -> what that means, and what to do.  {address} and {port} are the board's.
_SSH = (
    ("Host key verification failed",
     "its host key is unknown here, or not the one that was known",
     "compare ssh-keyscan -p {port} {address} with the board's own; then ssh there once by hand, or after "
     "flashing it, ssh-keygen -R {address} first"),
    ("Permission denied", "it does not let this user in with this key",
     "see ssh_user and ssh_key in the cluster file; ssh-copy-id -p {port} puts a key there"),
    ("Connection refused", "nothing answers at port {port}",
     "start sshd there (sudo systemctl enable --now ssh), or see ssh_port in the cluster file"),
    ("timed out|No route to host|Network is unreachable", "{address} does not answer",
     "see whether the board is up, its cable, and the address in the cluster file"),
    ("Could not resolve|is unknown here", "the name {address} is unknown here",
     "give the board's address in the cluster file, or make the name known"),
)


@dataclass(frozen=True)
class Needs:
    """What one board has to take.

    home_bytes    to be written below /opt/flowspec: environment and release
    state_bytes   to be written below /var/lib/flowspec: what is missing of its parts
    memory_bytes  of weights, caches and whatever else its service will hold, all in all
    ports         TCP ports that it will listen on
    dtype         of the weights, of which a stage multiplies: fp16, int4, …
    """

    home_bytes: int = 0
    state_bytes: int = 0
    memory_bytes: int = 0
    ports: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Problem:
    """Something that stands in the way on one board; ``note``: it does not, but is good to know.

    check   its name: ssh, sudo, board, python, torch, systemd, disk, memory, port, clock, machine
    found   in words, with figures
    advice  the next step
    """

    board: str
    check: str
    found: str
    advice: str
    note: bool = False

    def __str__(self) -> str:
        return f"{self.board}: {self.check}: {self.found}; {self.advice}"


@dataclass(frozen=True)
class Found:
    """What boards are, as far as a release depends on it, and what stands in the way.

    pythons   by board: its Python, (3, 10, 12)
    machines  by board: its processor, aarch64 or x86_64
    torches   by board: its torch's version, 2.6.0+cu126

    A board that could not be asked is in ``problems`` alone.
    """

    problems: list[Problem]
    pythons: dict[str, tuple[int, ...]]
    machines: dict[str, str]
    torches: dict[str, str]


def preflight(inventory: Inventory, needs: Mapping[str, Needs]) -> Found:
    """Look at the boards that ``needs`` names, all at once, and touch nothing; in the inventory's order."""
    devices = [device for device in inventory.device if device.name in needs]

    def one(device: DeviceEntry) -> tuple[dict[str, Any], list[Problem]]:
        try:
            facts = ask(inventory, device, needs[device.name].ports)
        except FlowspecError as error:
            return {"python": None}, [unreachable(device, str(error))]
        return facts, judge(device.name, needs[device.name], facts, inventory.cluster.board_python,
                            inventory.torch_device(device))

    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        found = list(pool.map(one, devices))
    told = {device.name: facts for device, (facts, _) in zip(devices, found, strict=True) if facts["python"]}
    machines = {name: facts["machine"] for name, facts in told.items()}
    return Found([*(problem for _, own in found for problem in own), *differences(machines)],
                 {name: tuple(facts["python"]) for name, facts in told.items()}, machines,
                 {name: facts["torch"]["version"] for name, facts in told.items()})


def ask(inventory: Inventory, device: DeviceEntry, ports: Collection[int] = ()) -> dict[str, Any]:
    """The probe's facts, who listens on ``ports`` among them, and ``ahead`` and ``within``: how many seconds
    the board's clock is ahead of ours, and to within how many that is known.

    FlowspecError if it cannot be asked.
    """
    before = time.time()
    said = probe(inventory, device, f"main({[HOME, STATE]!r}, {sorted(ports)!r}, time.time())")
    after = time.time()
    try:
        facts: dict[str, Any] = json.loads(said.splitlines()[-1])
        facts["python"]
    except (LookupError, TypeError, ValueError):
        raise FlowspecError(f"{device.name} ({device.address}): {inventory.cluster.board_python} answers "
                            f"{said.strip()[-80:]!r}: see whether it is a Python") from None
    after -= facts.get("seconds", 0.0)
    if "time" in facts:
        facts |= {"ahead": facts["time"] - (before + after) / 2, "within": (after - before) / 2}
    return facts


def probe(inventory: Inventory, device: DeviceEntry, call: str) -> str:
    """What the board's own Python writes for ``call``, a line that uses ``preflight_probe``'s functions; as
    root where that can be had.  FlowspecError if it cannot be asked."""
    runner: Runner = (LocalRunner(device.name, timeout_s=_PATIENCE_S) if is_here(device) else
                      SshRunner(inventory, device, timeout_s=_PATIENCE_S))
    return runner.run(["sh", "-c", _START, "sh", inventory.cluster.board_python],
                      f"{inspect.getsource(preflight_probe)}\n\n{call}\n")


def unreachable(device: DeviceEntry, error: str) -> Problem:
    """What ssh's ``error`` means."""
    values = {"address": device.address, "port": device.ssh_port}
    for pattern, found, advice in _SSH:
        if re.search(pattern, error):
            return Problem(device.name, "ssh", f"{found.format(**values)} ({error})", advice.format(**values))
    return Problem(device.name, "ssh", error, "ssh there by hand, and see what it says")


def judge(board: str, needs: Needs, facts: dict[str, Any], python: str, torch_device: str = "cpu"
          ) -> list[Problem]:
    """What stands in the way on one board; ``python`` is its interpreter's name, ``torch_device`` where it is
    to compute."""
    def problem(check: str, found: str, advice: str) -> Problem:
        return Problem(board, check, found, advice)

    if facts["python"] is None:
        return [problem("python", f"there is no {python}",
                        "sudo apt-get install python3, or see board_python in the cluster file")]
    release = l4t_release(facts["l4t"])
    if release.startswith(TOO_OLD):
        return [problem("board", f"L4T {release}, whose Python is older than 3.10",
                        "flash JetPack 6 or 7; NVIDIA's SDK Manager does")]
    found = []
    if facts["sudo"]:
        user = facts["user"]
        found.append(problem("sudo", f"{user} cannot become root without a password ({facts['sudo']})",
                             f"as root: echo '{user} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/flowspec"))
    if tuple(facts["python"]) < _PYTHON:
        found.append(problem("python", f"{python} is {_dotted(facts['python'])}",
                             "name one that is 3.10 or newer, board_python in the cluster file"))
    else:
        found += _torch(problem, facts["torch"], python) or _gpu(board, facts["torch"], release, torch_device,
                                                                     needs.dtype)
    if not facts["systemd"]["runs"]:
        found.append(problem("systemd", "the board was not started by systemd", "services need it"))
    elif facts["systemd"]["version"] < _SYSTEMD:
        found.append(problem("systemd", f"version {facts['systemd']['version']}",
                             f"{_SYSTEMD} or newer is needed: upgrade the board's system"))
    if abs(facts["ahead"]) - facts["within"] > _SKEW_S:
        found.append(problem("clock", f"{facts['ahead']:+.0f} s against this machine's, and packages and "
                             "logs go by it", "sudo timedatectl set-ntp true, there and here"))
    found += _disks(problem, needs, facts["disks"])
    found += _memory(problem, needs, facts["memory"])
    for port, (pid, name) in sorted(facts["ports"].items(), key=lambda item: int(item[0])):
        who = f"{name or 'something'} (process {pid})" if pid else "another program"
        found.append(problem("port", f"{port} is taken by {who}",
                             "end it, or give another port in the cluster file"))
    return found


def differences(machines: Mapping[str, str]) -> list[Problem]:
    """A note for each board whose processor is another than most boards'; board -> its name, "" unknown."""
    known = [machine for machine in machines.values() if machine]
    usual = max(known, key=known.count, default="")
    return [Problem(board, "machine", f"{machine}, and others are {usual}",
                    "the wheelhouse needs wheels for both", note=True)
            for board, machine in machines.items() if machine not in ("", usual)]


_Make = Callable[[str, str, str], Problem]


def _torch(problem: _Make, torch: dict[str, Any], python: str) -> list[Problem]:
    version = tuple(int(number) for number in re.findall(r"\d+", torch["version"])[:2])
    if not version:
        return [problem("torch", f"{python} cannot import it and numpy: {torch['why']}",
                        "install the torch that was made for this board, and numpy, for all users")]
    if version < _TORCH:
        return [problem("torch", torch["version"], f"install {_dotted(_TORCH)} or newer, for this board")]
    return []


def _gpu(board: str, torch: dict[str, Any], l4t: str, torch_device: str, dtype: str) -> list[Problem]:
    """A service that is to compute with CUDA does not start without it; a Jetson that computes on its CPU is
    many times slower than it could be."""
    if torch_device.startswith("cuda") and not torch["cuda"]:
        made = "this JetPack" if l4t else "its CUDA version"
        return [Problem(board, "torch",
                        f"{torch['version']} sees no CUDA GPU, and torch_device is {torch_device!r}",
                        f"install the torch that was made for {made}, for board_python, or set "
                        'torch_device = "cpu" for this board in the cluster file')]
    if l4t and torch_device == "cpu":
        return [Problem(board, "torch", 'torch_device is "cpu", so this Jetson computes on its CPU',
                        'set torch_device = "cuda" in the cluster file', note=True)]
    if dtype in ("nf4", "fp4") and torch["cuda"] == _ORIN and torch_device != "cpu":
        return [Problem(board, "torch", f"the weights are in {dtype}, whose matrices bitsandbytes expands on "
                        "this GPU for every product of more than 4 rows",
                        "use int4, which has a kernel for them: dtype in the cluster file, or cut the model "
                        "again", note=True)]
    return []


def _disks(problem: _Make, needs: Needs, disks: dict[str, Any]) -> list[Problem]:
    """Two directories on one file system share what is free there."""
    found = []
    on: dict[int, list[str]] = {}
    for path, disk in disks.items():
        on.setdefault(disk["device"], []).append(path)
        if not disk["writable"]:
            found.append(problem("disk", f"{path} is on a file system that is mounted read-only",
                                 "see dmesg; sudo mount -o remount,rw, once the disk is sound"))
    wanted = {HOME: needs.home_bytes, STATE: needs.state_bytes}
    for paths in on.values():
        needed, free = sum(wanted[path] for path in paths), disks[paths[0]]["free"]
        if needed > free:
            found.append(problem("disk", f"{' and '.join(paths)} need {_gb(needed)}, {_gb(free)} are free",
                                 "make room, or mount a larger disk there"))
    return found


def _memory(problem: _Make, needs: Needs, memory: dict[str, int]) -> list[Problem]:
    """What our own service holds is free once it is restarted."""
    room = memory["available"] + memory["held"]
    if needs.memory_bytes <= room:
        return []
    own = f", with the {_gb(memory['held'])} of the service that runs" if memory["held"] else ""
    return [problem("memory", f"{_gb(needs.memory_bytes)} are needed, {_gb(room)} of "
                              f"{_gb(memory['total'])} are available{own}",
                    "give it fewer layers, or all a shorter context or int4, or end what else runs there "
                    "(a desktop: sudo systemctl set-default multi-user.target)")]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _dotted(version: Collection[int]) -> str:
    return ".".join(map(str, version))
