"""What a bare board is: a line of JSON.

Runs on a board by the system's own Python, before anything of ours is there: the standard library alone,
and torch if it is there.  Knows where to look, and sends L4T's and Linux's files as they are.  Does not
know what they mean (``board``).

    python3 survey_probe.py ADDRESS STORAGE    (its text comes on standard input: python3 - …)
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import struct
import sys
from typing import Any

# What ``board.read_board`` reads, below the file system's root.
FILES = ("etc/nv_tegra_release", "proc/device-tree/model", "proc/cpuinfo", "proc/meminfo",
         "etc/nvpmodel.conf", "var/lib/nvpmodel/status")
_GPUS = ("/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvidia0")  # Tegra's, older and newer, and a card's
_MOST = 1 << 18  # bytes of a file
_SIOCGIFADDR = 0x8915


def text(path: str) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def addresses() -> dict[str, str]:
    """The IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface(wanted: str) -> str:
    """The interface with the address ``wanted``, or with the one that ssh came in by; "" if none has."""
    came_in = os.environ.get("SSH_CONNECTION", "").split()
    for address in (wanted, *came_in[2:3]):
        for name, own in addresses().items():
            if own == address:
                return name
    return ""


def torch() -> dict[str, Any]:
    """Its version, and whether it sees a GPU; why it cannot be imported; None where it is not there."""
    try:
        import torch as found
    except ModuleNotFoundError:
        return {"version": None, "cuda": False, "error": ""}
    except Exception as error:  # a library of CUDA's that is missing is an OSError, and others have been seen
        return {"version": None, "cuda": False, "error": " ".join(str(error).split()) or type(error).__name__}
    return {"version": found.__version__, "cuda": bool(found.cuda.is_available()), "error": ""}


def disk_free(path: str) -> int:
    """Bytes where ``path`` will be."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def main(address: str, storage: str) -> None:
    """Print it."""
    told = {
        "hostname": socket.gethostname(), "arch": platform.machine(), "python": platform.python_version(),
        "files": {path: text("/" + path) for path in FILES}, "interface": interface(address),
        "disk_free": disk_free(storage), "gpu": any(os.path.exists(path) for path in _GPUS),
        "torch": torch()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
