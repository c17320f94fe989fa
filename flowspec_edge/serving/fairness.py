"""Whose turn it is: callers one after the other, each caller's requests in the order they came."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue in which somebody with many requests delays others by one of them at a time."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, deque[T]] = OrderedDict()  # the next caller first

    def __len__(self) -> int:
        return sum(map(len, self._callers.values()))

    def put(self, caller: str, item: T) -> None:
        """Behind this caller's others; a new caller comes after those who wait."""
        self._callers.setdefault(caller, deque()).append(item)

    def take(self) -> T:
        """The next caller's oldest; IndexError if nobody waits."""
        if not self._callers:
            raise IndexError("nobody waits")
        caller, items = self._callers.popitem(last=False)
        item = items.popleft()
        if items:
            self._callers[caller] = items
        return item

    def before(self, item: T) -> int | None:
        """How many will be taken before it, if nobody else comes; None if it does not wait."""
        place = next((items.index(item) for items in self._callers.values() if item in items), None)
        if place is None:
            return None
        count, turn = place, 1
        for items in self._callers.values():
            if item in items:
                turn = 0  # those behind it have one turn less before its own
            else:
                count += min(len(items), place + turn)
        return count

    def remove(self, item: T) -> bool:
        """Take it out wherever it is; whether it was there."""
        for caller, items in self._callers.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._callers[caller]
                return True
        return False

    def clear(self) -> list[T]:
        """Everything that waited, in the order of the turns."""
        left = []
        while self._callers:
            left.append(self.take())
        return left
