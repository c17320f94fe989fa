"""A round-robin queue: callers take turns, and each caller's requests keep their order."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A caller with many requests delays others by one of them at a time."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, deque[T]] = OrderedDict()  # the next caller first

    def __len__(self) -> int:
        return sum(map(len, self._callers.values()))

    def put(self, caller: str, item: T) -> None:
        """Queue behind the caller's other items; a new caller comes after those that wait."""
        self._callers.setdefault(caller, deque()).append(item)

    def take(self) -> T:
        """Remove the next caller's oldest item; IndexError if the queue is empty."""
        if not self._callers:
            raise IndexError("the queue is empty")
        caller, items = self._callers.popitem(last=False)
        item = items.popleft()
        if items:
            self._callers[caller] = items
        return item

    def before(self, item: T) -> int | None:
        """Return how many items precede this one if none is added; None if it is not queued."""
        place = next((items.index(item) for items in self._callers.values() if item in items), None)
        if place is None:
            return None
        count, turn = place, 1
        for items in self._callers.values():
            if item in items:
                turn = 0  # callers behind this one have one turn less before its own
            else:
                count += min(len(items), place + turn)
        return count

    def remove(self, item: T) -> bool:
        """Remove an item; return whether it was queued."""
        for caller, items in self._callers.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._callers[caller]
                return True
        return False

    def clear(self) -> list[T]:
        """Remove all items; return them in the order of :meth:`take`."""
        left = []
        while self._callers:
            left.append(self.take())
        return left
