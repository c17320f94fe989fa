"""A queue in which higher priorities go first, and callers of one priority take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import Generic, TypeVar

T = TypeVar("T")
_Callers = OrderedDict[str, deque[tuple[float, T]]]  # when each item was queued; the next caller first


class FairQueue(Generic[T]):
    """A caller with many requests delays others of its priority by one of them at a time."""

    def __init__(self, clock: Callable[[], float], aging_s: float) -> None:
        """``aging_s``: seconds of waiting that count as one step of priority, so that no priority starves."""
        self._clock = clock
        self._aging_s = aging_s
        self._levels: dict[int, _Callers[T]] = {}  # by priority

    def __len__(self) -> int:
        return sum(len(items) for callers in self._levels.values() for items in callers.values())

    def __iter__(self) -> Iterator[T]:
        """Iterate in the order of :meth:`take`, if nothing is added meanwhile."""
        left = copy(self)
        left._levels = {priority: OrderedDict((caller, deque(items)) for caller, items in callers.items())
                        for priority, callers in self._levels.items()}
        while left._levels:
            yield left.take()

    def put(self, caller: str, item: T, priority: int = 0) -> None:
        """Queue behind the caller's other items of this priority; lower numbers go first. A new caller comes
        after those that wait."""
        callers = self._levels.setdefault(priority, OrderedDict())
        callers.setdefault(caller, deque()).append((self._clock(), item))

    def take(self) -> T:
        """Remove the next caller's oldest item; IndexError if the queue is empty."""
        if not self._levels:
            raise IndexError("the queue is empty")
        priority = min(self._levels, key=self._due)
        callers = self._levels[priority]
        caller, items = callers.popitem(last=False)
        _, item = items.popleft()
        if items:
            callers[caller] = items
        elif not callers:
            del self._levels[priority]
        return item

    def _due(self, priority: int) -> tuple[float, int]:
        """Waiting moves all priorities ahead alike, so their order depends on when their oldest item came."""
        oldest = min(items[0][0] for items in self._levels[priority].values())
        return oldest + priority * self._aging_s, priority

    def before(self, item: T) -> int | None:
        """Return how many items precede this one if none is added; None if it is not queued."""
        return next((place for place, other in enumerate(self) if other == item), None)

    def remove(self, item: T) -> bool:
        """Remove an item; return whether it was queued."""
        for priority, callers in self._levels.items():
            for caller, items in callers.items():
                found = next((entry for entry in items if entry[1] == item), None)
                if found is None:
                    continue
                items.remove(found)
                if not items:
                    del callers[caller]
                if not callers:
                    del self._levels[priority]
                return True
        return False

    def clear(self) -> list[T]:
        """Remove all items; return them in the order of :meth:`take`."""
        left = list(self)
        self._levels.clear()
        return left
