"""The rules on how a machine's system is set up, and its links; ``checks.CHECKS`` says who shows them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping, Sequence

from flowspec_edge.boards.links import tc
from flowspec_edge.boards.links.between import LinkRate
from flowspec_edge.boards.paths import USER
from flowspec_edge.boards.probe.board import BoardInfo, l4t_of, mode_numbers
from flowspec_edge.boards.probe.facts import DiskFacts, SystemFacts
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.boards.probe.onboard.system import GPU_GROUPS
from flowspec_edge.boards.probe.onboard.tools import assignments
from flowspec_edge.util.jetson import is_from
from flowspec_edge.util.jetson import system as l4t_system

_GIGA = 1e9
_MIN_DISK_GB = 10.0  # two environments take 1, a shard of a 13B model in 4 bits 3
_MIN_FREE_SHARE = 0.6  # of a board's memory; a desktop takes about a tenth of an 8 GB board
_MIN_MBPS = 1000
_SLOW_MBPS = 100.0  # Fast Ethernet; what the FlowSpec paper calls a slow network
_WARM_C, _HOT_C = 80.0, 95.0  # Orin modules throttle from about 95 °C on
_TIME_SERVER = ("timedatectl timesync-status shows which one is asked; without internet, name a machine of "
                "this network that serves time (chrony does): printf '[Time]\\nNTP=ADDRESS\\n' | sudo "
                "install -D -m 644 /dev/stdin /etc/systemd/timesyncd.conf.d/lan.conf && sudo systemctl "
                "restart systemd-timesyncd")


def free_memory(board: BoardInfo) -> Finding:
    if board.total_mb is None or board.available_mb is None:
        return Finding("memory", "unknown", "the system does not say")
    amounts = f"{board.available_mb / 1e3:.1f} of {board.total_mb / 1e3:.1f} GB available"
    if board.available_mb < _MIN_FREE_SHARE * board.total_mb:
        advice = ("a board without a desktop has about 0.8 GB more: sudo systemctl set-default "
                  "multi-user.target, then reboot" if board.l4t else "end what else runs here")
        return Finding("memory", "warning", amounts, advice)
    return Finding("memory", "ok", amounts)


def swap(facts: SystemFacts) -> Finding:
    swaps = facts.files.get("proc/swaps", "")
    areas = [line.split() for line in swaps.splitlines()[1:] if len(line.split()) >= 3]
    if not areas:
        return Finding("swap", "ok", "none")
    total = sum(int(area[2]) * 1024 for area in areas if area[2].isdigit()) / _GIGA
    areas_text = f"{total:.1f} GB in {', '.join(area[0] for area in areas)}"
    if all("zram" in area[0] for area in areas):
        return Finding("swap", "warning", areas_text,
                       "zram takes the memory that shards want: sudo systemctl disable nvzramconfig, and a "
                       "swap file on NVMe if one is needed")
    return Finding("swap", "ok", areas_text)


def temperature(board: BoardInfo) -> Finding:
    if board.temperature_c is None:
        return Finding("temperature", "unknown", "no sensor reports it")
    reading = f"{board.temperature_c:.0f} °C in the hottest zone"
    if board.temperature_c >= _HOT_C:
        return Finding("temperature", "failed", reading, "the board throttles: cool it, and see to its fan")
    if board.temperature_c >= _WARM_C:
        return Finding("temperature", "warning", reading, "under load it will throttle: see to its fan")
    return Finding("temperature", "ok", reading)


def power_mode(facts: SystemFacts, board: BoardInfo, requested: str) -> Iterator[Finding]:
    """Judge the power mode, compared by name, because a number means different modes on different boards.

    requested  by the cluster file; "": any, and then only a Jetson has a finding
    """
    if board.l4t or requested:
        numbers = mode_numbers(facts.files.get("etc/nvpmodel.conf", ""))
        yield _judge_power_mode(board.power_mode, numbers, requested)


def _judge_power_mode(current: str, numbers: Mapping[str, str], requested: str) -> Finding:
    if requested and requested not in numbers:
        return Finding("power mode", "failed", f"{requested} is asked for, and there is "
                       + (f"only {', '.join(numbers)}" if numbers else "no /etc/nvpmodel.conf"),
                       "see power_mode in the cluster file")
    if not current:
        return Finding("power mode", "unknown", "nvpmodel does not say", "sudo nvpmodel -q shows it")
    best = requested or next((name for name in reversed([*numbers]) if name.upper().startswith("MAXN")), "")
    fastest = current.upper().startswith("MAXN")
    if current == requested or not best or (fastest and not requested):
        return Finding("power mode", "ok", current)
    clocks = "! command -v jetson_clocks >/dev/null || jetson_clocks"
    return Finding("power mode", "warning",
                   f"{current}, and {f'{best} is asked for' if requested else f'there is {best}'}",
                   ("flowspec deploy up sets it; by hand: " if requested else "")
                   + f"sudo nvpmodel -m {numbers[best]}, then sudo jetson_clocks",
                   # Another mode may need a reboot, so only a cluster file may ask for it.
                   remedy=(("nvpmodel", "-m", numbers[best]), ("sh", "-c", clocks)) if requested else ())


def free_disk(disks: Mapping[str, DiskFacts], storage: str, absent: str) -> Finding:
    """Judge the fullest file system that will be written to; ``absent``: a directory that was named, and is none."""
    if absent:
        return Finding("disk", "failed", f"{absent}: No such directory", "name a directory that exists")
    checked_disks = {path: disk for path, disk in disks.items() if path == storage or not storage}
    if not checked_disks:
        return Finding("disk", "unknown", "the board does not say")
    fullest = min(checked_disks.values(), key=lambda disk: disk.free)
    paths = " and ".join(path for path, disk in checked_disks.items() if disk.device == fullest.device)
    free_space = f"{fullest.free / _GIGA:.0f} GB free at {paths}"
    if fullest.free / _GIGA < _MIN_DISK_GB:
        return Finding("disk", "warning", free_space,
                       f"a release and a shard want {_MIN_DISK_GB:.0f} GB: make room")
    return Finding("disk", "ok", free_space)


def time_service(facts: SystemFacts) -> Finding:
    """Judge whether NTP keeps the clock."""
    properties = assignments(facts.timedatectl)
    if "NTP" not in properties:
        return Finding("time", "unknown", "timedatectl does not say")
    if properties.get("CanNTP") == "no":
        return Finding("time", "warning", "no time service is installed",
                       "sudo apt-get install systemd-timesyncd")
    if properties["NTP"] != "yes":
        return Finding("time", "warning", "NTP is off, so the clock drifts",
                       "sudo timedatectl set-ntp true", remedy=(("timedatectl", "set-ntp", "true"),))
    if properties.get("NTPSynchronized") != "yes":
        return Finding("time", "warning", "NTP is on, and no server has answered yet", _TIME_SERVER)
    return Finding("time", "ok", "synchronised by NTP")


def process_groups(facts: SystemFacts) -> Iterator[Finding]:
    """Judge whether this process may use a Jetson's GPU."""
    if not l4t_of(facts):
        return
    group_ids = {name: int(gid) for name, gid, _ in _groups(facts) if name in GPU_GROUPS and gid.isdigit()}
    missing = [name for name, gid in group_ids.items() if gid not in {os.getgid(), *os.getgroups()}]
    if missing and os.geteuid() != 0:
        user = pwd.getpwuid(os.geteuid()).pw_name
        yield Finding("groups", "failed", f"this user is not in {' and '.join(missing)}",
                      f"sudo usermod -aG {','.join(missing)} $USER, then log in again",
                      remedy=(("usermod", "-aG", ",".join(missing), user),))
    else:
        yield Finding("groups", "ok", _existing(list(group_ids)))


