"""Discovers bare boards over ssh and writes their first cluster.toml, for `flowspec deploy init`."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from flowspec_edge.boards import paths as places
from flowspec_edge.boards.commands import on_each
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.boards.links.addresses import address_problem, on_network
from flowspec_edge.boards.probe.board import BoardInfo, board_of, mode_numbers
from flowspec_edge.boards.probe.checks import AllBoards, Subject, faults, judge
from flowspec_edge.boards.probe.facts import BoardFacts, SystemFacts, ask_system
from flowspec_edge.boards.probe.findings import Finding, no_facts
from flowspec_edge.device_profile import load_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.util.jetson import jetpack_of
from flowspec_edge.util.tomlfile import with_key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
_TARGET = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>[^:@]+)(?::(?P<port>\d{1,5}))?")
# (L4T's name for a board, the profiles that may fit, the one of a faster power mode first).
_PROFILES = (("Orin Nano", ("orin-nano-8gb-super", "orin-nano-8gb")), ("Orin NX", ("orin-nx-16gb",)),
             ("AGX Orin", ("agx-orin-64gb",)), ("Thor", ("thor-t5000",)))
_FAST_MODES = re.compile(r"SUPER|25W")
_SAME_MEMORY = 0.1  # boards of one name come with several sizes, half or twice as large


@dataclass(frozen=True)
class DiscoveredBoard:
    """A board as its probe describes it.

    device     named by the board's host name, or by the address if that is no valid name
    interface  the network interface that has the address; "" if unknown
    torch      version of the torch of the board's own python3; None without one
    cuda       whether that torch sees a GPU
    problem    why the installed torch cannot be imported; else ""
    faults     the problems of `deploy up`'s preflight
    gpu        whether the system has an NVIDIA GPU, whether or not torch sees it
    disk_mb    free where releases and shards will lie, 10^6 bytes; None if the board does not say
    profile    the matching profile in the package; "" without one
    docker     the version of its Docker; None if flowspec is to run in no image, and so was not asked for
    """

    device: DeviceEntry
    hostname: str
    arch: str
    board: BoardInfo
    interface: str
    python: str
    torch: str | None
    cuda: bool
    problem: str
    gpu: bool
    modes: tuple[str, ...]
    disk_mb: float | None
    profile: str
    docker: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def torch_device(self) -> str:
        """CUDA on a Jetson, if torch sees a GPU, or if there is a GPU and no torch yet."""
        return "cuda" if self.cuda or self.board.l4t or (self.gpu and self.torch is None) else "cpu"

    def as_json(self) -> dict[str, Any]:
        """Return the fields that ``deploy init --json`` promises."""
        board = self.board
        return {"name": self.device.name, "address": self.device.address, "hostname": self.hostname,
                "machine": board.machine, "arch": self.arch, "l4t": board.l4t, "total_mb": board.total_mb,
                "available_mb": board.available_mb, "disk_mb": self.disk_mb, "interface": self.interface,
                "python": self.python, "torch": self.torch, "cuda": self.cuda, "gpu": self.gpu,
                "torch_device": self.torch_device, "power_mode": board.power_mode,
                "power_modes": list(self.modes), "profile": self.profile, "problem": self.problem,
                "faults": list(self.faults)}


class NotFound(FlowspecError):
    """The boards that do not answer, as findings that say why, and those that do."""

    def __init__(self, silent: list[Finding], boards: list[DiscoveredBoard]) -> None:
        super().__init__("; ".join(map(str, silent)))
        self.silent, self.answered = silent, with_host_names(boards)


def parse_hosts(hosts: Sequence[str], user: str = "", port: int | None = None, key: str = "",
                ssh_config: str = "", image: str = "") -> Inventory:
    """Return an inventory of ``hosts``, each [USER@]HOST[:PORT].

    The other arguments are defaults for ssh, and the image that the boards are to run, if any.

    Raise UsageError for a malformed host, a duplicate, and fewer than two hosts.
    """
    if len(hosts) < 2:
        raise UsageError("a cluster needs two boards at least, one that drafts and one that verifies: give "
                         "more hosts")
    devices: list[DeviceEntry] = []
    for text in hosts:
        parts = _TARGET.fullmatch(text)
        if parts is None:
            raise UsageError(f"{text!r} is not [USER@]HOST[:PORT]")
        host = parts["host"]
        if any(device.address.casefold() == host.casefold() for device in devices):
            raise UsageError(f"{host} is given twice: each board needs an address of its own")
        try:
            devices.append(DeviceEntry(name=host[:63], address=host, ssh_user=parts["user"] or user,
                                       ssh_port=int(parts["port"]) if parts["port"] else port, ssh_key=key))
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UsageError(f"{text}: {message[:1].lower()}{message[1:]}") from error
    cluster = ClusterSettings(name="discover", ssh_config=ssh_config, torch_device="cuda",
                              runtime="image" if image else "environment")
    return Inventory(cluster=cluster, device=devices)


def discover(inventory: Inventory, done: Callable[[str], None] = lambda name: None) -> list[DiscoveredBoard]:
    """Probe all boards concurrently; ``done`` is called with the name of each that has answered.

    A loopback address, as Ubuntu's /etc/hosts gives to a machine's own name, becomes this machine's address
    on the network.

    Raise ``NotFound`` if a board does not answer.  Raise FlowspecError, which names the boards, if some are one machine
    or have one machine-id.  Raise UsageError for addresses that other boards cannot reach.
    """
    inventory = on_network(inventory)
    # The address, with which each problem begins, is all the name that a board has yet.
    if unusable := [problem for device in inventory.device if (problem := address_problem(inventory, device))]:
        advice = "; ".join(dict.fromkeys(advice for _, advice in unusable))
        raise UsageError(f"{'; '.join(reason for reason, _ in unusable)}: {advice}")

    facts: dict[str, BoardFacts] = {}

    def ask(device: DeviceEntry) -> DiscoveredBoard | Finding:
        try:
            facts[device.name] = ask_system(inventory, device)
        except FlowspecError as error:
            return no_facts(device, error, "options")
        done(device.name)
        return board_from_facts(device, facts[device.name].system)

    answers = on_each(ask, inventory.device)
    discovered = [answer for answer in answers if isinstance(answer, DiscoveredBoard)]
    if len(discovered) < len(answers):
        raise NotFound([answer for answer in answers if isinstance(answer, Finding)], discovered)
    if shared_ids := judge("init", AllBoards({device.name: facts[device.name] for device in inventory.device})):
        raise FlowspecError("; ".join(f"{problem.board}: {problem.found}" for problem in shared_ids)
                            + f": {'; '.join(dict.fromkeys(problem.advice for problem in shared_ids))}")
    return with_host_names(discovered)


def require_mode(boards: Sequence[DiscoveredBoard], power_mode: str) -> None:
    """Raise UsageError if a board that has power modes lacks this one."""
    without_mode = [f"{board.device.name} has {', '.join(board.modes)}" for board in boards
                    if power_mode and board.modes and power_mode not in board.modes]
    if without_mode:
        raise UsageError(f"no power mode {power_mode!r}: {'; '.join(without_mode)}")


def board_from_facts(device: DeviceEntry, facts: SystemFacts) -> DiscoveredBoard:
    board, torch, disk = board_of(facts), facts.torch, facts.disks.get(places.HOME)
    absent = torch.why.startswith("ModuleNotFoundError")
    discovered = DiscoveredBoard(
        device=device, hostname=facts.hostname, arch=facts.machine, board=board,
        interface=facts.interface, python=".".join(map(str, facts.python)),
        torch=torch.version or None, cuda=bool(torch.cuda), problem="" if absent else torch.why,
        gpu=facts.gpu or bool(board.l4t), modes=tuple(mode_numbers(facts.files.get("etc/nvpmodel.conf", ""))),
        disk_mb=disk.free / 1e6 if disk else None, profile=profile_of(board),
        docker=facts.docker.version if facts.docker.version or facts.docker.why else None)
    subject = Subject(BoardFacts(system=facts), torch_device=discovered.torch_device,
                      in_image=discovered.docker is not None)
    return replace(discovered, faults=tuple(map(str, faults("init", subject))))


def profile_of(board: BoardInfo) -> str:
    """Return the profile for the board's model, memory and power mode; "" without one."""
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


