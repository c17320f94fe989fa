"""Asks a board over ssh, in its own Python (``onboard``), and checks the answer.

All commands use it, so that they judge the same facts.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from pydantic import TypeAdapter

from flowspec_edge import errors
from flowspec_edge.boards import paths
from flowspec_edge.boards.commands import runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.boards.paths import HOME, STATE, VERIFY_UNIT
from flowspec_edge.boards.probe.onboard import deployment, service, system, tools, torch_check
from flowspec_edge.boards.transfer import store
from flowspec_edge.drivers.observe import power_rails as rails
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util import files, interfaces, interpreter, procfs
from flowspec_edge.util.jetson import power_rails
from flowspec_edge.util.resources import resource_dir

User = Literal["any", "root if possible", "root"]

# What is sent for each section, in the order of their imports; time limits in seconds, and who runs it.
_MODULES: Mapping[str, tuple[ModuleType, ...]] = {
    "service": (paths, rails, tools, service),
    "system": (errors, paths, interfaces, procfs, interpreter, tools, system),
    "deployment": (errors, files, paths, store, tools, deployment)}
_TIMEOUT_S = {"service": 60.0, "system": 120.0, "deployment": 300.0}  # system: without torch
_USERS: Mapping[str, User] = {"service": "any", "system": "root if possible", "deployment": "root"}
# Arguments: who runs it, the interpreter, the time limit.  sudo may look up the board's own name.
_START = r"""now=$(date +%s.%N) limit=$3
command -v "$2" >/dev/null || { echo '{"python": null}'; exit; }
[ "$(id -u)" = 0 ] || printf '\03640 try sudo\n' >&2
case $1 in
any) set -- "$2" ;;
root) if [ "$(id -u)" = 0 ]; then set -- "$2"; else set -- sudo -n -- "$2"; fi ;;
*) if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then set -- sudo -n -- "$2"; else set -- "$2"; fi ;;
esac
printf '\036%s start %s\n' "$limit" "$*" >&2
exec "$@" -I - "$now"
"""
# Prefixes of the unit settings that sandbox a service.
_PROTECTIONS = ("AmbientCapabilities", "CapabilityBoundingSet", "Device", "Limit", "LockPersonality",
                "MemoryDenyWriteExecute", "NoNewPrivileges", "Private", "Protect", "Restrict", "SystemCall",
                "UMask")


class NoAnswer(FlowspecError):
    """The error for a board that can be reached, and whose Python does not answer."""

    def __init__(self, device: DeviceEntry, reason: str, advice: str) -> None:
        super().__init__(f"{device.name}: {reason}: {advice}")
        self.reason, self.advice = reason, advice


@dataclass(frozen=True)
class TorchFacts:
    """The board's torch; ``torch_check.check_torch`` and ``system.torch`` describe the fields."""

    version: str = ""
    file: str = ""
    build: str = ""
    numpy: str = ""
    cuda: tuple[int, int] | None = None
    built_for: str | None = None
    gpu: str = ""
    why: str = ""
    numpy_fault: str = ""
    gpu_fault: str = ""
    unit: str = ""
    outside: TorchFacts | None = None
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SystemdFacts:
    version: int = 0
    runs: bool = False


@dataclass(frozen=True)
class LinkFacts:
    wireless: bool = False
    mbps: int | None = None  # negotiated; None on loopback
    dynamic: bool = False  # the address is leased (DHCP)


@dataclass(frozen=True)
class DiskFacts:
    device: int = 0
    free: int = 0  # bytes
    writable: bool = True


@dataclass(frozen=True)
class MemoryFacts:
    """The board's memory in bytes; ``held``: by flowspec's own services."""

    total: int = 0
    available: int = 0
    held: int = 0


@dataclass(frozen=True)
class DockerFacts:
    """The board's Docker; the defaults are those of a board that was not asked.

    ``onboard.system.docker`` describes the fields.
    """

    version: str = ""
    why: str = ""
    runtimes: Sequence[str] = ()
    root: str = ""
    group: bool = False
    images: Sequence[str] = ()


