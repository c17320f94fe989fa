"""The probe of a bare board: prints its facts as one JSON object, and changes nothing.

``facts`` pipes this file and ``system`` into the board's own Python.  Both need only the standard library and
Python 3.8, so that the probe can report that a board's Python is too old.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import socket
import sys
import time
from typing import Any

from flowspec_edge.fleet.probe.system import (
    foreign_holders,
    gpu,
    last_line,
    network,
    run,
    system_facts,
    systemd,
)

GPU_GROUPS = ("video", "render")  # whose members may use a Tegra's GPU; not every release has both
_USER = "flowspec"  # the services'; the first `deploy up` creates it
_IMPORT_S = 240  # a small board reads torch from its SD card


def main(address: str, paths: list[str], ports: list[int], now: float, torch_check: dict[str, Any]) -> None:
    """Print the facts.

    paths  directories that will be written to
    ports  TCP ports that will be listened on
    now    the board's time.time() when this program began
    """
    begun = time.monotonic()
    system = system_facts(paths)
    facts = {
        **system, "time": now, "ntp": ntp(system["timedatectl"]), "hostname": socket.gethostname(),
        "user": pwd.getpwuid(os.getuid()).pw_name, "sudo": why_not_root(),
        "python": list(sys.version_info[:3]), "machine": os.uname().machine, "torch": torch(torch_check),
        "network": network(address), "ports": foreign_holders(ports)}
    facts["seconds"] = time.monotonic() - begun
    print(json.dumps(facts))


def ntp(timedatectl: str) -> str:
    """Whether NTP keeps the clock, by `timedatectl show`: "yes", "no", or "unknown"."""
    said = dict(line.split("=", 1) for line in timedatectl.splitlines() if "=" in line)
    state = said.get("NTPSynchronized", "")
    return state if state in ("yes", "no") else "unknown"


def why_not_root() -> str:
    """Why this user cannot become root without a password; "" if they can."""
    if os.geteuid() == 0:
        return ""
    done = run(["sudo", "-n", "true"])
    if done is None:
        return "there is no sudo"
    return "" if done.returncode == 0 else last_line(done.stderr) or "sudo -n true fails"


def torch(wanted: dict[str, Any]) -> dict[str, Any]:
    """The facts of ``torch_check``, for the torch that this Python imports for every user (-s).

    Runs in a transient unit with the service's groups and sandboxing, if root and systemd are available.
    ``wanted``: program (``torch_check`` with a call of its main), device, protections (lines of the unit).
    Further facts:

    unit     the transient unit's user and groups in words; "" without one
    outside  the same facts without the unit, if the check fails inside it; else None
    own      {"torch": its file} for packages of the ssh user alone, if the import fails
    """
    python = [sys.executable, "-s", "-c", wanted["program"]]
    unit, described = transient_unit(wanted["protections"])
    found = run_torch_check([*unit, *python])
    outside = None
    unseen = wanted["device"] != "cpu" and gpu() and not found["cuda"]
    if unit and (found["why"] or found["numpy_fault"] or found["gpu_fault"] or unseen):
        outside = run_torch_check(python)
    return {**found, "unit": described, "outside": outside, "own": user_packages() if found["why"] else {}}


def run_torch_check(command: list[str]) -> dict[str, Any]:
    done = run(command, _IMPORT_S)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (AttributeError, LookupError, ValueError):
        if done is not None and done.returncode == -signal.SIGKILL:
            why = "MemoryError: the kernel killed the process, as it does when memory runs out"
        else:
            why = f"importing it took more than {_IMPORT_S} s" if done is None else (
                last_line(done.stderr) or f"importing it ends with {done.returncode}")
        return {"version": "", "file": "", "build": "", "numpy": "", "cuda": None, "built_for": None,
                "gpu": "", "why": why, "numpy_fault": "", "gpu_fault": ""}


def transient_unit(protections: list[str]) -> tuple[list[str], str]:
    """The prefix that runs a command as the service does, and its user and groups; empty if unavailable."""
    if os.geteuid() != 0 or not systemd()["runs"] or run(["systemd-run", "--version"]) is None:
        return [], ""
    names = {group.gr_name for group in grp.getgrall()}
    groups = [name for name in GPU_GROUPS if name in names]
    user = _USER if any(entry.pw_name == _USER for entry in pwd.getpwall()) else "nobody"
    settings = [f"User={user}", f"SupplementaryGroups={' '.join(groups)}", "Environment=HOME=/tmp",
                f"RuntimeMaxSec={_IMPORT_S}", *protections]
    described = f"user {user}, groups {', '.join(groups)}" if groups else f"user {user}"
    return ["systemd-run", "--quiet", "--pipe", "--wait", "--collect",
            *(f"--property={setting}" for setting in settings), "--"], described


def user_packages() -> dict[str, str]:
    """The files of numpy and torch in the ssh user's own site-packages, which no service sees."""
    code = ("import importlib.util, json, site; own = site.getusersitepackages(); "
            "found = {name: importlib.util.find_spec(name) for name in ('numpy', 'torch')}; "
            "print(json.dumps({name: spec.origin for name, spec in found.items() "
            "if spec and str(spec.origin).startswith(own)}))")
    user = os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else ""
    become = ["sudo", "-n", "-H", "-u", user, "--"] if user else []
    done = run([*become, sys.executable, "-c", code])
    try:
        found: dict[str, str] = json.loads(done.stdout)
        return found
    except (AttributeError, ValueError):
        return {}