def service_groups(facts: SystemFacts) -> Iterator[Finding]:
    """Judge whether the services' user may use a Jetson's GPU."""
    if not l4t_of(facts):
        return
    members = {name: users.split(",") for name, _, users in _groups(facts)}
    groups = [group for group in GPU_GROUPS if group in members]
    missing = [group for group in groups if USER not in members[group]]
    if USER not in members:
        yield Finding("groups", "ok",
                      f"{_existing(groups)}; flowspec deploy up makes its user {USER} a member")
    elif missing:
        yield Finding("groups", "failed", f"the user {USER} is not in {' and '.join(missing)}",
                      f"sudo usermod -aG {','.join(missing)} {USER}, then flowspec deploy restart",
                      remedy=(("usermod", "-aG", ",".join(missing), USER),))
    else:
        yield Finding("groups", "ok", _existing(groups))


def _groups(facts: SystemFacts) -> list[tuple[str, str, str]]:
    lines = [line.split(":") for line in facts.files.get("etc/group", "").splitlines()]
    return [(line[0], line[2], line[3]) for line in lines if len(line) == 4]


def _existing(groups: Sequence[str]) -> str:
    return ", ".join(groups) or f"the system has none of {', '.join(GPU_GROUPS)}"


def network(facts: SystemFacts, address: str, interface: str, address_fault: tuple[str, str] | None) -> Finding:
    """Judge the board's address and interface; the arguments are the fields of ``checks.Subject``."""
    if address_fault:
        return Finding("network", "failed", address_fault[0], f"{address_fault[1]} in the cluster file")
    name = facts.interface
    if name.startswith(l4t_system().usb_network.interfaces):
        return Finding(
            "network", "failed",
            f"{address} is at {name}, the USB device port, where every Jetson has the same address",
            "connect the boards by Ethernet, and give the address there in the cluster file")
    if name not in facts.links:
        return Finding("network", "unknown", f"no interface of the board has the address {address}",
                       "see ip -4 -o addr there, and the address in the cluster file")
    link = facts.links[name]
    problems, advice = [], []
    if link.wireless:
        problems.append(f"{name} is WiFi, whose latency and bandwidth vary")
        advice.append("connect the boards by cable")
    elif link.mbps is not None and link.mbps < _MIN_MBPS:
        problems.append(f"{name} runs at {link.mbps} Mbps")
        advice.append(f"see whether cable and switch are made for {_MIN_MBPS} Mbps")
    if link.dynamic:
        problems.append(f"{address} is leased (DHCP), and the cluster file holds addresses")
        advice.append("reserve it for this board in the DHCP server, unless it is, or set it by hand")
    if name not in (interface, "lo"):
        problems.append(f"{address} is at {name}, and the cluster file says {interface}")
        advice.append(f'interface = "{name}" for this board in the cluster file')
    if problems:
        return Finding("network", "warning", "; ".join(problems), "; ".join(advice))
    speed = f", {link.mbps} Mbps" if link.mbps else ""
    return Finding("network", "ok", f"{address} at {name}{speed}")


