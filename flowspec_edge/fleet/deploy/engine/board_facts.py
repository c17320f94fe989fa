"""Reads a board's state for a deployment and prints one line of JSON.

``facts`` pipes this source, after ``transfer/store.py`` and what that imports, into the board's system Python
as root: standard library only, Python 3.8.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from flowspec_edge.fleet.transfer.store import File, lacking, parts_in, sha256_of

_TIMEOUT_S = 60  # for a command
_OURS = re.compile(r"flowspec-(draft|verify@\d+)\.service")


def main(paths: dict[str, str], environment: str, part: list[Any] | None, others: str) -> None:
    """``paths``: of ``fleet.paths``, by name; ``environment``: digest or ""; ``part``: for ``lacking``;
    ``others``: pattern of units to stop first, or ""."""
    begun = time.monotonic()
    if others:
        output("systemctl", "stop", others)
    home, units, models = Path(paths["HOME"]), Path(paths["UNITS"]), Path(paths["MODELS"])
    venvs = {path.name: text(path / ".complete").strip() == path.name for path in children(home / "venvs")}
    facts: dict[str, Any] = {
        "groups": [entry.gr_name for entry in grp.getgrall()], "user": user(paths["USER"]),
        "modes": {path: mode(path) for path in paths.values() if path.startswith("/")},
        "venvs": venvs,
        "wheels": digests(home / "wheels") if environment and not venvs.get(environment) else {},
        "releases": {path.name: {"files": digests(path), "venv": link(path / "venv")} for path in
                     sorted(children(home / "releases"), key=lambda path: -path.stat().st_mtime)},
        "current": link(home / "current"), "previous": link(home / "previous"),
        "units": {path.name: sha256_of(path) for path in units.glob("flowspec-*.service")
                  if path.is_file() and not path.is_symlink()},
        "services": {name: service(name) for name in services(units)},
        "key": sha256(paths["KEY"]), "key_before": sha256(paths["KEY"] + ".old"),
        "public": public(paths["KEY"]), "public_before": public(paths["KEY"] + ".old"),
        "client_key": bool(text(Path(paths["API_KEY"]))),
        "parts": parts_in(models),
        "power": power(paths["POWER_BEFORE"]), "power_unit": power_unit(units / paths["POWER_UNIT"])}
    if part is not None:
        name, files, manifest = part
        facts["missing_bytes"], facts["part_changes"] = lacking(
            models, name, [File(*file) for file in files], manifest)
    facts["ntp"] = output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip() == "yes"
    facts["seconds"] = time.monotonic() - begun
    facts["time"] = float(output("date", "+%s.%N"))
    print(json.dumps(facts))


def output(*command: str) -> str:
    """A command's stdout, whatever its exit code; "" if it is missing or hangs."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, check=False, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def text(path: Path) -> str:
    """A file's content; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def link(path: Path) -> str:
    """A symbolic link's target; "" if there is none."""
    return os.readlink(path) if path.is_symlink() else ""


def children(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []


def sha256(path: str) -> str:
    """An empty text if the file cannot be read."""
    return sha256_of(Path(path)) if os.path.isfile(path) else ""


def digests(directory: Path) -> dict[str, str]:
    """The sha256 of all files below a directory except links, by relative path."""
    return {str(path.relative_to(directory)): sha256_of(path) for path in directory.rglob("*")
            if path.is_file() and not path.is_symlink()}


def mode(path: str) -> str | None:
    """Permissions and owner as for install, "755 root"; None without such a path."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return None
    return f"{state.st_mode & 0o7777:o} {owner(state.st_uid)}"


def owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user(name: str) -> dict[str, Any] | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"home": entry.pw_dir, "shell": entry.pw_shell,
            "groups": [group.gr_name for group in grp.getgrall() if name in group.gr_mem]}


def public(path: str) -> str:
    """The public half in a key file; "" without one."""
    try:
        return str(json.loads(text(Path(path)))["public"])
    except (ValueError, LookupError, TypeError):
        return ""


def services(units: Path) -> list[str]:
    """Units of flowspec's that run, have failed, or start at boot."""
    listed = output("systemctl", "list-units", "--all", "--plain", "--no-legend", "flowspec-*.service")
    names = [line.split()[0] for line in listed.splitlines() if line.split()]
    return [name for name in names + [path.name for path in units.glob("*.wants/flowspec-*")]
            if _OURS.fullmatch(name)]


def service(unit: str) -> dict[str, Any]:
    """``release``: working directory of the process; ``key``: sha256 of the key that it was started with."""
    show = output("systemctl", "show", "--property=ActiveState,MainPID,UnitFileState", unit)
    shown = dict(line.split("=", 1) for line in show.splitlines() if "=" in line)
    process = shown.get("MainPID", "0")
    return {"active": shown.get("ActiveState") == "active",
            "enabled": shown.get("UnitFileState") == "enabled",
            "release": link(Path("/proc", process, "cwd")) if process != "0" else "",
            "key": sha256(f"/run/credentials/{unit}/curve")}


def power(before: str) -> dict[str, Any]:
    query = output("nvpmodel", "-q").split("\n")
    return {"modes": text(Path("/etc/nvpmodel.conf")), "number": [line for line in query if line][-1:],
            "kept": os.path.isdir(before) and bool(os.listdir(before))}


def power_unit(path: Path) -> dict[str, bool]:
    states = [output("systemctl", verb, path.name).strip() for verb in ("is-enabled", "is-active")]
    return {"installed": path.exists(), "runs": states == ["enabled", "active"]}
