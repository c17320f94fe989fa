"""Prunes that a stage must remember, because rows they concern may still be on their way.

Knows numbers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.messages import Int32, Prune
from flowspec_edge.stage.rows import member


def dead(prune: Prune, numbers: Int32) -> NDArray[np.bool_]:
    """Which of ``numbers`` [n] this prune gives up: bool [n]."""
    concerned = (numbers >= prune.start) & (numbers < prune.stop)
    return concerned & ~member(numbers, prune.keep)


class Prunes:
    """The prunes of a session that rows yet to arrive may have to obey."""

    def __init__(self) -> None:
        self._remembered: dict[int, Prune] = {}  # by sequence, so that a repeated one counts once
        self._arrived = 0  # no row with a smaller number can arrive any more

    def __len__(self) -> int:
        return len(self._remembered)

    def add(self, prune: Prune) -> None:
        """Remember ``prune`` while it can concern rows yet to arrive."""
        if prune.stop > self._arrived:
            self._remembered[prune.sequence] = prune

    def arrived(self, first: int) -> None:
        """A segment that starts at number ``first`` is here: forget what can concern no other."""
        self._arrived = first
        settled = [s for s, prune in self._remembered.items() if prune.stop <= first]
        for sequence in settled:
            del self._remembered[sequence]

    def dead(self, numbers: Int32) -> NDArray[np.bool_]:
        """Which of ``numbers`` [n] any remembered prune gives up: bool [n]."""
        gone = np.zeros(len(numbers), dtype=bool)
        for prune in self._remembered.values():
            gone |= dead(prune, numbers)
        return gone
