"""Power rails of a board: the INA3221 channels of the kernel's hwmon driver.

Standard library only: it also runs under a board's system Python, before a release is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = "FLOWSPEC_SYSFS"  # environment variable: where /sys and /proc are, for tests
_CHIPS = "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*"
_CHANNELS = (1, 2, 3)  # not the sum of them, in7 and curr4
_NOT_CONNECTED = "NC"
_TOTALS = ("VDD_IN", "VIN")  # each is a whole module, on the boards that have it
_MAX_UW = 10**9  # a reading above is broken: no module draws a kilowatt


class Rail(NamedTuple):
    """Files of a channel's bus voltage in mV and current in mA."""

    voltage: Path
    current: Path


def system_root() -> Path:
    """Directory that contains sys/ and proc/."""
    return Path(os.environ.get(_ROOT, "/"))


def find_rails(root: Path) -> dict[str, Rail]:
    """Map the label of each connected channel of the chips below ``root`` to the channel's files."""
    rails: dict[str, Rail] = {}
    for chip in sorted(root.glob(_CHIPS)):
        for channel in _CHANNELS:
            label = _text(chip / f"in{channel}_label")
            if label and label != _NOT_CONNECTED:
                rails.setdefault(label, Rail(chip / f"in{channel}_input", chip / f"curr{channel}_input"))
    return rails


def total_rails(root: Path, boards: Iterable[tuple[str, Sequence[str]]]) -> tuple[Rail, ...]:
    """Return the rails whose sum is the power of the board below ``root``; () if unknown.

    ``boards``: (part of the device tree's model, labels to sum); on other boards VDD_IN or VIN is the total.
    """
    rails = find_rails(root)
    model = _text(root / "sys/firmware/devicetree/base/model")
    chosen_labels = next((labels for part, labels in boards if part in model), None)
    if chosen_labels is None:
        chosen_labels = [label for label in _TOTALS if label in rails][:1]
    return tuple(rails[label] for label in chosen_labels) if set(chosen_labels) <= set(rails) else ()


def read_watts(rails: Sequence[Rail]) -> float | None:
    """Sum the power of ``rails`` in watts; None without rails, or if one cannot be read."""
    total = 0
    for rail in rails:
        try:  # a current of zero may read as some mA below zero
            microwatts = int(rail.voltage.read_bytes()) * max(0, int(rail.current.read_bytes()))
        except (OSError, ValueError):
            return None
        total += microwatts
    return total / 1e6 if rails and 0 <= total < _MAX_UW else None


def _text(path: Path) -> str:
    """Read a small file without the device tree's final zero byte; "" if that fails."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return ""
