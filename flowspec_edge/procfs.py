"""Small files under /proc and /sys, as they come: what is missing or strange is left out.

Knows how the kernel writes them down.  Does not know what they mean.  Nothing here ever fails, for
formats and permissions differ between boards.
"""

from __future__ import annotations

import re
from pathlib import Path

_SIZE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def text(path: Path) -> str:
    """A small file's text; empty if it cannot be read.  The device tree ends texts with a zero."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace").strip("\0 \n\t")
    except OSError:
        return ""


def number(path: Path) -> float | None:
    """A file that is one number."""
    try:
        return float(text(path))
    except ValueError:
        return None


def entries(directory: Path, pattern: str) -> list[Path]:
    """What in a directory has such a name, sorted."""
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def sizes(path: Path) -> dict[str, int]:
    """The lines "Name:  123 kB" (kibibytes, in truth) of a file, in bytes."""
    return {name: int(count) * 1024 for name, count in _SIZE.findall(text(path))}
