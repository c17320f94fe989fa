"""What goes between host and device, and how far the host runs ahead.

On CUDA a launch returns before the device has done the work.  Copies here go through pinned memory, so
that they wait for nothing either, and a Pace keeps the host near the device: a poll between two layers
then comes when the device is between those layers, or at most ``AHEAD`` later ones.  On the CPU copies are
what torch makes of them, and a Pace does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

AHEAD = 2  # layers that are enqueued and not done: the one that runs, and one for the device to go on with


class Event(Protocol):
    """A place in the device's queue."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in the CPU's memory; from CUDA they are enqueued, and complete when the device has come there.

    Tensors of the CPU are returned as they are.
    """
    return [tensor if tensor.device.type != "cuda" else
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors]


def recorded(device: torch.device) -> Event:
    """An event after all that is enqueued so far; a thread that waits for it sleeps, and does not spin."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Pace:
    """One pass: call :meth:`enqueued` after each layer and after the last copy, then :meth:`finish`."""

    def __init__(self, record: Callable[[], Event] | None) -> None:
        """record  makes an event after all that is enqueued; None: what is called is done when it returns"""
        self._record = record
        self._events: deque[Event] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Pace:
        """For layers on ``device``."""
        return cls(partial(recorded, device) if device.type == "cuda" else None)

    def enqueued(self) -> None:
        """A step has been enqueued; returns when no more than ``AHEAD`` are not done."""
        if self._record is not None:
            self._events.append(self._record())
            while len(self._events) > AHEAD:
                self._events.popleft().synchronize()

    def finish(self, go_on: Callable[[], bool]) -> bool:
        """Wait for what is left, asking ``go_on`` after each step; False as soon as that is."""
        while self._events:
            self._events.popleft().synchronize()
            if not go_on():
                return False
        return True
