"""Checks, before any board is changed, that the boards can take a deployment (`flowspec deploy`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.network.addresses import address_problem
from flowspec_edge.fleet.paths import HOME, STATE
from flowspec_edge.fleet.probe.board import l4t_of
from flowspec_edge.fleet.probe.facts import BoardFacts, DiskFacts, MemoryFacts, ask_system
from flowspec_edge.fleet.probe.findings import Finding, no_facts, wrong_address
from flowspec_edge.fleet.probe.software import judge_jetpack, judge_software

_MIN_SYSTEMD = 247  # LoadCredential=
MAX_CLOCK_SKEW_S = 30.0
_MACHINE_ID = re.compile("[0-9a-f]{32}")  # during the first boot it may be "uninitialized" or empty
# systemd-machine-id-setup takes D-Bus's number, where there is one.
_NEW_MACHINE_ID = ("sudo rm -f /etc/machine-id /var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo "
                   "reboot")


@dataclass(frozen=True)
class Needs:
    """What a deployment needs on one board.

    home_bytes   below /opt/flowspec, if the environment is missing: environment and release
    state_bytes  below /var/lib/flowspec: the missing part of the model
    dtype        of the weights that a stage multiplies: fp16, int4, …
    """

    home_bytes: int = 0
    state_bytes: int = 0
    memory_bytes: int = 0
    ports: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class PreflightReport:
    """``facts`` by board; a board that cannot be reached is in ``problems`` only."""

    problems: list[Finding]
    facts: dict[str, BoardFacts]


def preflight(inventory: Inventory, needs: Mapping[str, Needs]) -> PreflightReport:
    """Probe the boards in ``needs`` concurrently; problems are in the inventory's order."""
    devices = [device for device in inventory.device if device.name in needs]

    def one(device: DeviceEntry) -> BoardFacts | list[Finding]:
        if problem := address_problem(inventory, device):
            return [wrong_address(device, problem)]
        try:
            return ask_system(inventory, device, needs[device.name].ports)
        except FlowspecError as error:
            return [no_facts(device, error)]

    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        told = dict(zip((device.name for device in devices), pool.map(one, devices), strict=True))
    facts = {name: one for name, one in told.items() if isinstance(one, BoardFacts)}
    problems: list[Finding] = []
    for device in devices:
        one_board = told[device.name]
        problems += one_board if isinstance(one_board, list) else judge(
            device.name, needs[device.name], one_board, inventory.cluster.board_python,
            inventory.torch_device(device))
    unlike = differences({name: one.system.machine for name, one in facts.items()})
    return PreflightReport([*problems, *shared_machine_ids(facts), *unlike], facts)


def judge(board: str, needs: Needs, facts: BoardFacts, python: str, torch_device: str = "cpu"
          ) -> list[Finding]:
    """The obstacles on one board; ``python`` is its interpreter's name in the cluster file."""
    return [replace(problem, board=board) for problem in _problems(needs, facts, python, torch_device)]


def _problems(needs: Needs, facts: BoardFacts, python: str, torch_device: str) -> Iterator[Finding]:
    system = facts.system
    yield from judge_software(system, python, torch_device, needs.dtype)
    if (jetpack := judge_jetpack(l4t_of(system))) and jetpack.state == "failed":
        return
    if not system.systemd.runs:
        yield Finding("systemd", "failed", "the board was not started by systemd", "services need it")
    elif system.systemd.version < _MIN_SYSTEMD:
        yield Finding("systemd", "failed", f"version {system.systemd.version}",
                           f"{_MIN_SYSTEMD} or newer is needed: upgrade the board's system")
    if abs(facts.ahead) - facts.within > MAX_CLOCK_SKEW_S:
        yield _clock(facts.ahead, system.ntp)
    # Whether one of the existing environments is the right one is known after the wheels are built:
    # environment_problems.
    yield from _disks(needs.home_bytes * (not system.environments), needs.state_bytes, system.disks)
    yield from _memory(needs, system.memory)
    for port, (pid, name) in sorted(system.ports.items()):
        holder = f"{name or 'something'} (process {pid})" if pid else "another program"
        yield Finding("port", "failed", f"{port} is taken by {holder}",
                           "end it, or give another port in the cluster file")


