"""The section "system": whether a board can take a release, and how its kernel and system are set up.

It changes nothing on the board.
"""

from __future__ import annotations

import glob
import grp
import json
import os
import pwd
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from flowspec_edge.boards.paths import CURRENT, IMAGE_NAME, USER
from flowspec_edge.boards.probe.onboard.tools import doing, last_line, ntp, output, run, text
from flowspec_edge.errors import ended
from flowspec_edge.util.interfaces import ipv4_addresses
from flowspec_edge.util.interpreter import code_command
from flowspec_edge.util.procfs import sizes

GPU_GROUPS = ("video", "render")  # whose members may use a Tegra's GPU; not every release has both
# Names or patterns below the root; the contents are sent for ``board.board_of`` and the doctor's checks.
FILES = ("etc/nv_tegra_release", "sys/firmware/devicetree/base/model", "proc/cpuinfo", "proc/meminfo",
         "proc/swaps", "etc/machine-id", "proc/sys/kernel/random/boot_id", "etc/nvpmodel.conf",
         "var/lib/nvpmodel/status", "etc/group", "sys/class/thermal/thermal_zone*/temp")
_GPUS = ("/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvidia0")  # Tegra's, older and newer, and a discrete GPU's
_NET_CLASS = "/sys/class/net"
_IMPORT_S = 240  # a small board reads torch from its SD card
_OTHERS_S = 60  # for what comes after it
_UNITS = ["flowspec-draft.service", "flowspec-verify@*.service"]


def facts(address: str, paths: list[str], ports: list[int], torch_check: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``machine_facts``, and those that only a board is asked for.

    address      the board's, as the control host knows it
    ports        TCP ports that will be listened on
    torch_check  for ``torch``; None: flowspec runs in an image, and ``docker`` is asked
    """
    board_only = {"docker": docker()} if torch_check is None else {"torch": torch(torch_check)}
    paths = [*paths, board_only["docker"]["root"]] if board_only.get("docker", {}).get("root") else paths
    return {**machine_facts(paths), **board_only, "hostname": socket.gethostname(),
            "user": pwd.getpwuid(os.getuid()).pw_name, "sudo": why_not_root(),
            "machine": os.uname().machine, "interface": interface_of(address),
            "ports": foreign_holders(ports)}


def machine_facts(paths: list[str]) -> dict[str, Any]:
    """Return the facts of any machine; ``paths``: directories that will be written to."""
    timedatectl = output("timedatectl", "show")
    return {"files": files(), "nvpmodel": output("nvpmodel", "-q"), "systemd": systemd(), "gpu": gpu(),
            "timedatectl": timedatectl, "ntp": ntp(timedatectl), "desktop": desktop(),
            "python": list(sys.version_info[:3]), "packages": l4t_packages(),
            "environments": environments(paths), "links": links(),
            "disks": {path: disk(path) for path in paths}, "memory": memory(list_service_pids())}


def files() -> dict[str, str]:
    contents = {}
    for name in FILES:
        for path in sorted(glob.glob("/" + name)) or ["/" + name]:
            contents[path[1:]] = text(path)
    return contents


def systemd() -> dict[str, Any]:
    words = output("systemctl", "--version").split()
    version = words[1] if len(words) > 1 and words[1].isdigit() else "0"
    return {"version": int(version), "runs": os.path.isdir("/run/systemd/system")}


def gpu() -> bool:
    return any(os.path.exists(path) for path in _GPUS)


def desktop() -> bool:
    """Return whether a display manager starts at boot.

    graphical.target proves nothing: servers have it, too.
    """
    return (output("systemctl", "get-default").strip() == "graphical.target"
            and output("systemctl", "show", "--property=LoadState", "--value", "display-manager.service"
                       ).strip() == "loaded")


def l4t_packages() -> dict[str, bool]:
    """Map the installed packages of L4T to whether apt holds them."""
    lines = output("dpkg-query", "-W", "-f", "${Package} ${db:Status-Want} ${db:Status-Status}\n",
                    "nvidia-l4t-*")
    return {words[0]: words[1] == "hold" for words in (line.split() for line in lines.splitlines())
            if len(words) == 3 and words[2] == "installed"}


def environments(paths: list[str]) -> list[str]:
    """Return the digests of the complete environments below ``paths``."""
    markers = [file for path in paths for file in glob.glob(f"{path}/venvs/*/.complete")]
    return sorted(os.path.basename(os.path.dirname(file)) for file in markers)


def interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``.

    If none has it, return the name of the interface that the ssh connection uses; "" if that is unknown, too.
    """
    interfaces = ipv4_addresses()
    for candidate in (address, *os.environ.get("SSH_CONNECTION", "").split()[2:3]):
        for name, addresses in interfaces.items():
            if candidate in addresses:
                return name
    return ""


def links() -> dict[str, dict[str, Any]]:
    """Return the interfaces with an IPv4 address.

    mbps     negotiated, None on loopback
    dynamic  leased (DHCP)
    """
    leased = dynamic_interfaces(output("ip", "-4", "-o", "addr", "show"))
    interfaces = {}
    for name in ipv4_addresses():
        directory = f"{_NET_CLASS}/{name}"
        speed = text(f"{directory}/speed").strip()
        interfaces[name] = {
            "wireless": any(os.path.exists(f"{directory}/{kind}") for kind in ("wireless", "phy80211")),
            "mbps": int(speed) if speed.isdigit() and int(speed) else None, "dynamic": name in leased}
    return interfaces


def dynamic_interfaces(output_text: str) -> set[str]:
    """Return the interfaces with a leased address in the output of `ip -4 -o addr show`."""
    lines = [line.split() for line in output_text.splitlines()]
    return {words[1] for words in lines if len(words) > 3 and "dynamic" in words[4:]}


def disk(path: str) -> dict[str, Any]:
    """Return the device, free bytes and writability of the file system that ``path`` is or will be on."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    state = os.statvfs(path)
    return {"device": os.stat(path).st_dev, "free": state.f_bavail * state.f_frsize,
            "writable": not state.f_flag & os.ST_RDONLY}


def memory(pids: set[int]) -> dict[str, int]:
    """Return the bytes of memory in total, available, and held by flowspec's processes ``pids``."""
    meminfo = sizes(Path("/proc/meminfo"))
    resident = sum(sizes(Path(f"/proc/{pid}/status")).get("RssAnon", 0) for pid in pids)
    return {"total": meminfo.get("MemTotal", 0), "available": meminfo.get("MemAvailable", 0),
            "held": resident + gpu_buffers(pids)}


def gpu_buffers(pids: set[int]) -> int:
    """Return the bytes of a Jetson's GPU buffers, which no process's size includes; only root can read them."""
    total = 0
    for line in text("/sys/kernel/debug/nvmap/iovmm/clients").splitlines():
        words = line.split()  # CLIENT PROCESS PID SIZE
        if len(words) >= 4 and words[2].isdigit() and int(words[2]) in pids and words[3][:-1].isdigit():
            total += int(words[3][:-1]) * 1024
    return total


def list_service_pids() -> set[int]:
    pids = set()
    for line in output("systemctl", "show", "--property=ControlGroup", *_UNITS).splitlines():
        group = line.partition("=")[2]
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):  # the unified hierarchy, and cgroup v1
            if group:
                pids |= {int(pid) for pid in text(f"{root}{group}/cgroup.procs").split()}
    return pids | contained()


