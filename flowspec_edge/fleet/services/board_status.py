"""Reads a board's release and the state of its service.

``status`` pipes this source into the board's system Python, which works without a release: standard library
only, Python 3.8.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.error
import urllib.request
from typing import Any

_PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "Result", "NRestarts", "StatusText",
               "ActiveEnterTimestamp", "UnitFileState")
_ASK_S = 5
_COMMAND_S = 20


def read_release(link: str) -> Any:
    """The release.json behind ``link``; None if it is missing or damaged."""
    try:
        with open(os.path.join(link, "release.json"), encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError):
        return None
    whole = (isinstance(told, dict) and isinstance(told.get("id"), str)
             and told.get("role") in ("draft", "verify") and isinstance(told.get("stage"), int))
    return told if whole else None


def unit_of(release: dict[str, Any]) -> str:
    return ("flowspec-draft.service" if release["role"] == "draft" else
            f"flowspec-verify@{release['stage']}.service")


def output(*command: str) -> str:
    """A command's stdout, whatever its exit code; "" if it is missing or hangs."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, check=False, timeout=_COMMAND_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def show(unit: str) -> dict[str, Any]:
    shown = output("systemctl", "show", unit, "--property=" + ",".join(_PROPERTIES))
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    said = ""
    if found.get("ActiveState") in ("failed", "activating"):
        said = last_words(unit)
    return {"unit": unit, "load": found.get("LoadState", ""), "state": found.get("ActiveState", "unknown"),
            "sub": found.get("SubState", ""), "result": found.get("Result", ""),
            "restarts": int(found.get("NRestarts") or 0), "status": found.get("StatusText", ""),
            "since": found.get("ActiveEnterTimestamp", ""), "enabled": found.get("UnitFileState", ""),
            "said": said}


def last_words(unit: str) -> str:
    """The last line that the unit's own program logged."""
    told = output("journalctl", "--unit", unit, "--lines", "20", "--output", "json", "--no-pager")
    for line in reversed(told.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE")
        if entry.get("_SYSTEMD_UNIT") == unit and isinstance(message, str) and message.strip():
            return message.strip()
    return ""


def read_key(path: str) -> str:
    """The clients' API key, which only root can read; "" if that fails."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except PermissionError:
        return output("sudo", "-n", "cat", path).strip()
    except (OSError, ValueError):
        return ""


def ask_ready(host: str, port: int, api_key: str, key: str = "") -> Any:
    """The draft service's answer to /ready, or the reason why there is none; ``api_key`` is a file."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores the board's proxy
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        name = f"[{host}]" if ":" in host else host
        asked = urllib.request.Request(f"http://{name}:{port}/ready", headers=headers)
        with direct.open(asked, timeout=_ASK_S) as answer:
            told = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            if not key and (found := read_key(api_key)):
                return ask_ready(host, port, api_key, found)
            return {"ready": False, "reason": f"the service on port {port} refuses the key in {api_key}"}
        told = error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"ready": False, "reason": f"no answer on port {port}: {error}"}
    try:
        state: Any = json.loads(told)
    except ValueError:
        state = None
    if isinstance(state, dict) and isinstance(state.get("ready"), bool):
        return state
    return {"ready": False, "reason": f"what answers on port {port} is no draft service"}


def read_text(path: str) -> str:
    """"" for a file that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def describe(home: str, host: str, port: int, api_key: str) -> dict[str, Any]:
    """For JSON: ``current`` and ``previous`` are release.json, ``ready`` is /ready; any value may be None."""
    current = read_release(os.path.join(home, "current"))
    told: dict[str, Any] = {
        "current": current, "previous": read_release(os.path.join(home, "previous")),
        "unsettled": read_text(os.path.join(home, "unsettled")), "unit": None, "ready": None}
    if current is not None:
        told["unit"] = show(unit_of(current))
        if current["role"] == "draft":
            told["ready"] = ask_ready(host, port, api_key)
    return told