def differences(machines: Mapping[str, str]) -> list[Finding]:
    """A note for each board whose processor differs from the most common; "" is an unknown processor."""
    known = [machine for machine in machines.values() if machine]
    usual = max(known, key=known.count, default="")
    return [Finding("machine", "warning", f"{machine}, and others are {usual}",
                         "the wheelhouse needs wheels for both", board=board)
            for board, machine in machines.items() if machine not in ("", usual)]


def shared_machine_ids(facts: Mapping[str, BoardFacts]) -> list[Finding]:
    """A problem for each board that has the machine-id of a board before it.

    If the running kernel is the same, too, both are one machine; if not, one system is a copy of the other.
    """
    found: list[Finding] = []
    known: dict[str, tuple[str, str]] = {}  # machine-id → board, its kernel's boot id
    for board, own in facts.items():
        machine = own.system.files.get("etc/machine-id", "").strip()
        boot = own.system.files.get("proc/sys/kernel/random/boot_id", "").strip()
        if not _MACHINE_ID.fullmatch(machine):
            continue
        other, other_boot = known.setdefault(machine, (board, boot))
        if other != board and boot == other_boot:
            found.append(Finding("machine-id", "failed", f"it is the same machine as {other}",
                                      "give each board once, with its own address and port; containers need "
                                      "an /etc/machine-id each", board=board))
        elif other != board:
            found.append(Finding("machine-id", "failed",
                                 f"it has the machine-id of {other}, as a copied SD card has, so DHCP may "
                                 "give both one address and logs mix them up",
                                 f"run on one of them: {_NEW_MACHINE_ID}", board=board))
    return found


def environment_problems(found: PreflightReport, needs: Mapping[str, Needs], digests: Mapping[str, str]
                         ) -> list[Finding]:
    """Disk problems of boards that have environments, but not the one with this digest."""
    return [replace(problem, board=board) for board, digest in digests.items()
            if (facts := found.facts[board].system).environments and digest not in facts.environments
            for problem in _disks(needs[board].home_bytes, needs[board].state_bytes, facts.disks)]


def _clock(ahead: float, ntp: str) -> Finding:
    """`deploy up` sets a clock that NTP does not keep; if NTP keeps both, one of the two is wrong."""
    if ntp != "yes":
        return Finding("clock", "warning", f"{ahead:+.0f} s against this machine's, and NTP has not set it",
                            "flowspec deploy up sets it")
    return Finding("clock", "failed", f"{ahead:+.0f} s against this machine's, although NTP keeps it",
                        "one of the two is wrong: see date and timedatectl, there and here")


def _disks(home_bytes: int, state_bytes: int, disks: Mapping[str, DiskFacts]) -> Iterator[Finding]:
    on: dict[int, list[str]] = {}
    for path, disk in disks.items():
        on.setdefault(disk.device, []).append(path)
        if not disk.writable:
            yield Finding("disk", "failed", f"{path} is on a file system that is mounted read-only",
                               "see dmesg; sudo mount -o remount,rw, once the disk is sound")
    wanted = {HOME: home_bytes, STATE: state_bytes}
    for paths in on.values():
        needed, free = sum(wanted.get(path, 0) for path in paths), disks[paths[0]].free
        if needed > free:
            where = f"{' and '.join(paths)} need{'s' if len(paths) == 1 else ''}"
            yield Finding("disk", "failed", f"{where} {_gb(needed)}, {_gb(free)} are free",
                               "make room, or mount a larger disk there")


def _memory(needs: Needs, memory: MemoryFacts) -> Iterator[Finding]:
    free = memory.available + memory.held
    if needs.memory_bytes > free:
        own = f", with the {_gb(memory.held)} of the service that runs" if memory.held else ""
        yield Finding("memory", "failed", f"{_gb(needs.memory_bytes)} are needed, {_gb(free)} of "
                                     f"{_gb(memory.total)} are available{own}",
                           "give it fewer layers, or all a shorter context or int4, or end what else runs "
                           "there (a desktop: sudo systemctl set-default multi-user.target)")


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