def with_host_names(boards: list[DiscoveredBoard]) -> list[DiscoveredBoard]:
    """Return the boards renamed by their valid host names, with a number appended to duplicates."""
    used_names = {board.device.name.casefold() for board in boards}
    renamed = []
    for board in boards:
        name, device = board.hostname.partition(".")[0], board.device
        if _NAME.fullmatch(name) and name != "localhost":
            unique = name
            for number in range(2, len(boards) + 2):
                if unique.casefold() == device.name.casefold() or unique.casefold() not in used_names:
                    break
                unique = f"{name}-{number}"
            used_names.add(unique.casefold())
            device = device.model_copy(update={"name": unique})
        renamed.append(replace(board, device=device))
    return renamed


_HEAD = """\
# {name}: {count} boards, as `flowspec deploy init` found them.  What to do next:
#   flowspec doctor --cluster {file}       what the boards still lack
#   flowspec deploy plan --cluster {file}  what would be done, and which board would do what
#   flowspec deploy up --cluster {file}    do it

[cluster]
"""
_RUN = "\n# What the cluster is to run.  Relative paths count from this file's directory.\n"
_SETTINGS = (
    ('model = "demo"', 'a checkpoint\'s directory, a sharded model\'s, or "demo" to try'),
    ('# draft = "eagle-head"', "a draft head's directory, where the model's has none"),
    ('dtype = "auto"', "fp16, bf16, int4, …; auto: as the model is"),
    ("context = 4096", "tokens of all requests' texts together that caches hold"),
    ("# at_once = 2", "requests that share the stages; left out: one per stage, at least 2"),
    (f'strategy = "{DEFAULT_STRATEGY}"', "flowspec strategies lists them"),
    ('# power_mode = "MAXN"', "by name, as in /etc/nvpmodel.conf; left out, it stays as it is"),
    ('# serve_host = "0.0.0.0"', "where the draft device answers; left out: itself alone; else with a key"),
)

