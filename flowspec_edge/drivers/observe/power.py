"""Power and energy of this process' board, and each session's share of the energy."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from flowspec_edge.d0.counters import HeartbeatCounters
from flowspec_edge.drivers.observe.power_rails import Rail, read_watts, system_root, total_rails
from flowspec_edge.util import procfs
from flowspec_edge.util.jetson import power_rails

log = logging.getLogger(__name__)

_PERIOD_S = 0.1  # between samples; a read over I2C takes about a millisecond
_STALE_S = 1.0  # the age at which a sample is too old
_SETTLE_S = 1.0  # after a session until the board counts as idle: clocks fall, the sensor averages


class PowerMeter:
    """Watts and joules of one board, by the trapezoid rule, also across failed reads.

    Any thread may read it.
    """

    def __init__(self, rails: Sequence[Rail], board: float = 0.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """Take the board's rails; ``board``: a number unique to the board; ``clock``: in seconds."""
        self._rails = tuple(rails)
        self._board = board
        self._clock = clock
        self._newest: tuple[float, float, float] | None = None  # moment, watts, joules until then
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="power meter", daemon=True)

    def start(self) -> None:
        """Sample ten times a second until :meth:`close`."""
        self.sample()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def sample(self) -> None:
        """Read the rails and add the energy since the last sample; no effect if a read fails."""
        watts = read_watts(self._rails)
        if watts is None:
            return
        now = self._clock()
        then, before, joules = self._newest or (now, watts, 0.0)
        self._newest = (now, watts, joules + (before + watts) / 2 * (now - then))

    def joules_at(self, now: float) -> float | None:
        """Energy from the first sample until ``now``; None if the newest is more than a second old."""
        newest = self._newest
        if newest is None or now - newest[0] > _STALE_S:
            return None
        at, watts, joules = newest
        return joules + watts * (now - at)

    def read(self) -> dict[str, float]:
        """Return figures for heartbeats; {} while the sensor cannot be read.

        watts     of the newest sample
        energy_j  joules since the first sample; never falls
        board     unique to the board: processes of one board report the same energy
        """
        newest = self._newest
        if newest is None or self._clock() - newest[0] > _STALE_S:
            return {}
        return {"watts": newest[1], "energy_j": newest[2], "board": self._board}

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.sample()


@contextmanager
def board_meter(enabled: bool = True) -> Iterator[PowerMeter | None]:
    """Yield a running meter of this process's board.

    None without a known sensor or a unique board number, and if not ``enabled``: under emulation it would measure
    the emulating machine.
    """
    root = system_root()
    rails = total_rails(root, power_rails()) if enabled else ()
    number = board_number(root)
    if not rails or number is None:
        yield None
        return
    meter = PowerMeter(rails, number)
    meter.start()
    try:
        yield meter
    finally:
        meter.close()


def board_number(root: Path) -> float | None:
    """48 bits of a digest that only processes of one board share; None without a boot id.

    Copied SD cards have the same machine id, and containers on one machine the same boot id.
    """
    boot = procfs.text(root / "proc/sys/kernel/random/boot_id")
    machine = procfs.text(root / "etc/machine-id")
    return float(int.from_bytes(sha256(f"{boot} {machine}".encode()).digest()[:6], "big")) if boot else None


@dataclass(eq=False)
class _Share:
    joules: float = 0.0  # nan: the sensor could not be read for some of it
    seconds: float = 0.0

    def add(self, joules: float, seconds: float) -> None:
        self.joules += joules
        self.seconds += seconds


class SessionEnergy:
    """Divides a meter's energy among sessions.

    Work for some sessions is shared equally by these, other time by all that are open, and time without sessions is
    idle. The shares add up to the energy used while any session was open. So do their times, which give the energy
    above idle. Without a meter all results are empty; a meter that raises is not used any more, since figures
    must not end a request.
    """

    def __init__(self, meter: PowerMeter | None, clock: Callable[[], float] = time.monotonic,
                 settle_s: float = _SETTLE_S) -> None:
        """Take a meter and its clock; ``settle_s``: seconds after a session that do not count as idle."""
        self._meter = meter
        self._clock = clock
        self._settle_s = settle_s
        self._shares: dict[int, _Share] = {}
        self._idle = _Share()
        self._worked_for: tuple[int, ...] = ()
        self._updated: tuple[float, float] | None = None  # until when, and the meter's joules then
        self._quiet_from = clock() + settle_s

    def open(self, session: int, among: Iterable[int] | None = None) -> None:
        """Begin a session, unless it is open; open sessions that are not ``among`` the given ones end."""
        self.update()
        if among is not None:
            self._shares = {n: self._shares[n] for n in among if n in self._shares}
        self._shares.setdefault(session, _Share(0.0 if self._updated else math.nan))

    def work_for(self, *sessions: int) -> None:
        """Count the board's work from now on for these sessions, or for none."""
        self.update()
        self._worked_for = sessions

    def close(self, session: int) -> HeartbeatCounters:
        """End a session and return its energy; {} if the sensor failed meanwhile.

        session_j             joules
        session_above_idle_j  minus the idle board's joules in that time; absent while idle power is unknown
        board                 as in ``PowerMeter.read``
        """
        self.update()
        share = self._shares.pop(session, None)
        if not self._shares:
            self._quiet_from = self._clock() + self._settle_s
        reading = self._reading()
        if share is None or not reading or not share.seconds or math.isnan(share.joules):
            return {}
        energy = {"session_j": max(0.0, share.joules), "board": reading["board"]}
        if (idle := self.idle_watts) is not None:
            energy["session_above_idle_j"] = share.joules - idle * share.seconds
        return energy

    @property
    def idle_watts(self) -> float | None:
        """Mean power while no session was open; None without such time."""
        return self._idle.joules / self._idle.seconds if self._idle.seconds else None

    def update(self) -> None:
        """Divide the energy since the last call; idle time needs calls more often than ``settle_s``."""
        if self._meter is None:
            return
        now = self._clock()
        try:
            joules = self._meter.joules_at(now)
        except Exception:
            joules = None
            self._give_up()
        if joules is None:
            self._updated = None
            for share in self._shares.values():
                share.joules = math.nan
            return
        since, before = self._updated or (now, joules)
        self._updated = (now, joules)
        joules_used, seconds = joules - before, now - since
        if self._shares:
            working_shares = [self._shares[n] for n in self._worked_for if n in self._shares]
            sharing = working_shares or self._shares.values()
            for share in sharing:
                share.add(joules_used / len(sharing), seconds / len(sharing))
        elif since >= self._quiet_from:
            self._idle.add(joules_used, seconds)

    def _reading(self) -> HeartbeatCounters:
        try:
            return self._meter.read() if self._meter else {}
        except Exception:
            self._give_up()
            return {}

    def _give_up(self) -> None:
        log.exception("a fault of this program: energy is not measured any more")
        self._meter = None

    def skip(self) -> None:
        """Do not count the time since the last update as idle."""
        if not self._shares:
            self._updated = None
            self._quiet_from = max(self._quiet_from, self._clock() + self._settle_s)