@dataclass(frozen=True)
class SystemFacts:
    """What a board's system says; the defaults are those of a board that does not say."""

    files: Mapping[str, str] = field(default_factory=dict)  # ``system.FILES``: path below / -> content
    nvpmodel: str = ""  # what nvpmodel -q prints
    timedatectl: str = ""  # what timedatectl show prints
    ntp: str = "unknown"  # whether NTP keeps the clock: yes, no, unknown
    python: tuple[int, ...] = ()
    systemd: SystemdFacts = SystemdFacts()
    gpu: bool = False  # the system has an NVIDIA GPU, whether or not torch sees it
    desktop: bool = False
    packages: Mapping[str, bool] = field(default_factory=dict)  # of L4T -> whether apt holds it
    environments: Sequence[str] = ()  # digests of the complete ones
    links: Mapping[str, LinkFacts] = field(default_factory=dict)
    disks: Mapping[str, DiskFacts] = field(default_factory=dict)  # by the path that was asked for
    memory: MemoryFacts = MemoryFacts()
    hostname: str = ""
    user: str = ""
    sudo: str = ""  # why this user cannot become root without a password
    machine: str = ""  # architecture
    torch: TorchFacts = TorchFacts()
    docker: DockerFacts = DockerFacts()
    interface: str = ""  # the one that has the board's address
    ports: Mapping[int, tuple[int | None, str]] = field(default_factory=dict)  # taken -> pid, program


@dataclass(frozen=True)
class Installed:
    """A release on a board: what its release.json says, and whether its pipeline has produced a token."""

    id: str
    role: str  # "draft" or "verify"
    stage: int  # 0 for the draft device
    model: str = ""  # its manifest's request
    environment: str = ""
    public_key: str = ""  # of the pair that it needs; "" if an older flowspec deployed it
    tried: bool = True  # only the draft device's may be False

    @property
    def unit(self) -> str:
        return paths.unit_of(self.role, self.stage)


