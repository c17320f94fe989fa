"""The checks of boards, machines and GPUs: what each asks, how bad its findings can be, and who shows them.

`deploy init`, `deploy plan`, `deploy up`, `deploy status` and the doctor go through one list, so that they judge
alike; begin with ``CHECKS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeVar

from flowspec_edge.boards.commands import on_each
from flowspec_edge.boards.gpu_check.computations import Computation, ComputationResult, compute
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.boards.links.addresses import address_problem
from flowspec_edge.boards.links.between import LinkRate
from flowspec_edge.boards.paths import HOME, STATE
from flowspec_edge.boards.probe import compute_rules as computing
from flowspec_edge.boards.probe import service_rules as services
from flowspec_edge.boards.probe import system_rules as rules
from flowspec_edge.boards.probe.board import BoardInfo, board_of
from flowspec_edge.boards.probe.compute_rules import BNB, FULL, IN_4_BITS, ComputeDevice, computed, report_only
from flowspec_edge.boards.probe.facts import BoardFacts, DiskFacts, SystemFacts, ask_system
from flowspec_edge.boards.probe.findings import Finding, State, no_facts, wrong_address
from flowspec_edge.boards.probe.service_rules import BoardPart, ReleaseOnBoard
from flowspec_edge.boards.probe.software import judge_docker, judge_jetpack, judge_torch, python_fault
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.jetson import jetpack_of

MAX_CLOCK_SKEW_S = 30.0  # of a deployment
_MAX_SKEW_S = 1.0  # beyond it, the logs of two boards cannot be correlated
_MIN_SYSTEMD = 247  # LoadCredential=
_GIGA = 1e9
_SHAPE = (1024, 1024)
_ROWS = (1, 4, 16, 17, 64)  # plain decoding, a small tree, a segment, one row more, a prefill's
_MACHINE_ID = re.compile("[0-9a-f]{32}")  # during the first boot it may be "uninitialized" or empty
# systemd-machine-id-setup takes D-Bus's number, where there is one.
_NEW_MACHINE_ID = ("sudo rm -f /etc/machine-id /var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo "
                   "reboot")


@dataclass(frozen=True)
class Needs:
    """What a deployment needs on one board.

    home_bytes  below /opt/flowspec, if the environment is missing: environment and release
    dtype       of the weights that a stage multiplies: fp16, int4, …
    image       that it is to run; None: an environment
    """

    home_bytes: int = 0
    memory_bytes: int = 0
    ports: tuple[int, ...] = ()
    dtype: str = ""
    image: Image | None = None


@dataclass(frozen=True)
class Subject:
    """A board to be judged, and what is wanted of it.

    python      the board's interpreter, as the cluster file names it
    storage     where releases and shards will lie; "": the fullest of the disks
    power_mode  that the cluster file asks for, by name; "": any
    address     the board's IPv4 address, as seen from this machine; ``interface``: the cluster file's
    wrong       why other boards cannot use the address (``addresses.address_problem``)
    absent      a directory that was named as storage, and is none
    in_image    whether flowspec runs in an image, so that the board needs Docker and no torch
    shaping     why the board cannot shape its link; "" if it can; None if the doctor did not try it there
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
    absent: str = ""
    shaping: str | None = None
    in_image: bool = False

    @classmethod
    def from_facts(cls, inventory: Inventory, device: DeviceEntry, facts: BoardFacts, needs: Needs = Needs(),
                   storage: str = "", shaping: str | None = None) -> Subject:
        return cls(facts, inventory.cluster.board_python, inventory.torch_device(device), needs, storage,
                   inventory.power_mode(device), resolve(device), inventory.interface(device),
                   address_problem(inventory, device), shaping=shaping, in_image=inventory.cluster.in_image)

    @property
    def system(self) -> SystemFacts:
        return self.facts.system

    @cached_property
    def board(self) -> BoardInfo:
        return board_of(self.facts.system)


@dataclass(frozen=True)
class AllBoards:
    """The facts of all boards of a cluster, by name; a finding about one of them names it."""

    facts: Mapping[str, BoardFacts]


@dataclass(frozen=True)
class Room:
    """What is needed below the directories ``HOME``, ``STATE`` and Docker's ``root`` of a board's disks, in bytes."""

    disks: Mapping[str, DiskFacts]
    home_bytes: int
    state_bytes: int = 0
    root: str = ""
    root_bytes: int = 0


