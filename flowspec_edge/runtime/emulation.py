"""Emulation: real processes that take a profile's time, so that one machine shows a cluster's wall clock.

A stage computes its segment for real and then waits until the profile's time for it is over; D0
does the same with its passes and with lm_head.  What the devices do beside that (messages, walks,
bookkeeping beyond the profile's) comes on top, as it would on boards.  Knows what is charged and how
a wait stays awake for control messages.  Does not know links (``emulated_links``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from flowspec_edge.config import Profile
from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment, Tap
from flowspec_edge.runtime.devices import Devices
from flowspec_edge.runtime.engine import Engine, Poll
from flowspec_edge.stage.rows import emptied
from flowspec_edge.strategies.base import Parallelism

Links = Literal["made", "real"]

_WAKES_LATE_S = 0.0003  # what is left of a wait then is spent looking at the clock


@dataclass(frozen=True)
class Emulation:
    """What processes pretend to be.

    links  "made": messages take the profile's time, made up by holding them back at the receiver;
           "real": messages are padded to the profile's bytes, and the network takes its own time
    """

    devices: Devices
    links: Links = "made"

    def save(self, path: Path) -> None:
        """Write what :meth:`load` reads, for the stages' processes."""
        d = self.devices
        path.write_text(json.dumps({
            "links": self.links, "name": d.name, "layers": d.layers, "d0": d.d0.model_dump(),
            "stages": [stage.model_dump() for stage in d.stages]}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Emulation:
        """The inverse of :meth:`save`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        stages = tuple(Profile.model_validate(stage) for stage in data["stages"])
        devices = Devices(Profile.model_validate(data["d0"]), stages, tuple(data["layers"]), data["name"])
        return cls(devices, data["links"])


class Charge(Protocol):
    """What a segment of ``rows`` rows costs, with ``context`` rows in the cache."""

    def begin(self, rows: int, context: int) -> None:
        """Its computing begins."""

    def seconds(self, rows: int, context: int) -> float:
        """How long it has to take from there; asked when it is computed."""


@dataclass(frozen=True)
class ProfileCharge:
    """What virtual time charges for it."""

    of: Callable[[int, int], float]  # of (rows, context)

    def begin(self, rows: int, context: int) -> None:
        """Nothing is to be prepared."""

    def seconds(self, rows: int, context: int) -> float:
        """See :class:`Charge`."""
        return self.of(rows, context)


class EmulatedEngine:
    """An engine whose segments take the time that ``charge`` says; implements ``Engine``.

    As in virtual time, a cancelled run ends with the layer that it is in, and comes out empty.
    """

    def __init__(self, engine: Engine, charge: Charge, layers: float, breaks_off: bool,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """``layers``: steps between which a cancel is seen; ``breaks_off``: whether cancels count."""
        self._engine = engine
        self._charge = charge
        self._layers = max(layers, 1.0)
        self._breaks_off = breaks_off
        self._clock = clock
        self._runs: set[tuple[int, int]] = set()  # (session, run) cancelled while the newest was on
        self._late_s: dict[int, float] = {}  # by session

    @property
    def counters(self) -> dict[str, float]:
        """The engine's, and how much longer than it should this machine took to compute."""
        return {**self._engine.counters, "late_s": sum(self._late_s.values())}

    def counters_of(self, session: int) -> dict[str, float]:
        """See :class:`Engine`, and so for all that follows."""
        return {**self._engine.counters_of(session), "late_s": self._late_s.get(session, 0.0)}

    @property
    def cache_bytes(self) -> int:
        return self._engine.cache_bytes

    def cached(self, session: int) -> int:
        return self._engine.cached(session)

    def open(self, message: Open) -> None:
        self._late_s = {n: late for n, late in self._late_s.items() if n in message.beside}
        self._late_s[message.session] = 0.0
        self._engine.open(message)

    def close(self, message: Close) -> None:
        self._engine.close(message)

    def prune(self, message: Prune) -> None:
        self._engine.prune(message)

    def cancel(self, message: Cancel) -> None:
        self._runs.update((message.session, run) for run in message.runs)
        self._engine.cancel(message)

    def admit(self, segment: Segment) -> Segment | None:
        self._runs.clear()
        return self._engine.admit(segment)

    def compute(self, admitted: Segment, poll: Poll | None = None) -> tuple[list[Tap], Segment | Output]:
        start, rows, context = self._clock(), len(admitted.numbers), self._engine.cached(admitted.session)
        self._charge.begin(rows, context)
        skipped = self._engine.counters["cancelled"]
        taps, result = self._engine.compute(admitted, poll)
        if self._engine.counters["cancelled"] > skipped:
            return taps, result
        length = self._charge.seconds(rows, context)
        end = start + length
        late = self._late_s.get(admitted.session, 0.0)
        self._late_s[admitted.session] = late + max(0.0, self._clock() - end)
        while (left := end - self._clock()) > 0:
            if poll is None:
                pause(left)
                continue
            poll(left)
            if self._breaks_off and (admitted.session, admitted.run) in self._runs:
                layer = length / self._layers
                end = min(end, start + math.ceil((self._clock() - start) / layer) * layer)
                taps, result = [], emptied(result)
                self._runs.clear()
        return taps, result


def charge_of(devices: Devices, parallelism: Parallelism, place: int) -> ProfileCharge:
    """What Vi (``place`` = i) takes, in a pipeline or with its whole group."""
    parts = devices.compute_seconds(parallelism)
    return ProfileCharge(parts[place - 1] if parallelism == "pipeline" else parts[0])


def rest(start: float, seconds: float) -> float:
    """Wait until ``seconds`` after ``start`` (of time.perf_counter); returns by how much that is over
    already."""
    left = start + seconds - time.perf_counter()
    pause(left)
    return max(0.0, -left)


def pause(seconds: float) -> None:
    """Wait, and be back in time: the system wakes a sleeper some tenths of a millisecond late."""
    end = time.perf_counter() + seconds
    if seconds > _WAKES_LATE_S:
        # Nothing is waited for: the time itself is what the emulated device would spend computing.
        time.sleep(seconds - _WAKES_LATE_S)
    while time.perf_counter() < end:
        pass
