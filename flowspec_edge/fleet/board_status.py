"""What a board says of its release and its service: a line of JSON.

Runs on a board by the system's own Python, before anything of ours is there, too: the standard library
alone.  Knows systemd's properties and the links below /opt/flowspec.  Does not know the other boards.

    python3 board_status.py HOME PORT    (its text comes on standard input: python3 - HOME PORT)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

_PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "Result", "NRestarts", "StatusText",
               "ActiveEnterTimestamp", "UnitFileState")
_ASK_S = 5


def read_release(link: str) -> Any:
    """What the release behind ``link`` says of itself; None if there is none, or it is not whole."""
    try:
        with open(os.path.join(link, "release.json"), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def unit_of(release: dict[str, Any]) -> str:
    """The service that a release runs on its board."""
    return ("flowspec-draft.service" if release["role"] == "draft" else
            f"flowspec-verify@{release['stage']}.service")


def show(unit: str) -> dict[str, Any]:
    """systemd's properties of a unit."""
    done = subprocess.run(["systemctl", "show", unit, "--property=" + ",".join(_PROPERTIES)],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    said = ""
    if found.get("ActiveState") in ("failed", "activating"):
        said = last_words(unit)
    return {"unit": unit, "load": found.get("LoadState", ""), "state": found.get("ActiveState", "unknown"),
            "sub": found.get("SubState", ""), "result": found.get("Result", ""),
            "restarts": int(found.get("NRestarts") or 0), "status": found.get("StatusText", ""),
            "since": found.get("ActiveEnterTimestamp", ""), "enabled": found.get("UnitFileState", ""),
            "said": said}


def last_words(unit: str) -> str:
    """The last line that the unit's own program wrote."""
    done = subprocess.run(["journalctl", "--unit", unit, "--lines", "20", "--output", "json", "--no-pager"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE")
        if entry.get("_SYSTEMD_UNIT") == unit and isinstance(message, str) and message.strip():
            return message.strip()
    return ""


def ask_ready(port: int) -> Any:
    """What the draft service's /ready says; the reason in words if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=_ASK_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        try:
            return json.loads(error.read())
        except ValueError:
            return {"ready": False, "reason": f"HTTP {error.code}"}
    except (OSError, ValueError) as error:
        return {"ready": False, "reason": f"no answer on port {port}: {error}"}


def main(home: str, port: int) -> None:
    """Print it."""
    current = read_release(os.path.join(home, "current"))
    told = {"current": current, "previous": read_release(os.path.join(home, "previous")), "unit": None,
            "ready": None}
    if current is not None:
        told["unit"] = show(unit_of(current))
        if current["role"] == "draft":
            told["ready"] = ask_ready(port)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