# Who shows a finding.  up: `deploy plan` and `up`; bare, installed, here: the doctor, of a board without a
# release, of one with it, and of the machine that it runs on; release: the doctor, from the release that a
# machine has; device, products, operations, tokens: the groups of `doctor --gpu`.
CheckScope = Literal["init", "up", "status", "bare", "installed", "here", "release",
                     "device", "products", "operations", "tokens"]
_BOARDS: tuple[CheckScope, ...] = ("bare", "installed")
_DOCTOR: tuple[CheckScope, ...] = (*_BOARDS, "here")
_ALL: tuple[CheckScope, ...] = ("init", "up", *_DOCTOR)
_Subject = TypeVar("_Subject")


@dataclass(frozen=True)
class Check(Generic[_Subject]):
    """A check, whose ``rule`` yields findings about what is asked.

    "ok" is among the findings, and none of them is worse than ``severity``.

    name      of its findings, unless the rule gives several
    asks      the type of the facts that the rule takes
    ends      whether `deploy init` and `up` say nothing else of the board if this one fails
    computes  for a ``ComputeDevice``: what is to be computed before the rule finds its ``results``
    """

    name: str
    asks: type[_Subject]
    severity: State
    scopes: tuple[CheckScope, ...]
    rule: Callable[[_Subject], Iterable[Finding]]
    ends: bool = False
    computes: Callable[[_Subject], Sequence[Computation]] = lambda subject: ()


def judge(scope: CheckScope, subject: object, checks: Sequence[Check[Any]] | None = None) -> list[Finding]:
    """Return what the checks of one scope find, in the order of ``CHECKS``; causes come before their consequences.

    checks  others than ``CHECKS``

    Checks that compute run their computations together first.
    """
    applicable = [check for check in (CHECKS if checks is None else checks)
                  if scope in check.scopes and isinstance(subject, check.asks)]
    if isinstance(subject, ComputeDevice):
        computations = [computation for check in applicable for computation in check.computes(subject)]
        subject = replace(subject, results=compute(computations))
    findings: list[Finding] = []
    for check in applicable:
        check_findings = list(check.rule(subject))
        findings += check_findings
        if check.ends and scope in ("init", "up") and any(finding.state == "failed" for finding in check_findings):
            break
    return findings


def faults(scope: CheckScope, subject: object) -> list[Finding]:
    """Return what failed, and what is worth knowing."""
    return [finding for finding in judge(scope, subject) if finding.state in ("failed", "warning")]


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
    if subject.in_image:
        return
    if python_fault(system, subject.python):
        return  # a torch for that Python is of no use
    findings = list(judge_torch(torch, subject.python, subject.board.l4t, subject.torch_device,
                                subject.needs.dtype, busy=system.memory.held > 0))
    if all(finding.check != "torch" for finding in findings):
        capability = ".".join(map(str, torch.cuda or ()))
        gpu_text = f"sees the GPU (compute capability {capability})" if capability else "sees no GPU"
        yield Finding("torch", "ok", f"{torch.version}, which {gpu_text}, {torch.file}")
    yield from findings


def _docker(subject: Subject) -> Iterator[Finding]:
    if subject.in_image:
        yield from judge_docker(subject.system, subject.needs.image, subject.torch_device)


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
    """Compare the board's clock with this machine's.

    `deploy up` sets a clock that NTP does not keep; if NTP keeps both, one of the two is wrong.
    """
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
    skew = f"{ahead:+.2f} s against this machine's, ± {within:.2f}"
    if abs(ahead) - within > _MAX_SKEW_S:
        yield Finding("clock", "warning", skew,
                      "sudo timedatectl set-ntp true, on both; without internet see the check of the time")
    else:
        yield Finding("clock", "ok", skew)


def _room(subject: Subject) -> Iterator[Finding]:
    """Judge the room for a deployment without the model's part.

    Whether an existing environment is the right one is known once the wheels are built: ``room_problems`` asks about
    both.
    """
    home_bytes = 0 if subject.system.environments and not subject.in_image else subject.needs.home_bytes
    yield from _enough_room(_room_for(subject.system, subject.needs, home_bytes))


