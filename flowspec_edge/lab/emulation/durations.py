"""Emulation of a profile's compute, so that one machine shows a cluster's wall-clock time.

A stage computes its segment for real and then waits until the profile's time is over; D0 does the same with
draft passes and lm_head. Messages, tree walks and other bookkeeping add to that, as on boards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.util.bounded_read import read_bytes

Links = Literal["made", "real"]

_WAKES_LATE_S = 0.0003  # the rest of a wait, which polls the clock


@dataclass(frozen=True)
class Emulation:
    """What is emulated, and how.

    links  "made": the receiver delays messages by the profile's time; "real": messages are padded to the
           profile's bytes, and the network takes its own time
    """

    devices: Devices
    links: Links = "made"

    def charge(self, stage: int) -> Charge:
        """Return the time of a pass of Vi (``stage`` = i)."""
        return Charge(lambda rows, context, alike: self.devices.stage_seconds(stage, rows, context, alike=alike),
                      self.devices.layers[stage - 1])

    def save(self, path: Path) -> None:
        """Write a JSON file for the stages' processes."""
        path.write_bytes(TypeAdapter(Emulation).dump_json(self))

    @classmethod
    def load(cls, path: Path) -> Emulation:
        return TypeAdapter(Emulation).validate_json(read_bytes(path))


def wait_until(start: float, seconds: float) -> float:
    """Wait until ``seconds`` after ``start`` (time.perf_counter); return by how many seconds it was late."""
    remaining = start + seconds - time.perf_counter()
    pause(remaining)
    return max(0.0, -remaining)


def pause(seconds: float) -> None:
    """Sleep, then busy-wait: the system wakes a sleeper some tenths of a millisecond late."""
    end = time.perf_counter() + seconds
    if seconds > _WAKES_LATE_S:
        time.sleep(seconds - _WAKES_LATE_S)  # no event: the emulated device computes for this time
    while time.perf_counter() < end:
        pass