def large_pieces(l4t: str) -> Iterator[Finding]:
    """Warn of a release of L4T that may refuse large pieces of GPU memory."""
    fault = l4t_system().large_pieces
    if is_from(l4t, fault.since):
        yield Finding(
            "gpu memory", "warning",
            f"L4T {l4t}: from {fault.since} on (the fix for {fault.fix}) large pieces of GPU memory are "
            "reportedly refused though memory is free (NvMap error 12)",
            f"go on: flowspec asks for {fault.needed_mb} MB at once at most; flowspec doctor --gpu on the "
            "board says what it gives; do not set expandable_segments, which fails on a Jetson")


def desktop(facts: SystemFacts) -> Iterator[Finding]:
    """Judge whether a Jetson starts a desktop."""
    if not l4t_of(facts):
        return
    if facts.desktop:
        gigabytes = l4t_system().desktop.memory_mb / 1e3
        yield Finding("desktop", "warning", f"one is started at boot: it takes about {gigabytes:.1f} GB",
                      "sudo systemctl set-default multi-user.target, then reboot")
    else:
        yield Finding("desktop", "ok", "none is started at boot")


def apt_hold(facts: SystemFacts) -> Iterator[Finding]:
    """Judge whether apt holds a Jetson's L4T packages."""
    packages = facts.packages
    loose = [name for name, on_hold in packages.items() if not on_hold]
    if not l4t_of(facts):
        return
    if not packages:
        yield Finding("apt hold", "unknown", "dpkg knows no package nvidia-l4t-*")
    elif loose:
        yield Finding("apt hold", "warning",
                      f"an apt upgrade would replace {len(loose)} of {len(packages)} packages nvidia-l4t-*, "
                      "and may leave a mixture of two L4T releases",
                      "sudo apt-mark hold 'nvidia-l4t-*'; unhold them for an upgrade of JetPack")
    else:
        yield Finding("apt hold", "ok", f"{len(packages)} packages nvidia-l4t-* stay at their release")


def link(rate: LinkRate) -> Finding:
    name = f"link to {rate.target}"
    if rate.measure is None:
        return Finding(name, "failed", rate.error, "see whether both are in one network, and no firewall is "
                                                   "between them")
    figures = f"{rate.measure.mbps:.0f} Mbps, {rate.measure.latency_ms:.2f} ms"
    if rate.measure.mbps < _SLOW_MBPS:
        return Finding(name, "warning", figures, "see whether the cable and the switch are made for 1 Gbps; "
                                               "ethtool shows what was agreed on")
    return Finding(name, "ok", figures)


def shaping(why: str | None) -> Iterator[Finding]:
    """Report whether `flowspec sweep bandwidth --cluster` can throttle the board's link; ok in any case.

    why  the board cannot shape its link; "" if it can; None if the doctor did not try it there: no finding
    """
    if why:
        yield Finding("link shaping", "ok",
                      f"not possible, and only flowspec sweep bandwidth --cluster needs it: {why}",
                      tc.requirements())
    elif why is not None:
        yield Finding("link shaping", "ok", "sch_htb and cls_u32 work")
