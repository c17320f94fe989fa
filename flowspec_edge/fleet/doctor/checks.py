"""The doctor's rules over a machine's facts (``probe.system``), for this machine and for boards."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence

from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.paths import USER
from flowspec_edge.fleet.probe.board import BoardInfo, board_of, l4t_of, mode_numbers
from flowspec_edge.fleet.probe.facts import BoardFacts, DiskFacts, SystemFacts, TorchFacts
from flowspec_edge.fleet.probe.findings import Finding, merged
from flowspec_edge.fleet.probe.onboard.system import GPU_GROUPS
from flowspec_edge.fleet.probe.preflight import Needs, judge
from flowspec_edge.fleet.probe.software import judge_jetpack
from flowspec_edge.util.jetson import jetpack_of, system

_GIGA = 1e9
_MIN_DISK_GB = 10.0  # two environments take 1, a shard of a 13B model in 4 bits 3
_MIN_FREE_SHARE = 0.6  # of a board's memory; a desktop takes about a tenth of an 8 GB board
_MIN_MBPS = 1000
_WARM_C, _HOT_C = 80.0, 95.0  # Orin modules throttle from about 95 °C on
_TIME_SERVER = ("timedatectl timesync-status shows which one is asked; without internet, name a machine of "
                "this network that serves time (chrony does): printf '[Time]\\nNTP=ADDRESS\\n' | sudo "
                "install -D -m 644 /dev/stdin /etc/systemd/timesyncd.conf.d/lan.conf && sudo systemctl "
                "restart systemd-timesyncd")


def check_system(facts: SystemFacts, storage: str = "", power_mode: str = "", own: bool = False
                 ) -> list[Finding]:
    """The checks of one machine's system.

    storage     where releases and shards will lie; "": the fullest of ``facts.disks``
    power_mode  that the cluster file asks for, by name; "": any
    own         whether to check the groups of this process instead of those of the services' user
    """
    board = board_of(facts)
    findings = [_release(board), Finding("python", "ok", ".".join(map(str, facts.python))), _memory(board),
                _swap(facts.files.get("proc/swaps", "")), _temperature(board)]
    if board.l4t or power_mode:
        modes = mode_numbers(facts.files.get("etc/nvpmodel.conf", ""))
        findings.append(_power_mode(board.power_mode, modes, power_mode))
    findings += [_disk(facts.disks, storage), check_time(facts.timedatectl)]
    if board.l4t:
        groups = facts.files.get("etc/group", "")
        findings.append(_own_groups(groups) if own else _service_groups(groups))
    return findings


def check_bare_board(inventory: Inventory, device: DeviceEntry, facts: BoardFacts, storage: str = ""
                     ) -> list[Finding]:
    """A board without a release; a board that passes here passes the preflight of `deploy up`."""
    python, torch_device = inventory.cluster.board_python, inventory.torch_device(device)
    system = facts.system
    board, version, *others = check_system(system, storage, inventory.power_mode(device))
    findings = [board, version, _torch(system.torch), Finding("sudo", "ok", "without a password"),
                Finding("systemd", "ok", f"{system.systemd.version}"), *others]
    # The doctor has a stricter check for the clock.
    problems = [problem for problem in judge(device.name, Needs(), facts, python, torch_device)
                if problem.check != "clock"]
    return merged([*findings, *problems])


def check_time(timedatectl: str) -> Finding:
    """Whether NTP keeps the clock, by `timedatectl show`."""
    said = dict(line.split("=", 1) for line in timedatectl.splitlines() if "=" in line)
    if "NTP" not in said:
        return Finding("time", "unknown", "timedatectl does not say")
    if said.get("CanNTP") == "no":
        return Finding("time", "warning", "no time service is installed",
                       "sudo apt-get install systemd-timesyncd")
    if said["NTP"] != "yes":
        return Finding("time", "warning", "NTP is off, so the clock drifts",
                       "sudo timedatectl set-ntp true", remedy=(("timedatectl", "set-ntp", "true"),))
    if said.get("NTPSynchronized") != "yes":
        return Finding("time", "warning", "NTP is on, and no server has answered yet", _TIME_SERVER)
    return Finding("time", "ok", "synchronised by NTP")


def check_network(facts: SystemFacts, address: str, interface: str) -> Finding:
    """``address``: the board's IPv4, as seen from this machine; ``interface``: the cluster file's."""
    name = facts.interface
    if name.startswith(system().usb_network.interfaces):
        return Finding(
            "network", "failed",
            f"{address} is at {name}, the USB device port, where every Jetson has the same address",
            "connect the boards by Ethernet, and give the address there in the cluster file")
    if name not in facts.links:
        return Finding("network", "unknown", f"no interface of the board has the address {address}",
                       "see ip -4 -o addr there, and the address in the cluster file")
    link = facts.links[name]
    found, advice = [], []
    if link.wireless:
        found.append(f"{name} is WiFi, whose latency and bandwidth vary")
        advice.append("connect the boards by cable")
    elif link.mbps is not None and link.mbps < _MIN_MBPS:
        found.append(f"{name} runs at {link.mbps} Mbps")
        advice.append(f"see whether cable and switch are made for {_MIN_MBPS} Mbps")
    if link.dynamic:
        found.append(f"{address} is leased (DHCP), and the cluster file holds addresses")
        advice.append("reserve it for this board in the DHCP server, unless it is, or set it by hand")
    if name not in (interface, "lo"):
        found.append(f"{address} is at {name}, and the cluster file says {interface}")
        advice.append(f'interface = "{name}" for this board in the cluster file')
    if found:
        return Finding("network", "warning", "; ".join(found), "; ".join(advice))
    speed = f", {link.mbps} Mbps" if link.mbps else ""
    return Finding("network", "ok", f"{address} at {name}{speed}")


def check_l4t(facts: SystemFacts) -> list[Finding]:
    """Whether a Jetson starts no desktop and apt holds its L4T packages; [] for other machines."""
    return [_desktop(facts.desktop), _apt_hold(facts.packages)] if l4t_of(facts) else []


def _release(board: BoardInfo) -> Finding:
    if not board.l4t:
        return Finding("board", "ok", f"{board.machine or 'a machine'}; not a Jetson")
    jetpack = jetpack_of(board.l4t)
    name = f" (JetPack {jetpack.name})" if jetpack else ""
    found = Finding("board", "ok", f"{board.machine or 'a Jetson'}, L4T {board.l4t}{name}")
    problem = judge_jetpack(board.l4t)
    return problem or found


def _memory(board: BoardInfo) -> Finding:
    if board.total_mb is None or board.available_mb is None:
        return Finding("memory", "unknown", "the system does not say")
    found = f"{board.available_mb / 1e3:.1f} of {board.total_mb / 1e3:.1f} GB available"
    if board.available_mb < _MIN_FREE_SHARE * board.total_mb:
        advice = ("a board without a desktop has about 0.8 GB more: sudo systemctl set-default "
                  "multi-user.target, then reboot" if board.l4t else "end what else runs here")
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def _swap(swaps: str) -> Finding:
    areas = [line.split() for line in swaps.splitlines()[1:] if len(line.split()) >= 3]
    if not areas:
        return Finding("swap", "ok", "none")
    total = sum(int(area[2]) * 1024 for area in areas if area[2].isdigit()) / _GIGA
    found = f"{total:.1f} GB in {', '.join(area[0] for area in areas)}"
    if all("zram" in area[0] for area in areas):
        return Finding("swap", "warning", found,
                       "zram takes the memory that shards want: sudo systemctl disable nvzramconfig, and a "
                       "swap file on NVMe if one is needed")
    return Finding("swap", "ok", found)


def _temperature(board: BoardInfo) -> Finding:
    if board.temperature_c is None:
        return Finding("temperature", "unknown", "no sensor reports it")
    found = f"{board.temperature_c:.0f} °C in the hottest zone"
    if board.temperature_c >= _HOT_C:
        return Finding("temperature", "failed", found, "the board throttles: cool it, and see to its fan")
    if board.temperature_c >= _WARM_C:
        return Finding("temperature", "warning", found, "under load it will throttle: see to its fan")
    return Finding("temperature", "ok", found)


def _power_mode(current: str, numbers: dict[str, str], wanted: str) -> Finding:
    """Compared by name, because a number means different modes on different boards."""
    if wanted and wanted not in numbers:
        return Finding("power mode", "failed", f"{wanted} is asked for, and there is "
                       + (f"only {', '.join(numbers)}" if numbers else "no /etc/nvpmodel.conf"),
                       "see power_mode in the cluster file")
    if not current:
        return Finding("power mode", "unknown", "nvpmodel does not say", "sudo nvpmodel -q shows it")
    best = wanted or next((name for name in reversed(numbers) if name.upper().startswith("MAXN")), "")
    fastest = current.upper().startswith("MAXN")
    if current == wanted or not best or (fastest and not wanted):
        return Finding("power mode", "ok", current)
    clocks = "! command -v jetson_clocks >/dev/null || jetson_clocks"
    return Finding("power mode", "warning",
                   f"{current}, and {f'{best} is asked for' if wanted else f'there is {best}'}",
                   ("flowspec deploy up sets it; by hand: " if wanted else "")
                   + f"sudo nvpmodel -m {numbers[best]}, then sudo jetson_clocks",
                   # Another mode may need a reboot, so only a cluster file may ask for it.
                   remedy=(("nvpmodel", "-m", numbers[best]), ("sh", "-c", clocks)) if wanted else ())


def _disk(disks: Mapping[str, DiskFacts], storage: str) -> Finding:
    """The fullest file system that will be written to."""
    used = {storage: disks[storage]} if storage else disks
    fullest = min(used.values(), key=lambda disk: disk.free)
    where = " and ".join(path for path, disk in used.items() if disk.device == fullest.device)
    found = f"{fullest.free / _GIGA:.0f} GB free at {where}"
    if fullest.free / _GIGA < _MIN_DISK_GB:
        return Finding("disk", "warning", found,
                       f"a release and a shard want {_MIN_DISK_GB:.0f} GB: make room")
    return Finding("disk", "ok", found)


def _own_groups(text: str) -> Finding:
    there = {name: int(gid) for name, gid, _ in _groups(text) if name in GPU_GROUPS and gid.isdigit()}
    missing = [name for name, gid in there.items() if gid not in {os.getgid(), *os.getgroups()}]
    if missing and os.geteuid() != 0:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return Finding("groups", "failed", f"this user is not in {' and '.join(missing)}",
                       f"sudo usermod -aG {','.join(missing)} $USER, then log in again",
                       remedy=(("usermod", "-aG", ",".join(missing), user),))
    return Finding("groups", "ok", _existing(list(there)))


def _service_groups(text: str) -> Finding:
    members = {name: users.split(",") for name, _, users in _groups(text)}
    there = [group for group in GPU_GROUPS if group in members]
    if USER not in members:
        return Finding("groups", "ok",
                       f"{_existing(there)}; flowspec deploy up makes its user {USER} a member")
    missing = [group for group in there if USER not in members[group]]
    if missing:
        return Finding("groups", "failed", f"the user {USER} is not in {' and '.join(missing)}",
                       f"sudo usermod -aG {','.join(missing)} {USER}, then flowspec deploy restart",
                       remedy=(("usermod", "-aG", ",".join(missing), USER),))
    return Finding("groups", "ok", _existing(there))


def _groups(text: str) -> list[tuple[str, str, str]]:
    lines = [line.split(":") for line in text.splitlines()]
    return [(line[0], line[2], line[3]) for line in lines if len(line) == 4]


def _existing(groups: Sequence[str]) -> str:
    return ", ".join(groups) or f"the system has none of {', '.join(GPU_GROUPS)}"


def _desktop(starts: bool) -> Finding:
    if not starts:
        return Finding("desktop", "ok", "none is started at boot")
    return Finding("desktop", "warning",
                   f"one is started at boot: it takes about {system().desktop.memory_mb / 1e3:.1f} GB",
                   "sudo systemctl set-default multi-user.target, then reboot")


def _apt_hold(packages: Mapping[str, bool]) -> Finding:
    if not packages:
        return Finding("apt hold", "unknown", "dpkg knows no package nvidia-l4t-*")
    loose = [name for name, held in packages.items() if not held]
    if not loose:
        return Finding("apt hold", "ok", f"{len(packages)} packages nvidia-l4t-* stay at their release")
    return Finding("apt hold", "warning",
                   f"an apt upgrade would replace {len(loose)} of {len(packages)} packages nvidia-l4t-*, and "
                   "may leave a mixture of two L4T releases",
                   "sudo apt-mark hold 'nvidia-l4t-*'; unhold them for an upgrade of JetPack")


def _torch(torch: TorchFacts) -> Finding:
    if not torch.version:
        return Finding("torch", "failed", torch.why, "install the torch that was made for this board")
    capability = ".".join(map(str, torch.cuda)) if torch.cuda else ""
    sees = f"sees the GPU (compute capability {capability})" if capability else "sees no GPU"
    return Finding("torch", "ok", f"{torch.version}, which {sees}, {torch.file}")