_ROLES = {
    "planner": """
# Who drafts and who verifies, in which order and with which layers, the planner decides (role = "auto"), from
# the boards' profiles.  These were not measured here: flowspec device profile does that.
""",
    "all": """
# Every board takes part (--all-boards), whether or not fewer would be faster; {largest} drafts.
""",
    "estimated": """
# Who drafts and who verifies, in which order and with which layers, the planner decides (role = "auto").  For
# {without} flowspec has no profile: the speed there is ESTIMATED from memory_mb and cores.  Measure the
# boards, once flowspec is there: flowspec device profile --cluster {file}
"""}


def render_cluster_toml(boards: Sequence[DiscoveredBoard], name: str, file: str, ssh_config: str = "",
                        cluster_settings: Mapping[str, str] | None = None, all_boards: bool = False) -> str:
    """Return the text of a cluster file for ``boards``.

    cluster_settings  texts for keys of [cluster]
    all_boards        a role for each board
    """
    interface = _most([board.interface for board in boards if board.interface]) or "eth0"
    torch_device = _most([board.torch_device for board in boards])
    shared = [(f"name = {_quoted(name)}", ""),
              (f"interface = {_quoted(interface)}", "that the boards reach one another by"),
              (f"torch_device = {_quoted(torch_device)}",
               "what computes, on stages and on the draft device: cuda or cpu")]
    if ssh_config:
        shared.append((f"ssh_config = {_quoted(ssh_config)}", "for ssh's -F"))
    text = (_HEAD.format(name=name, count=len(boards), file=_printable(shlex.quote(file)))
            + _lines(shared) + _RUN + _lines(_SETTINGS))
    without = [board.device.name for board in boards if not board.profile]
    roles = "all" if all_boards else "estimated" if without else "planner"
    # max takes the first of boards with equal memory, which is the one that the user named first.
    drafts = max(boards, key=lambda board: board.board.total_mb or 0.0) if all_boards else None
    text += _ROLES[roles].format(largest=drafts.device.name if drafts else "", without=", ".join(without),
                                 file=_printable(shlex.quote(file)))
    for board in boards:
        overrides = {"interface": board.interface if board.interface not in ("", interface) else "",
                     "torch_device": board.torch_device if board.torch_device != torch_device else ""}
        role = "auto" if drafts is None else "draft" if board is drafts else "verify"
        text += _device(board, role, overrides)
    for key, value in (cluster_settings or {}).items():
        text = with_key(text, ("cluster",), key, _quoted(value))
    return text


