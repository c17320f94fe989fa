"""Small files under /proc and /sys.  Nothing raises: a missing or malformed file gives an empty result.

Sent to boards with the probe: standard library only, Python 3.8.
"""

from __future__ import annotations

import re
from pathlib import Path

_SIZE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def text(path: Path) -> str:
    """Without the trailing NUL of device-tree strings."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace").strip("\0 \n\t")
    except OSError:
        return ""


def number(path: Path) -> float | None:
    try:
        return float(text(path))
    except ValueError:
        return None


def entries(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def sizes(path: Path) -> dict[str, int]:
    """Return the lines "Name:  123 kB" of a file, in bytes; the kernel's kB are KiB."""
    return {name: int(count) * 1024 for name, count in _SIZE.findall(text(path))}
