"""What a bare board is like, looked at and not touched: a line of JSON.

Runs by the board's own Python, before anything of ours is there: the standard library alone, and no newer
than Python 3.8, so that a board that is too old can say so.  Its text comes on standard input, followed by
a call of ``main``.  Knows the kernel's files, systemd's and sudo's answers.  Does not judge.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from typing import Any

_ASK_S = 20
_IMPORT_S = 240  # a small board reads torch from its card
_UNITS = ["flowspec-draft.service", "flowspec-verify@*.service"]
_LISTENS = "0A"


def main(paths: list[str], ports: list[int], now: float) -> None:
    """``paths``: where bytes are to be written; ``ports``: that are to be listened on; ``now``: when this
    program began."""
    begun = time.monotonic()
    own = own_processes()
    facts = {
        "time": now, "user": pwd.getpwuid(os.getuid()).pw_name, "sudo": why_not_root(),
        "python": list(sys.version_info[:3]), "machine": os.uname().machine,
        "l4t": text("/etc/nv_tegra_release"), "systemd": systemd(), "torch": torch(),
        "disks": {path: disk(path) for path in paths}, "memory": memory(own),
        "ports": {port: holder for port, holder in holders(ports).items()
                  if not isinstance(holder[0], int) or holder[0] not in own}}
    facts["seconds"] = time.monotonic() - begun
    print(json.dumps(facts))


def why_not_root() -> str:
    """Why whoever runs this cannot become root without a password; "" if that works."""
    if os.geteuid() == 0:
        return ""
    done = run(["sudo", "-n", "true"])
    if done is None:
        return "there is no sudo"
    return "" if done.returncode == 0 else last_line(done.stderr) or "sudo -n true fails"


def systemd() -> dict[str, Any]:
    """Its version, 0 without one, and whether it is what runs the board."""
    done = run(["systemctl", "--version"])
    words = done.stdout.split() if done and done.returncode == 0 else []
    version = words[1] if len(words) > 1 and words[1].isdigit() else "0"
    return {"version": int(version), "runs": os.path.isdir("/run/systemd/system")}


def torch() -> dict[str, Any]:
    """The version of the torch that this Python imports, or why it imports none; and under ``cuda`` the GPU's
    compute capability, [8, 7] for Orin, or None where it sees none."""
    ask = ("import json, numpy, torch; gpu = torch.cuda.is_available(); "
           "print(json.dumps(torch.cuda.get_device_capability() if gpu else None)); print(torch.__version__)")
    done = run([sys.executable, "-c", ask], _IMPORT_S)
    if done is None:
        return {"version": "", "cuda": None, "why": f"importing it took more than {_IMPORT_S} s"}
    if done.returncode:
        return {"version": "", "cuda": None,
                "why": last_line(done.stderr) or f"importing it ends with {done.returncode}"}
    cuda, version = done.stdout.strip().splitlines()[-2:]
    return {"version": version, "cuda": json.loads(cuda), "why": ""}


def disk(path: str) -> dict[str, Any]:
    """The file system that ``path`` is or will be on: its device, free bytes, whether it can be written."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    state = os.statvfs(path)
    return {"device": os.stat(path).st_dev, "free": state.f_bavail * state.f_frsize,
            "writable": not state.f_flag & os.ST_RDONLY}


def memory(own: set[int]) -> dict[str, int]:
    """Bytes that the system has and that are available, and those that our own services hold."""
    found = sizes("/proc/meminfo")
    held = sum(sizes(f"/proc/{pid}/status").get("RssAnon", 0) for pid in own)
    return {"total": found.get("MemTotal", 0), "available": found.get("MemAvailable", 0),
            "held": held + shared_with_gpu(own)}


def shared_with_gpu(own: set[int]) -> int:
    """Bytes of a Jetson's GPU buffers, which no process' size shows; root alone may see them."""
    held = 0
    for line in text("/sys/kernel/debug/nvmap/iovmm/clients").splitlines():
        words = line.split()  # CLIENT PROCESS PID SIZE
        if len(words) >= 4 and words[2].isdigit() and int(words[2]) in own and words[3][:-1].isdigit():
            held += int(words[3][:-1]) * 1024
    return held


def own_processes() -> set[int]:
    """Those of our services that run."""
    done = run(["systemctl", "show", "--property=ControlGroup", *_UNITS])
    found = set()
    for line in done.stdout.splitlines() if done else []:
        group = line.partition("=")[2]
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):  # the unified hierarchy, and the one before
            if group:
                found |= {int(pid) for pid in text(f"{root}{group}/cgroup.procs").split()}
    return found


def holders(ports: list[int]) -> dict[int, tuple[Any, str]]:
    """Port -> process and name of who listens on it, of those that somebody does; (None, "") if only
    root may know."""
    inodes = {}
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in text(name).splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            if words[3] == _LISTENS and port in ports:
                inodes[words[9]] = port
    found: dict[int, tuple[Any, str]] = dict.fromkeys(inodes.values(), (None, ""))
    for entry in os.listdir("/proc") if inodes else []:
        for inode in sockets(entry) & set(inodes) if entry.isdigit() else set():
            found[inodes[inode]] = (int(entry), text(f"/proc/{entry}/comm").strip())
    return found


def sockets(pid: str) -> set[str]:
    """The inodes of a process' sockets, as far as we may look."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found


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
    """A file's text; "" without one."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def last_line(said: str) -> str:
    """The last line that says anything."""
    return ([line.strip() for line in said.splitlines() if line.strip()] or [""])[-1]


def run(argv: list[str], seconds: int = _ASK_S) -> Any:
    """A command's end; None if it does not start, or does not end."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
