"""A cluster's power and energy, from the counters that its processes report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from flowspec_edge.d0.counters import HeartbeatCounters

POWER = ("watts", "energy_j", "board")  # the keys of ``drivers.observe.power.PowerMeter.read``

Device = TypeVar("Device")


def cluster_energy(processes: Iterable[HeartbeatCounters]) -> tuple[float | None, float | None]:
    """Sum a session's joules, in total and above idle, over the processes' ``SessionEnergy.close``.

    Each board counts once. None if a board is missing: such a sum could not be compared.
    """
    boards: dict[float, HeartbeatCounters] = {}
    for energy in processes:
        if not {"session_j", "board"} <= energy.keys():
            return None, None
        boards.setdefault(energy["board"], energy)
    above = [energy.get("session_above_idle_j") for energy in boards.values()]
    measured = [joules for joules in above if joules is not None]
    joules = sum(energy["session_j"] for energy in boards.values())
    return joules, sum(measured) if len(measured) == len(above) else None


def once_per_board(devices: dict[Device, HeartbeatCounters]) -> dict[Device, HeartbeatCounters]:
    """Keep each board's power and energy only at its first device."""
    boards: set[float] = set()
    counters_by_device = {}
    for device, counters in devices.items():
        again = counters.get("board", -1.0) in boards
        boards |= {counters["board"]} if "board" in counters else set()
        counters_by_device[device] = {k: v for k, v in counters.items() if k not in POWER} if again else counters
    return counters_by_device
