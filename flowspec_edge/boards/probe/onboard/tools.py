"""The probe's entry, and what its sections have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_MAX_FILE_BYTES = 1 << 18
_TIMEOUT_S = 20
_DATE = ("date", "+%s.%N")


def answer(sections: dict[str, dict[str, Any]]) -> None:
    """Print one line of JSON: the facts of each section in ``sections``, which has its arguments.

    time     the board's clock before this Python started, which the shell gives as an argument
    seconds  from then to the end, by that clock
    """
    start = float(sys.argv[1] if sys.argv[1:] else output(*_DATE))
    package = __name__.rpartition(".")[0]
    facts = {name: sys.modules[f"{package}.{name}"].facts(**arguments) for name, arguments in sections.items()}
    print(json.dumps({"time": start, "seconds": float(output(*_DATE)) - start, **facts}))


def doing(step: str, seconds: float) -> None:
    """Tell the control host what comes next, and how long that may take: ``commands.Runner`` reads it."""
    print(f"\x1e{seconds:g} {step}", file=sys.stderr, flush=True)


def run(argv: list[str], seconds: float = _TIMEOUT_S) -> Any:
    """Run a command and return its completed process; None if it does not start or exceeds ``seconds``."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def output(*command: str, seconds: float = _TIMEOUT_S) -> str:
    """Return a command's stdout, whatever its exit code; "" if it is missing or hangs."""
    completed = run(list(command), seconds)
    return "" if completed is None else str(completed.stdout)


def assignments(properties_text: str) -> dict[str, str]:
    """Return the lines "NAME=value" of what systemctl and timedatectl show."""
    return dict(line.split("=", 1) for line in properties_text.splitlines() if "=" in line)


def ntp(timedatectl: str) -> str:
    """Return whether NTP keeps the clock, by `timedatectl show`: "yes", "no", or "unknown"."""
    state = assignments(timedatectl).get("NTPSynchronized", "")
    return state if state in ("yes", "no") else "unknown"


def text(path: str) -> str:
    """Read the beginning of a file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def link(path: str) -> str:
    """Return a symbolic link's target; "" if there is none."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def last_line(output_text: str) -> str:
    return ([line.strip() for line in output_text.splitlines() if line.strip()] or [""])[-1]
