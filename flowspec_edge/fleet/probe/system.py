"""Facts about a board's kernel and system: files, network, disks, memory, ports, packages.

Sent to the board with ``script``, under the same rules: standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
from typing import Any

from flowspec_edge.fleet.board_links.interfaces import ipv4_addresses

# Names or patterns below the root; the contents are sent for ``board.board_of`` and the doctor's checks.
FILES = ("etc/nv_tegra_release", "sys/firmware/devicetree/base/model", "proc/cpuinfo", "proc/meminfo",
         "proc/swaps", "etc/machine-id", "proc/sys/kernel/random/boot_id", "etc/nvpmodel.conf",
         "var/lib/nvpmodel/status", "etc/group", "sys/class/thermal/thermal_zone*/temp")
_GPUS = ("/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvidia0")  # Tegra's, older and newer, and a discrete GPU's
_MAX_FILE_BYTES = 1 << 18
_NET_CLASS = "/sys/class/net"
_TIMEOUT_S = 20
_UNITS = ["flowspec-draft.service", "flowspec-verify@*.service"]


def system_facts(paths: list[str]) -> dict[str, Any]:
    """The facts of this module; ``paths``: directories that will be written to."""
    return {"files": files(), "nvpmodel": output(["nvpmodel", "-q"]), "systemd": systemd(), "gpu": gpu(),
            "timedatectl": output(["timedatectl", "show"]), "desktop": desktop(),
            "packages": l4t_packages(), "environments": environments(paths), "links": links(),
            "disks": {path: disk(path) for path in paths}, "memory": memory(own_processes())}


def files() -> dict[str, str]:
    found = {}
    for name in FILES:
        for path in sorted(glob.glob("/" + name)) or ["/" + name]:
            found[path[1:]] = text(path)
    return found


def systemd() -> dict[str, Any]:
    words = output(["systemctl", "--version"]).split()
    version = words[1] if len(words) > 1 and words[1].isdigit() else "0"
    return {"version": int(version), "runs": os.path.isdir("/run/systemd/system")}


def gpu() -> bool:
    return any(os.path.exists(path) for path in _GPUS)


def desktop() -> bool:
    """Whether a display manager starts at boot.  graphical.target proves nothing: servers have it, too."""
    return (output(["systemctl", "get-default"]).strip() == "graphical.target"
            and output(["systemctl", "show", "--property=LoadState", "--value", "display-manager.service"]
                       ).strip() == "loaded")


def l4t_packages() -> dict[str, bool]:
    """Installed package of L4T → whether apt holds it."""
    lines = output(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Want} ${db:Status-Status}\n",
                    "nvidia-l4t-*"])
    return {words[0]: words[1] == "hold" for words in (line.split() for line in lines.splitlines())
            if len(words) == 3 and words[2] == "installed"}


def environments(paths: list[str]) -> list[str]:
    """The digests of the complete environments below ``paths``."""
    found = [file for path in paths for file in glob.glob(f"{path}/venvs/*/.complete")]
    return sorted(os.path.basename(os.path.dirname(file)) for file in found)


def network(address: str) -> dict[str, Any]:
    """``interface``: the one that has ``address``, else the one of the ssh connection, else ""."""
    own = ipv4_addresses()
    for wanted in (address, *os.environ.get("SSH_CONNECTION", "").split()[2:3]):
        for name, there in own.items():
            if there == wanted:
                return {"interface": name, "addresses": own}
    return {"interface": "", "addresses": own}


def links() -> dict[str, dict[str, Any]]:
    """Interfaces with an IPv4 address; ``mbps``: negotiated, None on loopback; ``dynamic``: leased (DHCP)."""
    leased = dynamic_interfaces(output(["ip", "-4", "-o", "addr", "show"]))
    found = {}
    for name in ipv4_addresses():
        place = f"{_NET_CLASS}/{name}"
        speed = text(f"{place}/speed").strip()
        found[name] = {
            "wireless": any(os.path.exists(f"{place}/{kind}") for kind in ("wireless", "phy80211")),
            "mbps": int(speed) if speed.isdigit() and int(speed) else None, "dynamic": name in leased}
    return found


def dynamic_interfaces(shown: str) -> set[str]:
    """The interfaces with a leased address in the output of `ip -4 -o addr show`."""
    lines = [line.split() for line in shown.splitlines()]
    return {words[1] for words in lines if len(words) > 3 and "dynamic" in words[4:]}


def disk(path: str) -> dict[str, Any]:
    """Device, free bytes and writability of the file system that ``path`` is or will be on."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    state = os.statvfs(path)
    return {"device": os.stat(path).st_dev, "free": state.f_bavail * state.f_frsize,
            "writable": not state.f_flag & os.ST_RDONLY}


def memory(own: set[int]) -> dict[str, int]:
    """Bytes of memory in total, available, and held by flowspec's processes ``own``."""
    found = sizes("/proc/meminfo")
    held = sum(sizes(f"/proc/{pid}/status").get("RssAnon", 0) for pid in own)
    return {"total": found.get("MemTotal", 0), "available": found.get("MemAvailable", 0),
            "held": held + gpu_buffers(own)}


def gpu_buffers(own: set[int]) -> int:
    """Bytes of a Jetson's GPU buffers, which no process's size includes; only root can read them."""
    held = 0
    for line in text("/sys/kernel/debug/nvmap/iovmm/clients").splitlines():
        words = line.split()  # CLIENT PROCESS PID SIZE
        if len(words) >= 4 and words[2].isdigit() and int(words[2]) in own and words[3][:-1].isdigit():
            held += int(words[3][:-1]) * 1024
    return held


def own_processes() -> set[int]:
    found = set()
    for line in output(["systemctl", "show", "--property=ControlGroup", *_UNITS]).splitlines():
        group = line.partition("=")[2]
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):  # the unified hierarchy, and cgroup v1
            if group:
                found |= {int(pid) for pid in text(f"{root}{group}/cgroup.procs").split()}
    return found


def holders(ports: list[int]) -> dict[int, tuple[Any, str]]:
    """Port → (pid, name) of the process that listens on it; (None, "") if only root may see the process."""
    found: dict[int, tuple[Any, str]] = {}
    for line in output(["ss", "-H", "-l", "-t", "-n", "-p"]).splitlines():
        port = line.split()[3].rpartition(":")[2]
        holder = re.search(r'\(\("([^"]*)",pid=(\d+)', line)
        if port.isdigit() and int(port) in ports:
            found[int(port)] = (int(holder[2]), holder[1]) if holder else (None, "")
    return found


def foreign_holders(ports: list[int]) -> dict[int, tuple[Any, str]]:
    """:func:`holders` without flowspec's services.

    The services are listed before and after: one that cannot reach its neighbours restarts again and again.
    """
    before = own_processes()
    found = holders(ports)
    own = before | own_processes()
    return {port: holder for port, holder in found.items()
            if not isinstance(holder[0], int) or holder[0] not in own}


def sizes(path: str) -> dict[str, int]:
    """Lines such as "MemTotal: 8000 kB", in bytes."""
    found = {}
    for line in text(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def text(path: str) -> str:
    """The beginning of a file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def output(argv: list[str]) -> str:
    """A command's stdout; "" if the command fails."""
    done = run(argv)
    return str(done.stdout) if done is not None and done.returncode == 0 else ""


def run(argv: list[str], seconds: int = _TIMEOUT_S) -> Any:
    """The completed process; None if it does not start or exceeds ``seconds``."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def last_line(said: str) -> str:
    return ([line.strip() for line in said.splitlines() if line.strip()] or [""])[-1]