def contained() -> set[int]:
    """Return the processes in containers of flowspec's services, which are not in the services' control groups."""
    if not os.path.exists(f"{CURRENT}/venv/image.json"):
        return set()
    names = output("docker", "ps", "--filter=name=^flowspec-", "--format={{.Names}}").split()
    process_lists = [output("docker", "top", name, "-eo", "pid") for name in names]
    return {int(pid) for text in process_lists for pid in text.split() if pid.isdigit()}


def holders(ports: list[int]) -> dict[int, tuple[Any, str]]:
    """Map each port to (pid, name) of the process that listens on it; (None, "") if only root may see the process."""
    listeners: dict[int, tuple[Any, str]] = {}
    for line in output("ss", "-H", "-l", "-t", "-n", "-p").splitlines():
        port = line.split()[3].rpartition(":")[2]
        holder = re.search(r'\(\("([^"]*)",pid=(\d+)', line)
        if port.isdigit() and int(port) in ports:
            listeners[int(port)] = (int(holder[2]), holder[1]) if holder else (None, "")
    return listeners


def foreign_holders(ports: list[int]) -> dict[int, tuple[Any, str]]:
    """Return :func:`holders` without flowspec's services.

    The services are listed before and after: one that cannot reach its neighbours restarts again and again.
    """
    before = list_service_pids()
    listeners = holders(ports)
    service_pids = before | list_service_pids()
    return {port: holder for port, holder in listeners.items()
            if not isinstance(holder[0], int) or holder[0] not in service_pids}


def why_not_root() -> str:
    """Return why this user cannot become root without a password; "" if they can."""
    if os.geteuid() == 0:
        return ""
    completed = run(["sudo", "-n", "true"])
    if completed is None:
        return "there is no sudo"
    return "" if completed.returncode == 0 else last_line(completed.stderr) or "sudo -n true fails"


