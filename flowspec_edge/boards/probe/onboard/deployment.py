"""The section "deployment": what of flowspec is on a board.  It needs root."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

from flowspec_edge.boards.paths import (
    API_KEY,
    CACHE,
    CURRENT,
    ETC,
    FORMER_KEY,
    HOME,
    IMAGE_NAME,
    KEY,
    MODELS,
    POWER_BEFORE,
    POWER_UNIT,
    PREVIOUS,
    RELEASES,
    STATE,
    UNITS,
    UNSETTLED,
    UNTRIED,
    USER,
    VENVS,
    WHEELS,
)
from flowspec_edge.boards.probe.onboard.tools import assignments, link, ntp, output, text
from flowspec_edge.boards.transfer.store import File, lacking, parts_in, sha256_of

_STOP_S = 60
_PLACES = (HOME, RELEASES, VENVS, WHEELS, STATE, MODELS, CACHE, ETC, UNSETTLED, FORMER_KEY)
_OURS = re.compile(r"flowspec-(draft|verify@\d+)\.service")


def facts(environment: str, part: list[Any] | None, others: str, in_image: bool) -> dict[str, Any]:
    """Return the fields of ``probe.facts.BoardFacts``.

    environment  its digest; ""
    part         for ``lacking``
    others       pattern of units to stop first; ""
    in_image     whether a release is to run in an image
    """
    if others:
        output("systemctl", "stop", others, seconds=_STOP_S)
    home, units, models = Path(HOME), Path(UNITS), Path(MODELS)
    venvs = {path.name: text(f"{path}/.complete").strip() == path.name for path in children(home / "venvs")}
    venv_images = {name: image for name in venvs if (image := image_of(f"{VENVS}/{name}/image.json"))}
    fields: dict[str, Any] = {
        "ntp": ntp(output("timedatectl", "show")),
        "groups": [entry.gr_name for entry in grp.getgrall()], "user": user(USER),
        "modes": {path: mode(path) for path in _PLACES},
        "venvs": venvs,
        "venv_images": venv_images,
        "images": images() if in_image or venv_images else [],  # asking may start Docker
        "wheels": digests(home / "wheels") if environment and not venvs.get(environment) else {},
        "releases": {path.name: {"files": digests(path), "venv": link(f"{path}/venv")} for path in
                     sorted(children(home / "releases"), key=lambda path: -path.stat().st_mtime)},
        "current": link(CURRENT), "previous": link(PREVIOUS),
        "units": {path.name: sha256_of(path) for path in units.glob("flowspec-*.service")
                  if path.is_file() and not path.is_symlink()},
        "services": {name: service(name) for name in services(units)},
        "publics": publics(KEY),
        "client_key": bool(text(API_KEY)), "parts": parts_in(models), **power()}
    if part is not None:
        name, files, manifest = part
        fields["missing_bytes"], fields["part_changes"] = lacking(
            models, name, [File(*file) for file in files], manifest)
    return fields


def children(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []


def digests(directory: Path) -> dict[str, str]:
    """Return the sha256 of all files below a directory except links and ``UNTRIED``, by relative path."""
    return {str(path.relative_to(directory)): sha256_of(path) for path in directory.rglob("*")
            if path.is_file() and not path.is_symlink() and path != directory / UNTRIED}


def images() -> list[str]:
    return output("docker", "images", "--format={{.Tag}}", IMAGE_NAME).split()


def image_of(path: str) -> str:
    """Return the tag of the image that an environment runs; "" if it runs none."""
    try:
        return str(json.loads(text(path))["image"]).rpartition(":")[2]
    except (ValueError, LookupError, TypeError):
        return ""


def mode(path: str) -> str | None:
    """Return the permissions and owner of ``path`` as for install, "755 root"; None without such a path."""
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


def publics(path: str) -> list[str]:
    """Return the public keys of a key file (``transport.keys``); none without one, or if it is damaged."""
    try:
        data = json.loads(text(path))
        return [str(pair["public"]) for pair in [data, *data.get("newer", [])]]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def services(units: Path) -> list[str]:
    """Return the units of flowspec's that run, have failed, or start at boot."""
    unit_list = output("systemctl", "list-units", "--all", "--plain", "--no-legend", "flowspec-*.service")
    names = [line.split()[0] for line in unit_list.splitlines() if line.split()]
    return [name for name in names + [path.name for path in units.glob("*.wants/flowspec-*")]
            if _OURS.fullmatch(name)]


def service(unit: str) -> dict[str, Any]:
    """Return the state of a unit; ``release`` is the working directory of its process."""
    properties = assignments(output("systemctl", "show", "--property=ActiveState,MainPID,UnitFileState", unit))
    process = properties.get("MainPID", "0")
    return {"active": properties.get("ActiveState") == "active",
            "enabled": properties.get("UnitFileState") == "enabled",
            "release": link(f"/proc/{process}/cwd") if process != "0" else ""}


def power() -> dict[str, Any]:
    query = [line for line in output("nvpmodel", "-q").split("\n") if line]
    states = [output("systemctl", verb, POWER_UNIT).strip() for verb in ("is-enabled", "is-active")]
    return {"power_modes": text("/etc/nvpmodel.conf"), "power_number": "".join(query[-1:]),
            "power_kept": os.path.isdir(POWER_BEFORE) and bool(os.listdir(POWER_BEFORE)),
            "power_unit_installed": os.path.exists(f"{UNITS}/{POWER_UNIT}"),
            "power_unit_runs": states == ["enabled", "active"]}