@dataclass(frozen=True)
class BoardStatus:
    """The state of a board's service, from the section "service", and why there is none."""

    name: str = ""
    current: Installed | None = None
    previous: Installed | None = None
    state: str = "unknown"  # systemd's: active, failed, …; "absent" without a release
    since: str = ""  # when the unit became active, as systemd prints it
    restarts: int = 0
    status: str = ""
    said: str = ""  # last line of the unit's log, if it failed or is not active yet
    ready: bool | None = None
    reason: str = ""
    error: str = ""  # why the board could not be asked
    unreached: bool = False  # the error is that of ssh, or the board hangs
    going_back: str = ""  # the release of a rollback that has switched this board, and not ended
    watts: float | None = None  # from the board's own sensor; None without one

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``deploy status --json``, which are stable."""
        release = self.current
        return {"name": self.name, "role": release.role if release else None,
                "stage": release.stage if release else None,
                "reachable": not self.error, "release": release.id if release else None,
                "previous": self.previous.id if self.previous else None, "unit": release.unit if release else None,
                "state": self.state, "since": self.since, "restarts": self.restarts, "status": self.status,
                "watts": self.watts,
                "error": self.error or self.said}


@dataclass(frozen=True)
class ReleaseFacts:
    files: Mapping[str, str]  # path -> sha256
    venv: str = ""  # target of the link to the environment


@dataclass(frozen=True)
class ServiceFacts:
    active: bool = False
    enabled: bool = False  # starts at boot
    release: str = ""  # the directory that its process was started in


@dataclass(frozen=True)
class BoardFacts:
    """What a board told.

    The defaults are those of a bare board, and of sections that were not asked for.
    """

    ahead: float = 0.0  # s, the board's clock minus this machine's
    within: float = 0.0  # s, error bound of ahead
    system: SystemFacts = SystemFacts()
    running: BoardStatus = BoardStatus()
    # The section "deployment".
    ntp: str = "unknown"  # whether NTP keeps the clock
    groups: Sequence[str] = ()  # all groups on the board
    user: Mapping[str, Any] | None = None  # home, shell and groups of the services' user
    modes: Mapping[str, str | None] = field(default_factory=dict)  # path -> "755 root" or None
    venvs: Mapping[str, bool] = field(default_factory=dict)  # digest -> whether it is complete
    venv_images: Mapping[str, str] = field(default_factory=dict)  # digest -> tag of the image that it runs
    images: Sequence[str] = ()  # tags of flowspec's images in Docker
    wheels: Mapping[str, str] = field(default_factory=dict)  # name -> sha256; empty if the venv is complete
    releases: Mapping[str, ReleaseFacts] = field(default_factory=dict)  # by id, the newest first
    current: str = ""  # link targets
    previous: str = ""
    units: Mapping[str, str] = field(default_factory=dict)  # installed unit file -> sha256
    services: Mapping[str, ServiceFacts] = field(default_factory=dict)  # running, failed or enabled
    publics: Sequence[str] = ()  # the public keys of its pairs, the newest last
    client_key: bool = False  # the API key exists
    parts: Sequence[str] = ()  # "MODEL/PART"
    missing_bytes: int = 0  # of the wanted part
    part_changes: bool = False  # a transfer of the wanted part would change something
    power_modes: str = ""  # /etc/nvpmodel.conf
    power_number: str = ""  # of the current mode
    power_kept: bool = False  # the original mode is saved
    power_unit_installed: bool = False
    power_unit_runs: bool = False  # enabled and active


_FACTS = TypeAdapter(BoardFacts)


def ask_system(inventory: Inventory, device: DeviceEntry, ports: Collection[int] = (),
               directories: Sequence[str] = (HOME, STATE)) -> BoardFacts:
    """Ask a board for its system.

    directories  that will be written to
    ports        that will be listened on
    """
    in_image = inventory.cluster.in_image
    return _ask(inventory, device, "system", address=resolve(device), paths=list(directories), ports=sorted(ports),
                torch_check=None if in_image else torch_check_program(inventory.torch_device(device)))


def ask_service(inventory: Inventory, device: DeviceEntry) -> BoardFacts:
    cluster = inventory.cluster
    return _ask(inventory, device, "service", host=cluster.serve_address, port=cluster.serve_port,
                rails=[*power_rails()])


def ask_deployment(inventory: Inventory, device: DeviceEntry, environment: str = "",
                   part: Sequence[Any] | None = None, others: str = "") -> BoardFacts:
    """Ask a board for what is deployed on it; the arguments are those of ``onboard.deployment.facts``."""
    return _ask(inventory, device, "deployment", environment=environment, part=part, others=others,
                in_image=inventory.cluster.in_image)


def _ask(inventory: Inventory, device: DeviceEntry, section: str, **arguments: Any) -> BoardFacts:
    """Ask a board's Python for one section of its facts.

    Raise NoAnswer if the board's Python is none.  Raise FlowspecError, or Unreached for ssh's errors, if it cannot be
    run.
    """
    python = inventory.cluster.board_python
    runner = runner_for(inventory, device, _TIMEOUT_S[section])
    before = time.time()
    stdout = runner.run(["sh", "-c", _START, "sh", _USERS[section], python, f"{_TIMEOUT_S[section]:g}"],
                        program(section, **arguments))
    after = time.time()
    try:
        answer = json.loads(next(line for line in stdout.splitlines() if line.startswith("{")))
        if answer.get("python", "") is None:
            raise NoAnswer(device, f"there is no {python}",
                           "sudo apt-get install python3, or see board_python in the cluster file")
        return parse(answer, before, after)
    except (ValueError, LookupError, TypeError, StopIteration):
        raise NoAnswer(device, f"{python} gave no answer",
                       "see whether board_python in the cluster file is a Python") from None


def program(section: str, **arguments: Any) -> str:
    """Return the text that a board's Python runs."""
    return interpreter.modules_program(_MODULES[section], tools, f"answer({ {section: arguments}!r})")


def parse(answer: dict[str, Any], before: float, after: float) -> BoardFacts:
    """Read the facts in a board's answer.

    before, after  times here around the question

    Raise ValueError, LookupError or TypeError if the answer is none of ``tools.answer``'s.
    """
    slack = max(0.0, after - before - answer["seconds"])
    return _FACTS.validate_python({
        **answer.get("deployment", {}), "system": answer.get("system", {}), "running": answer.get("service", {}),
        "ahead": answer["time"] - (before + slack / 2), "within": slack / 2})


def system_facts(answer: Mapping[str, Any]) -> SystemFacts:
    """Read ``answer``, which the section "system" returned; raise ValueError if it is something else."""
    return _FACTS.validate_python({"system": answer}).system


def torch_check_program(torch_device: str) -> dict[str, Any]:
    """Return the argument of ``system.torch``."""
    return {"program": f"{inspect.getsource(torch_check)}\n\nmain({torch_device!r})\n",
            "device": torch_device, "protections": protections()}


def protections() -> list[str]:
    """Return the sandboxing lines of a stage's unit, such as "ProtectHome=yes"."""
    text = (resource_dir("deploy") / "units" / VERIFY_UNIT).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith(_PROTECTIONS)]
