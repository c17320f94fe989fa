"""Emulation of a profile's compute, so that one machine shows a cluster's wall-clock time.

A stage computes its segment for real and then waits until the profile's time is over; D0 does the same with
draft passes and lm_head. Messages, tree walks and other bookkeeping add to that, as on boards.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from flowspec_edge.device_profile import Profile
from flowspec_edge.messages import Cancel, Close, Open, Prune, Segment
from flowspec_edge.runtime.virtual.devices import Devices
from flowspec_edge.stage.base import Engine, Poll, Results
from flowspec_edge.stage.rows import without_rows
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.util.bounded_read import read_json

Links = Literal["made", "real"]

_WAKES_LATE_S = 0.0003  # the rest of a wait, which polls the clock


@dataclass(frozen=True)
class Emulation:
    """``links`` "made": the receiver delays messages by the profile's time; "real": messages are padded to
    the profile's bytes, and the network takes its own time."""

    devices: Devices
    links: Links = "made"

    def save(self, path: Path) -> None:
        """Write a JSON file for the stages' processes."""
        d = self.devices
        path.write_text(json.dumps({
            "links": self.links, "name": d.name, "layers": d.layers, "d0": d.d0.model_dump(),
            "stages": [stage.model_dump() for stage in d.stages]}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Emulation:
        data = read_json(path)
        stages = tuple(Profile.model_validate(stage) for stage in data["stages"])
        devices = Devices(Profile.model_validate(data["d0"]), stages, tuple(data["layers"]), data["name"])
        return cls(devices, data["links"])


class Charge(Protocol):
    """Emulated time of a segment of ``rows`` rows, with ``context`` rows in the cache."""

    def begin(self, rows: int, context: int) -> None:
        ...

    def seconds(self, rows: int, context: int) -> float:
        """Return the segment's time since :meth:`begin`; called after the real computation."""


@dataclass(frozen=True)
class ProfileCharge:
    duration: Callable[[int, int], float]  # (rows, context) -> seconds

    def begin(self, rows: int, context: int) -> None:
        pass

    def seconds(self, rows: int, context: int) -> float:
        return self.duration(rows, context)


class EmulatedEngine:
    """An ``Engine`` whose segments take the time of ``charge``. As in virtual time, a cancelled run ends with
    its current layer and yields an empty output."""

    def __init__(self, engine: Engine, charge: Charge, layers: float, cancels_end_segments: bool,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """``layers``: steps between which cancels take effect."""
        self._engine = engine
        self._charge = charge
        self._layers = max(layers, 1.0)
        self._cancels_end_segments = cancels_end_segments
        self._clock = clock
        self._runs: set[tuple[int, int]] = set()  # (session, run) cancelled during the newest pass
        self._overrun_s: dict[int, float] = {}  # by session

    @property
    def counters(self) -> dict[str, float]:
        """Adds ``late_s``: by how much this machine's compute exceeded the emulated time."""
        return {**self._engine.counters, "late_s": sum(self._overrun_s.values())}

    def counters_of(self, session: int) -> dict[str, float]:
        return {**self._engine.counters_of(session), "late_s": self._overrun_s.get(session, 0.0)}

    @property
    def cache_bytes(self) -> int:
        return self._engine.cache_bytes

    def cached(self, session: int) -> int:
        return self._engine.cached(session)

    def open(self, message: Open) -> None:
        self._overrun_s = {n: late for n, late in self._overrun_s.items() if n in message.concurrent}
        self._overrun_s[message.session] = 0.0
        self._engine.open(message)

    def close(self, message: Close) -> None:
        self._engine.close(message)

    def prune(self, message: Prune) -> None:
        self._engine.prune(message)

    def cancel(self, message: Cancel) -> None:
        self._runs.update((message.session, run) for run in message.runs)
        self._engine.cancel(message)

    def admit(self, segment: Segment) -> Segment | None:
        return self._engine.admit(segment)

    def compute(self, admitted: Sequence[Segment], poll: Poll | None = None) -> list[Results]:
        start, rows = self._clock(), sum(len(segment.numbers) for segment in admitted)
        context = sum(self._engine.cached(segment.session) for segment in admitted)
        self._runs.clear()
        self._charge.begin(rows, context)
        skipped = self._engine.counters["cancelled"]
        results = self._engine.compute(admitted, poll)
        if self._engine.counters["cancelled"] == skipped + len(admitted):
            return results
        length = self._charge.seconds(rows, context)
        end = start + length
        late = max(0.0, self._clock() - end)
        for segment in admitted:
            self._overrun_s[segment.session] = self._overrun_s.get(segment.session, 0.0) + late
        while (left := end - self._clock()) > 0:
            if poll is None:
                pause(left)
                continue
            poll(left)
            if not (self._cancels_end_segments and self._runs):
                continue
            cancelled = [(segment.session, segment.run) in self._runs for segment in admitted]
            results = [([], without_rows(results[i][1])) if cancelled[i] else results[i]
                       for i in range(len(admitted))]
            if all(ended or not len(segment.numbers)
                   for ended, segment in zip(cancelled, admitted, strict=True)):
                layer = length / self._layers
                end = min(end, start + math.ceil((self._clock() - start) / layer) * layer)
                self._runs.clear()
        return results


def stage_charge(devices: Devices, parallelism: Parallelism, place: int) -> ProfileCharge:
    """Time of Vi (``place`` = i), in a pipeline or as part of its group."""
    parts = devices.compute_seconds(parallelism)
    return ProfileCharge(parts[place - 1] if parallelism == "pipeline" else parts[0])


def wait_until(start: float, seconds: float) -> float:
    """Wait until ``seconds`` after ``start`` (time.perf_counter); return by how many seconds it was late."""
    left = start + seconds - time.perf_counter()
    pause(left)
    return max(0.0, -left)


def pause(seconds: float) -> None:
    """Sleep, then busy-wait: the system wakes a sleeper some tenths of a millisecond late."""
    end = time.perf_counter() + seconds
    if seconds > _WAKES_LATE_S:
        # Not a wait for an event: the emulated device computes for this time.
        time.sleep(seconds - _WAKES_LATE_S)
    while time.perf_counter() < end:
        pass