def _lines(settings: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{setting:<30} # {why}\n" if why else f"{setting}\n" for setting, why in settings)


def _device(board: DiscoveredBoard, role: str, overrides: dict[str, str]) -> str:
    device = board.device
    lines = [f"# {_printable(line)}" for line in _about(board)]
    lines += ["[[device]]", f"name = {_quoted(device.name)}", f"address = {_quoted(device.address)}",
              f"role = {_quoted(role)}"]
    if device.ssh_user:
        lines.append(f"ssh_user = {_quoted(device.ssh_user)}")
    if device.ssh_port is not None:
        lines.append(f"ssh_port = {device.ssh_port}")
    if device.ssh_key:
        lines.append(f"ssh_key = {_quoted(device.ssh_key)}")
    lines += [f"{key} = {_quoted(value)}" for key, value in overrides.items() if value]
    if board.profile:
        lines.append(f"profile = {_quoted(board.profile)}  # by its model and memory; not measured here")
    else:
        lines += [f"memory_mb = {board.board.total_mb:.0f}"] if board.board.total_mb else []
        lines += [f"cores = {board.board.cores}"] if board.board.cores else []
    return "\n" + "\n".join(lines) + "\n"


def _about(board: DiscoveredBoard) -> list[str]:
    facts = board.board
    release = jetpack_of(facts.l4t)
    jetpack = f" (JetPack {release.name})" if release else ""
    lines = [", ".join(filter(None, (facts.machine, board.arch, facts.l4t and f"L4T {facts.l4t}{jetpack}")))]
    if facts.total_mb is not None and facts.available_mb is not None:
        disk = "" if board.disk_mb is None else f"; disk {board.disk_mb / 1e3:,.0f} GB free"
        lines.append(f"memory {facts.total_mb:,.0f} MB, {facts.available_mb:,.0f} MB of it free{disk}")
    lines.append(f"Python {board.python}, {describe_software(board)}")
    lines += [f"  → {fault}" for fault in board.faults]
    if facts.power_mode or board.modes:
        modes = f" of {', '.join(board.modes)}" if board.modes else ""
        lines.append(f"power mode {facts.power_mode or 'unknown'}{modes}")
    if not board.interface:
        lines.append(f"  → no interface of it has the address {board.device.address}: see ip -o -4 addr")
    return lines


def describe_software(board: DiscoveredBoard) -> str:
    """Describe the board's torch, or its Docker where an image brings the torch."""
    if board.docker is not None:
        return f"Docker {board.docker}" if board.docker else "no Docker that answers"
    if board.torch is None:
        return "no torch that services could use"
    gpu_text = "sees the GPU" if board.cuda else "sees no GPU"
    return f"torch {board.torch}, which {gpu_text}"


def _most(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0] if values else ""


def _printable(line: str) -> str:
    """Return ``line`` without control characters, which TOML forbids in comments."""
    return "".join(letter if letter.isprintable() else " " for letter in line).rstrip()


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
