"""The section "service": a board's release, the state of its service, and its power."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from flowspec_edge.boards.paths import API_KEY, CURRENT, GOING_BACK, PREVIOUS, UNSETTLED, UNTRIED, unit_of
from flowspec_edge.boards.probe.onboard.tools import assignments, output, text
from flowspec_edge.drivers.observe.power_rails import read_watts, system_root, total_rails

_PROPERTIES = ("ActiveState", "NRestarts", "StatusText", "ActiveEnterTimestamp")
_ASK_S = 5


def facts(host: str, port: int, rails: list[Any]) -> dict[str, Any]:
    """Return the fields of ``probe.facts.BoardStatus``; ``current`` and ``previous`` are release.json or None.

    host, port  where the draft service answers
    rails       for ``total_rails``
    """
    current = read_release(CURRENT)
    mark = text(UNSETTLED).strip()
    status = {"state": "absent"} if current is None else show(unit_of(current["role"], current["stage"]))
    if current is not None and current["role"] == "draft":
        answer = ask_ready(host, port, API_KEY)
        status.update(ready=answer["ready"], reason=answer.get("reason") or "")
    return {**status, "current": current, "previous": read_release(PREVIOUS),
            "going_back": mark[len(GOING_BACK):] if mark.startswith(GOING_BACK) else "",
            "watts": read_watts(total_rails(system_root(), rails))}


def read_release(link: str) -> Any:
    """Read the release.json behind ``link``, and "tried"; None if it is missing or damaged."""
    try:
        with open(os.path.join(link, "release.json"), encoding="utf-8") as file:
            release = json.load(file)
    except (OSError, ValueError):
        return None
    is_whole = (isinstance(release, dict) and isinstance(release.get("id"), str)
                and release.get("role") in ("draft", "verify") and isinstance(release.get("stage"), int))
    return {**release, "tried": not os.path.exists(os.path.join(link, UNTRIED))} if is_whole else None


def show(unit: str) -> dict[str, Any]:
    properties = assignments(output("systemctl", "show", unit, "--property=" + ",".join(_PROPERTIES)))
    state = properties.get("ActiveState", "unknown")
    return {"state": state, "restarts": int(properties.get("NRestarts") or 0),
            "status": properties.get("StatusText", ""), "since": properties.get("ActiveEnterTimestamp", ""),
            "said": last_words(unit) if state in ("failed", "activating") else ""}


def last_words(unit: str) -> str:
    """Return the last line that the unit's own program logged."""
    entries = output("journalctl", "--unit", unit, "--lines", "20", "--output", "json", "--no-pager")
    for line in reversed(entries.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE")
        if entry.get("_SYSTEMD_UNIT") == unit and isinstance(message, str) and message.strip():
            return message.strip()
    return ""


def read_key(path: str) -> str:
    """Read the first of the clients' API keys, one a line, which only root can read; "" if that fails."""
    try:
        with open(path, encoding="ascii") as file:
            keys = file.read()
    except PermissionError:
        keys = output("sudo", "-n", "cat", path)
    except (OSError, ValueError):
        return ""
    return keys.strip().partition("\n")[0].strip()


def ask_ready(host: str, port: int, api_key: str, key: str = "") -> Any:
    """Return the draft service's answer to /ready, or the reason why there is none; ``api_key`` is a file."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores the board's proxy
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        name = f"[{host}]" if ":" in host else host
        http_request = urllib.request.Request(f"http://{name}:{port}/ready", headers=headers)
        with direct.open(http_request, timeout=_ASK_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            if not key and (stored_key := read_key(api_key)):
                return ask_ready(host, port, api_key, stored_key)
            return {"ready": False, "reason": f"the service on port {port} refuses the key in {api_key}"}
        body = error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"ready": False, "reason": f"no answer on port {port}: {error}"}
    try:
        state: Any = json.loads(body)
    except ValueError:
        state = None
    if isinstance(state, dict) and isinstance(state.get("ready"), bool):
        return state
    return {"ready": False, "reason": f"what answers on port {port} is no draft service"}
