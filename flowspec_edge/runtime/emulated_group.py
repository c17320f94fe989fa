"""Collectives that weigh what a profile's model would make them weigh, over a real process group.

Every exchange of the loaded model's ranks is padded to the profile's width and repeated as often as
the profile's model has more layers (Galaxy's last gather too, which is not one a layer: some 2 %
more bytes).  The network takes its own time for that; the software's part of a ring's step is the
profile's.  Galaxy hides a step behind the work on a tile: the work of the profile's boards, waited
for here.  Does not know what a pass computes, nor how long all of it takes (``emulation``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.config import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.collectives import rings_of
from flowspec_edge.runtime.emulation import pause, rest
from flowspec_edge.stage.tensor_group import Group, Pending


class EmulatedGroup:
    """Implements ``stage.tensor_group.Group`` round another one.

    tile_s  what the profile's boards compute in a step of Galaxy's rings; set before each pass
    spent_s seconds that exchanges have taken, ever
    """

    def __init__(self, group: Group, profile: Profile, layers: int) -> None:
        """``layers``: of the loaded model, whose exchanges stand for all of the profile's."""
        self.rank, self.size = group.rank, group.size
        self.tile_s = self.spent_s = 0.0
        self._group = group
        self._profile = profile
        self._ratio = profile.model.layers / layers
        self._owed = 0.0  # exchanges that the profile's model makes and none stands for yet

    @property
    def bytes_sent(self) -> int:
        """See :class:`Group`; with all that was padded and repeated."""
        return self._group.bytes_sent

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :class:`Group`."""
        wide, steps = self._widened(x), 2 * (self.size - 1)
        found = self._repeated(lambda: self._group.all_reduce(wide.clone()), steps, 0.0)
        return found[:, : x.shape[1]]

    def shift(self, x: Tensor) -> Pending:
        """See :class:`Group`."""
        wide = self._widened(x)
        return _Shift(self, self._group.shift(wide), wide, x.shape[1])

    def _repeated(self, exchange: Callable[[], Tensor], steps: int, at_least_s: float) -> Tensor:
        """The result of ``exchange``, made once and as often again as the layers want."""
        self._owed += self._ratio
        found = None
        while found is None or self._owed >= 1:
            start = time.perf_counter()
            result = exchange()
            found = result if found is None else found
            pause(steps * self._profile.collective.step_ms * 1e-3)
            rest(start, at_least_s)
            self.spent_s += time.perf_counter() - start
            self._owed -= 1
        return found

    def _widened(self, x: Tensor) -> Tensor:
        """``x`` [n, H] with zeros up to the profile's bytes a row."""
        model = self._profile.model
        width = model.hidden_width * model.bytes_per_value // x.element_size()
        if width < x.shape[1]:
            raise UsageError("the model's hidden states are wider than those of the profile")
        return F.pad(x, (0, width - x.shape[1]))


class GroupCharge:
    """A rank's compute beside exchanges that take their own time; a ``runtime.emulation.Charge``.

    The same as ``collectives.tensor_seconds``, with what was really spent in place of its steps.
    """

    def __init__(self, group: EmulatedGroup, profile: Profile, overlaps: bool) -> None:
        """``profile``: the rank's own; ``overlaps``: whether steps hide behind the work on tiles."""
        self._group = group
        self._profile = profile
        self._overlaps = overlaps
        self._before_s = 0.0

    def begin(self, rows: int, context: int) -> None:
        """See :class:`Charge`."""
        tiles = rings_of(self._profile) * self._group.size
        self._group.tile_s = self._share(rows, context) / tiles if self._overlaps else 0.0
        self._before_s = self._group.spent_s

    def seconds(self, rows: int, context: int) -> float:
        """See :class:`Charge`; of a ring's tiles one is behind no step."""
        beside = self._share(rows, context) / (self._group.size if self._overlaps else 1)
        return self._group.spent_s - self._before_s + beside

    def _share(self, rows: int, context: int) -> float:
        return self._profile.stage_seconds(rows, self._profile.model.layers, context) / self._group.size


@dataclass
class _Shift:
    """A shift under way, and those that it stands for."""

    group: EmulatedGroup
    pending: Pending
    wide: Tensor
    width: int

    def wait(self) -> Tensor:
        """See :class:`Pending`."""
        first: Pending | None = self.pending

        def exchange() -> Tensor:
            nonlocal first
            pending, first = first or self.group._group.shift(self.wide), None
            return pending.wait()

        return self.group._repeated(exchange, 1, self.group.tile_s)[:, : self.width]