def docker() -> dict[str, Any]:
    """Return the facts of the board's Docker.

    version   of its engine; "" if it does not answer
    why       it does not
    runtimes  such as runc, nvidia
    root      the directory where its images lie
    group     whether there is a group whose members may use it
    images    tags of flowspec's images
    """
    facts: dict[str, Any] = {"version": "", "why": "", "runtimes": [], "root": "",
                             "group": any(entry.gr_name == "docker" for entry in grp.getgrall()), "images": []}
    completed = run(["docker", "info", "--format={{json .}}"])
    if completed is None:
        return {**facts, "why": "there is no docker" if shutil.which("docker") is None else "docker does not answer"}
    try:
        info = json.loads(completed.stdout)
        facts.update(version=info["ServerVersion"], runtimes=sorted(info["Runtimes"]), root=info["DockerRootDir"])
    except (ValueError, LookupError, TypeError):
        return {**facts, "why": last_line(completed.stderr) or "docker does not answer"}
    return {**facts, "images": output("docker", "images", "--format={{.Tag}}", IMAGE_NAME).split()}


def torch(check: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of ``torch_check``, for the torch that this Python imports for every user (-I).

    The check runs in a transient unit with the service's groups and sandboxing, if root and systemd are available.
    ``check``: program (``torch_check`` with a call of its main), device, protections (lines of the unit).
    Further facts:

    unit     the transient unit's user and groups in words; "" without one
    outside  the same facts without the unit, if the check fails inside it; else None
    own      {"torch": its file} for packages of the ssh user alone, if the import fails
    """
    python = [sys.executable, "-I", "-c", check["program"]]
    doing("import torch as a service would", 2 * _IMPORT_S + _OTHERS_S)
    unit, unit_text = transient_unit(check["protections"])
    facts = run_torch_check([*unit, *python])
    outside = None
    unseen = check["device"] != "cpu" and gpu() and not facts["cuda"]
    if unit and (facts["why"] or facts["numpy_fault"] or facts["gpu_fault"] or unseen):
        outside = run_torch_check(python)
    return {**facts, "unit": unit_text, "outside": outside, "own": user_packages() if facts["why"] else {}}


def run_torch_check(command: list[str]) -> dict[str, Any]:
    completed = run(command, _IMPORT_S)
    try:
        facts: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
        return facts
    except (AttributeError, LookupError, ValueError):
        if completed is not None and completed.returncode == -signal.SIGKILL:
            why = "MemoryError: the kernel killed the process, as it does when memory runs out"
        else:
            why = f"importing it took more than {_IMPORT_S} s" if completed is None else (
                last_line(completed.stderr) or f"importing it ends its process: {ended(completed.returncode)}")
        return {"version": "", "file": "", "build": "", "numpy": "", "cuda": None, "built_for": None,
                "gpu": "", "why": why, "numpy_fault": "", "gpu_fault": ""}


def transient_unit(protections: list[str]) -> tuple[list[str], str]:
    """Return the prefix that runs a command as the service does, and its user and groups; empty if unavailable."""
    if os.geteuid() != 0 or not systemd()["runs"] or run(["systemd-run", "--version"]) is None:
        return [], ""
    names = {group.gr_name for group in grp.getgrall()}
    groups = [name for name in GPU_GROUPS if name in names]
    user = USER if any(entry.pw_name == USER for entry in pwd.getpwall()) else "nobody"
    settings = [f"User={user}", f"SupplementaryGroups={' '.join(groups)}", "Environment=HOME=/tmp",
                f"RuntimeMaxSec={_IMPORT_S}", *protections]
    unit_text = f"user {user}, groups {', '.join(groups)}" if groups else f"user {user}"
    return ["systemd-run", "--quiet", "--pipe", "--wait", "--collect",
            *(f"--property={setting}" for setting in settings), "--"], unit_text


def user_packages() -> dict[str, str]:
    """Return the files of numpy and torch in the ssh user's own site-packages, which no service sees."""
    code = ("import importlib.util, json, site; own = site.getusersitepackages(); "
            "found = {name: importlib.util.find_spec(name) for name in ('numpy', 'torch')}; "
            "print(json.dumps({name: spec.origin for name, spec in found.items() "
            "if spec and str(spec.origin).startswith(own)}))")
    user = os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else ""
    become = ["sudo", "-n", "-H", "-u", user, "--"] if user else []
    completed = run([*become, *code_command(code, python=sys.executable)])
    try:
        files: dict[str, str] = json.loads(completed.stdout)
        return files
    except (AttributeError, ValueError):
        return {}
