"""Collectives with the byte count of a profile's model, over a real process group.

Every exchange is padded to the profile's width and repeated to match its layers (also Galaxy's last gather,
though it is not per layer: about 2 % more bytes). The network takes its own time, the software's part of a
ring step the profile's. Galaxy overlaps a step with the work on a tile, at the profile's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.device_profile import Profile
from flowspec_edge.drivers.virtual.devices import rings_of
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.emulation.durations import Charge, pause, wait_until
from flowspec_edge.stage.tensor_parallel.process_group import PendingShift, ProcessGroup


class EmulatedGroup:
    """Wraps a group of ``stage.tensor_parallel``.

    tile_s   profile's time for the work that overlaps a step of Galaxy's rings; set before each pass
    spent_s  seconds that all exchanges have taken
    """

    def __init__(self, group: ProcessGroup, profile: Profile, layers: int) -> None:
        """``layers``: of the loaded model."""
        self.rank, self.size = group.rank, group.size
        self.tile_s = self.spent_s = 0.0
        self._group = group
        self._profile = profile
        self._ratio = profile.model.layers / layers
        self._owed = 0.0  # exchanges of the profile's model that are not repeated yet

    @property
    def bytes_sent(self) -> int:
        """Includes padding and repetitions."""
        return self._group.bytes_sent

    def all_reduce(self, x: Tensor) -> Tensor:
        wide, steps = self._widened(x), 2 * (self.size - 1)
        found = self._repeated(lambda: self._group.all_reduce(wide.clone()), steps, 0.0)
        return found[:, : x.shape[1]]

    def shift(self, x: Tensor) -> PendingShift:
        wide = self._widened(x)
        return _Shift(self, self._group.shift(wide), wide, x.shape[1])

    def _repeated(self, exchange: Callable[[], Tensor], steps: int, at_least_s: float) -> Tensor:
        """Repeat ``exchange`` for the profile's additional layers; return its first result."""
        self._owed += self._ratio
        found = None
        while found is None or self._owed >= 1:
            start = time.perf_counter()
            result = exchange()
            found = result if found is None else found
            pause(steps * self._profile.collective.step_ms * 1e-3)
            wait_until(start, at_least_s)
            self.spent_s += time.perf_counter() - start
            self._owed -= 1
        return found

    def _widened(self, x: Tensor) -> Tensor:
        """Pad ``x`` [n, H] with zeros to the profile's bytes per row."""
        model = self._profile.model
        width = model.hidden_width * model.bytes_per_value // x.element_size()
        if width < x.shape[1]:
            raise UsageError("the model's hidden states are wider than those of the profile")
        return F.pad(x, (0, width - x.shape[1]))


class GroupCharge(Charge):
    """As ``virtual.devices.tensor_seconds``, but with the measured time of the exchanges."""

    def __init__(self, group: EmulatedGroup, profile: Profile, overlaps: bool) -> None:
        """``profile``: the rank's own; ``overlaps``: whether steps overlap with the work on tiles."""
        super().__init__(lambda rows, context: profile.stage_seconds(rows, profile.model.layers, context,
                                                                     group.size))
        self._group = group
        self._profile = profile
        self._overlaps = overlaps
        self._before_s = 0.0

    def begin(self, rows: int, context: int) -> None:
        tiles = rings_of(self._profile) * self._group.size
        self._group.tile_s = self._duration(rows, context) / tiles if self._overlaps else 0.0
        self._before_s = self._group.spent_s

    def seconds(self, rows: int, context: int) -> float:
        """One of a ring's tiles overlaps with no step."""
        compute_s = self._duration(rows, context) / (self._group.size if self._overlaps else 1)
        return self._group.spent_s - self._before_s + compute_s


@dataclass
class _Shift:
    group: EmulatedGroup
    pending: PendingShift
    wide: Tensor
    width: int

    def wait(self) -> Tensor:
        first: PendingShift | None = self.pending

        def exchange() -> Tensor:
            nonlocal first
            pending, first = first or self.group._group.shift(self.wide), None
            return pending.wait()

        return self.group._repeated(exchange, 1, self.group.tile_s)[:, : self.width]