def _room_for(system: SystemFacts, needs: Needs, home_bytes: int, state_bytes: int = 0) -> Room:
    """Return the room that is needed on a board.

    An image's archive lies on the disk until Docker has unpacked it, which takes as much again.
    """
    if needs.image is None:
        return Room(system.disks, home_bytes, state_bytes)
    size = 0 if needs.image.tag in system.docker.images else needs.image.size
    return Room(system.disks, size, state_bytes, system.docker.root, size)


def _enough_room(space: Room) -> Iterator[Finding]:
    disks = space.disks
    on: dict[int, list[str]] = {}
    for path, disk in disks.items():
        on.setdefault(disk.device, []).append(path)
        if not disk.writable:
            yield Finding("disk", "failed", f"{path} is on a file system that is mounted read-only",
                          "see dmesg; sudo mount -o remount,rw, once the disk is sound")
    needed_bytes = {space.root: space.root_bytes, HOME: space.home_bytes, STATE: space.state_bytes}
    for paths in on.values():
        needed_sum, free = sum(needed_bytes.get(path, 0) for path in paths), disks[paths[0]].free
        if needed_sum > free:
            need_text = f"{' and '.join(paths)} need{'s' if len(paths) == 1 else ''}"
            yield Finding("disk", "failed", f"{need_text} {_gb(needed_sum)}, {_gb(free)} are free",
                          "make room, or mount a larger disk there")


