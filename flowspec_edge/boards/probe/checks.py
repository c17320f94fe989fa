"""The checks of boards and machines: what each is about, how bad its findings can be, and who shows them.

`deploy init`, `deploy plan`, `deploy up` and the doctor go through one list, so that they judge alike; begin
with ``CHECKS``.  What `deploy status` shows of services is ``services.status.FleetStatus.findings``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from flowspec_edge.boards.commands import on_each
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.boards.links.addresses import address_problem
from flowspec_edge.boards.paths import HOME, STATE
from flowspec_edge.boards.probe import system_rules as rules
from flowspec_edge.boards.probe.board import BoardInfo, board_of
from flowspec_edge.boards.probe.facts import BoardFacts, DiskFacts, SystemFacts, ask_system
from flowspec_edge.boards.probe.findings import Finding, State, no_facts, wrong_address
from flowspec_edge.boards.probe.software import judge_jetpack, judge_torch, python_fault
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.jetson import jetpack_of

MAX_CLOCK_SKEW_S = 30.0  # of a deployment
_MAX_SKEW_S = 1.0  # beyond it, the logs of two boards cannot be correlated
_MIN_SYSTEMD = 247  # LoadCredential=
_GIGA = 1e9
_MACHINE_ID = re.compile("[0-9a-f]{32}")  # during the first boot it may be "uninitialized" or empty
# systemd-machine-id-setup takes D-Bus's number, where there is one.
_NEW_MACHINE_ID = ("sudo rm -f /etc/machine-id /var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo "
                   "reboot")


@dataclass(frozen=True)
class Needs:
    """What a deployment needs on one board.

    home_bytes  below /opt/flowspec, if the environment is missing: environment and release
    dtype       of the weights that a stage multiplies: fp16, int4, …
    """

    home_bytes: int = 0
    memory_bytes: int = 0
    ports: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Subject:
    """What is judged.

    python      the board's interpreter, as the cluster file names it
    storage     where releases and shards will lie; "": the fullest of the disks
    power_mode  that the cluster file asks for, by name; "": any
    address     the board's IPv4 address, as seen from this machine; ``interface``: the cluster file's
    wrong       why other boards cannot use the address (``addresses.address_problem``)
    """

    facts: BoardFacts
    python: str = "python3"
    torch_device: str = "cpu"
    needs: Needs = Needs()
    storage: str = ""
    power_mode: str = ""
    address: str = ""
    interface: str = ""
    wrong: tuple[str, str] | None = None

    @classmethod
    def of(cls, inventory: Inventory, device: DeviceEntry, facts: BoardFacts, needs: Needs = Needs(),
           storage: str = "") -> Subject:
        return cls(facts, inventory.cluster.board_python, inventory.torch_device(device), needs, storage,
                   inventory.power_mode(device), resolve(device), inventory.interface(device),
                   address_problem(inventory, device))

    @property
    def system(self) -> SystemFacts:
        return self.facts.system

    @cached_property
    def board(self) -> BoardInfo:
        return board_of(self.facts.system)


# Who shows a finding.  up: `deploy plan` and `up`; bare, installed, here: the doctor, of a board without a
# release, of one with it, and of the machine that it runs on.
Place = Literal["init", "up", "bare", "installed", "here"]
_BOARDS: tuple[Place, ...] = ("bare", "installed")
_DOCTOR: tuple[Place, ...] = (*_BOARDS, "here")
_ALL: tuple[Place, ...] = ("init", "up", *_DOCTOR)


@dataclass(frozen=True)
class Check:
    """``rule`` yields findings, "ok" among them, none of them worse than ``severity``.

    ends  whether `deploy init` and `up` say nothing else of the board if this one fails
    """

    name: str
    severity: State
    places: tuple[Place, ...]
    rule: Callable[[Any], Iterable[Finding]]
    ends: bool = False


def judge(place: Place, subject: Subject) -> list[Finding]:
    """In the order of ``CHECKS``; causes come before their consequences."""
    found: list[Finding] = []
    for check in CHECKS:
        if place in check.places:
            own = list(check.rule(subject))
            found += own
            if check.ends and place in ("init", "up") and any(finding.state == "failed" for finding in own):
                break
    return found


def faults(place: Place, subject: Subject) -> list[Finding]:
    """What failed, and what is worth knowing."""
    return [finding for finding in judge(place, subject) if finding.state in ("failed", "warning")]


def judge_together(place: Place, facts: Mapping[str, BoardFacts]) -> list[Finding]:
    """Of ``facts`` by board; a finding names its board."""
    return [finding for check in CHECKS_OF_ALL if place in check.places for finding in check.rule(facts)]


def _jetpack(subject: Subject) -> Iterator[Finding]:
    board = subject.board
    if fault := judge_jetpack(board.l4t):
        yield fault
    elif board.l4t:
        jetpack = jetpack_of(board.l4t)
        name = f" (JetPack {jetpack.name})" if jetpack else ""
        yield Finding("board", "ok", f"{board.machine or 'a Jetson'}, L4T {board.l4t}{name}")
    else:
        yield Finding("board", "ok", f"{board.machine or 'a machine'}; not a Jetson")


def _python(subject: Subject) -> Iterator[Finding]:
    yield python_fault(subject.system, subject.python) or Finding(
        "python", "ok", ".".join(map(str, subject.system.python)))


def _sudo(subject: Subject) -> Iterator[Finding]:
    why, user = subject.system.sudo, subject.system.user
    yield Finding("sudo", "failed", f"{user} cannot become root without a password ({why})",
                  f"on the board: echo '{user} ALL=(ALL) NOPASSWD: ALL' | sudo tee /etc/sudoers.d/flowspec"
                  ) if why else Finding("sudo", "ok", "without a password")


def _torch(subject: Subject) -> Iterator[Finding]:
    system, torch = subject.system, subject.system.torch
    if python_fault(system, subject.python):
        return  # a torch for that Python is of no use
    found = list(judge_torch(torch, subject.python, subject.board.l4t, subject.torch_device,
                             subject.needs.dtype, busy=system.memory.held > 0))
    if all(finding.check != "torch" for finding in found):
        capability = ".".join(map(str, torch.cuda or ()))
        sees = f"sees the GPU (compute capability {capability})" if capability else "sees no GPU"
        yield Finding("torch", "ok", f"{torch.version}, which {sees}, {torch.file}")
    yield from found


def _systemd(subject: Subject) -> Iterator[Finding]:
    systemd = subject.system.systemd
    if not systemd.runs:
        yield Finding("systemd", "failed", "the board was not started by systemd", "services need it")
    elif systemd.version < _MIN_SYSTEMD:
        yield Finding("systemd", "failed", f"version {systemd.version}",
                      f"{_MIN_SYSTEMD} or newer is needed: upgrade the board's system")
    else:
        yield Finding("systemd", "ok", f"{systemd.version}")


def _clock(subject: Subject) -> Iterator[Finding]:
    """`deploy up` sets a clock that NTP does not keep; if NTP keeps both, one of the two is wrong."""
    ahead = subject.facts.ahead
    if abs(ahead) - subject.facts.within <= MAX_CLOCK_SKEW_S:
        return
    if subject.system.ntp == "yes":
        yield Finding("clock", "failed", f"{ahead:+.0f} s against this machine's, although NTP keeps it",
                      "one of the two is wrong: see date and timedatectl, there and here")
    else:
        yield Finding("clock", "warning", f"{ahead:+.0f} s against this machine's, and NTP has not set it",
                      "flowspec deploy up sets it")


def _skew(subject: Subject) -> Iterator[Finding]:
    ahead, within = subject.facts.ahead, subject.facts.within
    found = f"{ahead:+.2f} s against this machine's, ± {within:.2f}"
    if abs(ahead) - within > _MAX_SKEW_S:
        yield Finding("clock", "warning", found,
                      "sudo timedatectl set-ntp true, on both; without internet see the check of the time")
    else:
        yield Finding("clock", "ok", found)


def _room(subject: Subject) -> Iterator[Finding]:
    """Without the model's part; whether an existing environment is the right one is known once the wheels
    are built: ``room_problems`` judges both."""
    home_bytes = 0 if subject.system.environments else subject.needs.home_bytes
    yield from judge_room(subject.system.disks, home_bytes)


def judge_room(disks: Mapping[str, DiskFacts], home_bytes: int, state_bytes: int = 0) -> Iterator[Finding]:
    """``home_bytes``, ``state_bytes``: needed below the directories ``HOME`` and ``STATE``."""
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


def _memory(subject: Subject) -> Iterator[Finding]:
    memory, needed = subject.system.memory, subject.needs.memory_bytes
    free = memory.available + memory.held
    if needed > free:
        own = f", with the {_gb(memory.held)} of the service that runs" if memory.held else ""
        yield Finding("memory", "failed", f"{_gb(needed)} are needed, {_gb(free)} of {_gb(memory.total)} are "
                                          f"available{own}",
                      "give it fewer layers, or all a shorter context or int4, or end what else runs "
                      "there (a desktop: sudo systemctl set-default multi-user.target)")


def _gb(count: int) -> str:
    return f"{count / _GIGA:.2f} GB"


def _ports(subject: Subject) -> Iterator[Finding]:
    for port, (pid, name) in sorted(subject.system.ports.items()):
        holder = f"{name or 'something'} (process {pid})" if pid else "another program"
        yield Finding("port", "failed", f"{port} is taken by {holder}",
                      "end it, or give another port in the cluster file")


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
                                 "give each board once, with its own address and port; containers need an "
                                 "/etc/machine-id each", board=board))
        elif other != board:
            found.append(Finding("machine-id", "failed",
                                 f"it has the machine-id of {other}, as a copied SD card has, so DHCP may "
                                 "give both one address and logs mix them up",
                                 f"run on one of them: {_NEW_MACHINE_ID}", board=board))
    return found


def different_processors(facts: Mapping[str, BoardFacts]) -> list[Finding]:
    """A finding for each board whose processor differs from the most common; "" is an unknown processor."""
    machines = {board: own.system.machine for board, own in facts.items() if own.system.machine}
    known = [*machines.values()]
    usual = max(known, key=known.count, default="")
    return [Finding("machine", "warning", f"{machine}, and others are {usual}",
                    "the wheelhouse needs wheels for both", board=board)
            for board, machine in machines.items() if machine != usual]


CHECKS: tuple[Check, ...] = (
    Check("clock", "warning", _BOARDS, _skew),
    Check("board", "failed", _ALL, _jetpack, ends=True),
    Check("python", "failed", _ALL, _python),
    Check("sudo", "failed", ("init", "up", "bare"), _sudo),
    Check("torch", "failed", ("init", "up", "bare"), _torch),
    Check("systemd", "failed", ("up", "bare"), _systemd),
    Check("clock", "failed", ("up",), _clock),
    Check("disk", "failed", ("up", "bare"), _room),
    Check("memory", "failed", ("up",), _memory),
    Check("port", "failed", ("up",), _ports),
    Check("memory", "warning", _DOCTOR, lambda it: [rules.free_memory(it.board)]),
    Check("gpu memory", "warning", ("init", *_DOCTOR), lambda it: rules.large_pieces(it.board.l4t)),
    Check("swap", "warning", _DOCTOR, lambda it: [rules.swap(it.system)]),
    Check("temperature", "failed", _DOCTOR, lambda it: [rules.temperature(it.board)]),
    Check("power mode", "failed", _DOCTOR, lambda it: rules.power_mode(it.system, it.board, it.power_mode)),
    Check("disk", "warning", _DOCTOR, lambda it: [rules.free_disk(it.system.disks, it.storage)]),
    Check("time", "warning", _DOCTOR, lambda it: [rules.time_service(it.system)]),
    Check("groups", "failed", ("here",), lambda it: rules.own_groups(it.system)),
    Check("groups", "failed", _BOARDS, lambda it: rules.service_groups(it.system)),
    Check("network", "failed", _BOARDS,
          lambda it: [rules.network(it.system, it.address, it.interface, it.wrong)]),
    Check("desktop", "warning", _DOCTOR, lambda it: rules.desktop(it.system)),
    Check("apt hold", "warning", _DOCTOR, lambda it: rules.apt_hold(it.system)),
)
# Of all boards together; their rules take the facts by board.
CHECKS_OF_ALL: tuple[Check, ...] = (
    Check("machine-id", "failed", ("init", "up", *_BOARDS), shared_machine_ids),
    Check("machine", "warning", ("up",), different_processors),
)


@dataclass(frozen=True)
class PreflightReport:
    """``facts`` by board; a board that cannot be reached is in ``problems`` only."""

    problems: list[Finding]
    facts: dict[str, BoardFacts]


def preflight(inventory: Inventory, needs: Mapping[str, Needs]) -> PreflightReport:
    """Before a deployment: ask the boards in ``needs`` at once; problems are in the inventory's order."""
    devices = [device for device in inventory.device if device.name in needs]

    def one(device: DeviceEntry) -> BoardFacts | list[Finding]:
        if problem := address_problem(inventory, device):
            return [wrong_address(device, problem)]
        try:
            return ask_system(inventory, device, needs[device.name].ports)
        except FlowspecError as error:
            return [no_facts(device, error)]

    told = dict(zip((device.name for device in devices), on_each(one, devices), strict=True))
    facts = {name: one for name, one in told.items() if isinstance(one, BoardFacts)}
    found: list[Finding] = []
    for device in devices:
        one_board = told[device.name]
        found += one_board if isinstance(one_board, list) else (
            replace(finding, board=device.name)
            for finding in faults("up", Subject.of(inventory, device, one_board, needs[device.name])))
    return PreflightReport([*found, *judge_together("up", facts)], facts)


def room_problems(found: PreflightReport, needs: Mapping[str, Needs], digests: Mapping[str, str],
                  missing: Mapping[str, int]) -> list[Finding]:
    """Of boards without room for the environment with this digest and the part's missing bytes."""
    problems = []
    for board, digest in digests.items():
        facts = found.facts[board].system
        home_bytes = 0 if digest in facts.environments else needs[board].home_bytes
        problems += [replace(problem, board=board)
                     for problem in judge_room(facts.disks, home_bytes, missing[board])]
    return problems