def _memory(subject: Subject) -> Iterator[Finding]:
    memory, needed_memory = subject.system.memory, subject.needs.memory_bytes
    free = memory.available + memory.held
    if needed_memory > free:
        service_part = f", with the {_gb(memory.held)} of the service that runs" if memory.held else ""
        yield Finding("memory", "failed", f"{_gb(needed_memory)} are needed, {_gb(free)} of {_gb(memory.total)} are "
                                          f"available{service_part}",
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
    """Return a problem for each board that has the machine-id of a board before it.

    If the running kernel is the same, too, both are one machine; if not, one system is a copy of the other.
    """
    findings: list[Finding] = []
    first_boards: dict[str, tuple[str, str]] = {}  # machine-id → board, its kernel's boot id
    for board, board_facts in facts.items():
        machine = board_facts.system.files.get("etc/machine-id", "").strip()
        boot = board_facts.system.files.get("proc/sys/kernel/random/boot_id", "").strip()
        if not _MACHINE_ID.fullmatch(machine):
            continue
        other, other_boot = first_boards.setdefault(machine, (board, boot))
        if other != board and boot == other_boot:
            findings.append(Finding("machine-id", "failed", f"it is the same machine as {other}",
                                    "give each board once, with its own address and port; containers need an "
                                    "/etc/machine-id each", board=board))
        elif other != board:
            findings.append(Finding("machine-id", "failed",
                                    f"it has the machine-id of {other}, as a copied SD card has, so DHCP may "
                                    "give both one address and logs mix them up",
                                    f"run on one of them: {_NEW_MACHINE_ID}", board=board))
    return findings


def different_processors(facts: Mapping[str, BoardFacts]) -> list[Finding]:
    """Return a finding for each board whose processor differs from the most common; "" is an unknown processor."""
    architectures = {board: board_facts.system.machine for board, board_facts in facts.items()
                     if board_facts.system.machine}
    names = [*architectures.values()]
    usual = max(names, key=names.count, default="")
    return [Finding("machine", "warning", f"{architecture}, and others are {usual}",
                    "the wheelhouse needs wheels for both", board=board)
            for board, architecture in architectures.items() if architecture != usual]


def result_check(scope: CheckScope, name: str, rule: Callable[[ComputeDevice, ComputationResult], Finding],
                  computes: Callable[[ComputeDevice], Sequence[Computation]]) -> Check[ComputeDevice]:
    """Make a check that judges one result.

    computes  the computation ``name``, or nothing where the check does not apply
    """
    def judged(device: ComputeDevice) -> list[Finding]:
        return [rule(device, device.results[name])] if name in device.results else []

    return Check(name, ComputeDevice, "failed", (scope,), judged, computes=computes)


def _computed(scope: CheckScope, name: str, function: str,
              rule: Callable[[ComputationResult], Finding] = computed, cuda: bool = False, **arguments: Any
              ) -> Check[ComputeDevice]:
    """Make a check that judges the result of one function of ``gpu_check``.

    function   "module:function"; it takes the device's name and ``arguments``
    cuda       whether it is about GPUs alone
    """
    return result_check(scope, name, lambda compute_device, result: rule(result), lambda compute_device: [
        Computation(name, f"flowspec_edge.boards.gpu_check.{function}", {"device": compute_device.name, **arguments})
    ] if compute_device.on_gpu or not cuda else [])


def _operation(name: str, function: str, **arguments: Any) -> Check[ComputeDevice]:
    return _computed("operations", name, f"operation_check:{function}", **arguments)


def _product(kind: str, dtype: str) -> Check[ComputeDevice]:
    """Make the check of a product with weights of ``kind``; ``dtype``: activations of kinds in 4 bits."""
    name = kind if kind in FULL else f"{kind}, {dtype} activations"
    return result_check("products", name, partial(computing.advised_product, kind=kind), lambda compute_device: [
        computing.product(name, kind, compute_device.name, _SHAPE, _ROWS, dtype)
    ] if compute_device.bitsandbytes or kind not in BNB else [])


CHECKS: tuple[Check[Any], ...] = (
    Check("flowspec", ReleaseOnBoard, "failed", _BOARDS, lambda release: [services.release(release)]),
    Check("clock", Subject, "warning", _BOARDS, _skew),
    Check("board", Subject, "failed", _ALL, _jetpack, ends=True),
    Check("python", Subject, "failed", _ALL, _python),
    Check("sudo", Subject, "failed", ("init", "up", "bare"), _sudo),
    Check("torch", Subject, "failed", ("init", "up", "bare"), _torch),
    Check("docker", Subject, "failed", ("init", "up", *_BOARDS), _docker),
    Check("systemd", Subject, "failed", ("up", "bare"), _systemd),
    Check("clock", Subject, "failed", ("up",), _clock),
    Check("disk", Subject, "failed", ("up", "bare"), _room),
    Check("disk", Room, "failed", ("up",), _enough_room),
    Check("memory", Subject, "failed", ("up",), _memory),
    Check("port", Subject, "failed", ("up",), _ports),
    Check("memory", Subject, "warning", _DOCTOR, lambda subject: [rules.free_memory(subject.board)]),
    Check("gpu memory", Subject, "warning", ("init", *_DOCTOR), lambda subject: rules.large_pieces(subject.board.l4t)),
    Check("swap", Subject, "warning", _DOCTOR, lambda subject: [rules.swap(subject.system)]),
    Check("temperature", Subject, "failed", _DOCTOR, lambda subject: [rules.temperature(subject.board)]),
    Check("power mode", Subject, "failed", _DOCTOR,
          lambda subject: rules.power_mode(subject.system, subject.board, subject.power_mode)),
    Check("disk", Subject, "failed", _DOCTOR,
          lambda subject: [rules.free_disk(subject.system.disks, subject.storage, subject.absent)]),
    Check("time", Subject, "warning", _DOCTOR, lambda subject: [rules.time_service(subject.system)]),
    Check("groups", Subject, "failed", ("here",), lambda subject: rules.process_groups(subject.system)),
    Check("groups", Subject, "failed", _BOARDS, lambda subject: rules.service_groups(subject.system)),
    Check("network", Subject, "failed", _BOARDS,
          lambda subject: [rules.network(subject.system, subject.address, subject.interface, subject.wrong)]),
    Check("desktop", Subject, "warning", _DOCTOR, lambda subject: rules.desktop(subject.system)),
    Check("apt hold", Subject, "warning", _DOCTOR, lambda subject: rules.apt_hold(subject.system)),
    Check("link shaping", Subject, "ok", _BOARDS, lambda subject: rules.shaping(subject.shaping)),
    Check("machine-id", AllBoards, "failed", ("init", "up", *_BOARDS), lambda boards: shared_machine_ids(boards.facts)),
    Check("machine", AllBoards, "warning", ("up",), lambda boards: different_processors(boards.facts)),
    Check("service", AllBoards, "failed", ("status",), lambda boards: services.services(boards.facts)),
    Check("release", AllBoards, "failed", ("status",), lambda boards: services.releases(boards.facts)),
    Check("ready", AllBoards, "failed", ("status",), lambda boards: services.ready(boards.facts)),
    Check("model", BoardPart, "failed", _BOARDS, lambda part: [services.model(part)]),
    Check("draft device", BoardPart, "warning", _BOARDS, services.draft_device),
    Check("link", LinkRate, "failed", _BOARDS, lambda measured: [rules.link(measured)]),
    Check("flowspec", ComputeDevice, "ok", ("release",), computing.installed),
    Check("torch", ComputeDevice, "failed", ("release",), computing.libraries),
    Check("product", ComputeDevice, "failed", ("release",), computing.right_product,
          computes=computing.full_product),
    Check("4 bits", ComputeDevice, "warning", ("release",), computing.in_4_bits,
          computes=computing.products_in_4_bits),
    Check("encryption", ComputeDevice, "failed", ("release",), computing.encryption),
    *(_computed("device", f"attention {dtype}", "gpu_facts:attention", dtype=dtype) for dtype in FULL),
    _computed("device", "rms_norm", "gpu_facts:rms_norm"),
    _computed("device", "launch", "gpu_facts:launch"),
    # Whether graphs work is for the operations to judge.
    _computed("device", "launch in a graph", "gpu_facts:launch_in_graph", report_only, cuda=True),
    _computed("device", "layers in graphs", "gpu_facts:layers_in_graphs", cuda=True),
    _computed("device", "draft passes in graphs", "gpu_facts:draft_passes_in_graphs", cuda=True),
    Check("free memory", ComputeDevice, "unknown", ("device",), lambda device: [computing.free_memory(device)]),
    Check("largest piece", ComputeDevice, "failed", ("device",), computing.largest_piece,
          computes=computing.pieces),
    Check("gpu memory", ComputeDevice, "warning", ("device",), computing.refusing_release),
    Check("allocator", ComputeDevice, "failed", ("device",), computing.allocator),
    *(_product(kind, "fp16") for kind in (*FULL, *IN_4_BITS)),
    *(_product(kind, "bf16") for kind in IN_4_BITS),
    Check("bitsandbytes", ComputeDevice, "skipped", ("products",), computing.without_bitsandbytes),
    *(_operation(f"{name} {dtype}", name, dtype=dtype) for name in ("sdpa", "rms_norm") for dtype in FULL),
    _operation("log_softmax", "log_softmax"),
    _operation("topk", "topk"),
    _operation("noise", "noise"),
    _operation("sampling", "sampling"),
    _operation("index_copy", "index_copy"),
    _operation("embedding", "embedding"),
    _operation("pinned copies", "pinned_copies", cuda=True),
    _operation("events", "events", cuda=True),
    _operation("graph", "graph", cuda=True),
)


@dataclass(frozen=True)
class PreflightReport:
    """What was found before a deployment.

    ``facts`` are by board; a board that cannot be reached is in ``problems`` only.
    """

    problems: list[Finding]
    facts: dict[str, BoardFacts]


def preflight(inventory: Inventory, needs: Mapping[str, Needs]) -> PreflightReport:
    """Ask the boards in ``needs`` at once, before a deployment; problems are in the inventory's order."""
    devices = [device for device in inventory.device if device.name in needs]

    def check_board(device: DeviceEntry) -> BoardFacts | list[Finding]:
        if problem := address_problem(inventory, device):
            return [wrong_address(device, problem)]
        try:
            return ask_system(inventory, device, needs[device.name].ports)
        except FlowspecError as error:
            return [no_facts(device, error)]

    answers = dict(zip((device.name for device in devices), on_each(check_board, devices), strict=True))
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, BoardFacts)}
    findings: list[Finding] = []
    for device in devices:
        answer = answers[device.name]
        findings += answer if isinstance(answer, list) else (
            replace(finding, board=device.name)
            for finding in faults("up", Subject.from_facts(inventory, device, answer, needs[device.name])))
    return PreflightReport([*findings, *judge("up", AllBoards(facts))], facts)


def room_problems(report: PreflightReport, needs: Mapping[str, Needs], digests: Mapping[str, str],
                  missing: Mapping[str, int]) -> list[Finding]:
    """Return the problems of boards without room for the environment and the missing part.

    digests  of the boards' environments
    missing  bytes of the boards' parts
    """
    problems = []
    for board, digest in digests.items():
        facts = report.facts[board].system
        home_bytes = 0 if digest in facts.environments else needs[board].home_bytes
        problems += [replace(problem, board=board)
                     for problem in judge("up", _room_for(facts, needs[board], home_bytes, missing[board]))]
    return problems
