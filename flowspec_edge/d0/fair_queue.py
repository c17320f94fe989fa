"""Items that wait for a place, and those that have one: callers take turns at every level.

A caller is a path of API key, address and user. The first level tells callers apart for certain; the last one
is what a client says. Fairness begins at the first level, so a client that names many users at one address
shares the turns of that address. Priorities order the items of one caller only, so no caller can overtake
another by them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from copy import copy
from itertools import count
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
Caller = tuple[str, ...]


class _Entry(NamedTuple):
    """An item that waits.

    ``due``: the arrival, plus the aging time for every step of priority; ``number`` counts arrivals.
    """

    due: float
    priority: int
    number: int


class FairQueue(Generic[T]):
    """Not thread-safe. ``len`` and iteration are about the items that wait.

    places  how many items may have a place
    """

    def __init__(self, clock: Callable[[], float], aging_s: float, places: float = 1,
                 stuck: Callable[[T], bool] = lambda item: False,
                 turn_over: Callable[[T], bool] = lambda item: False) -> None:
        """Set up an empty queue.

        aging_s    seconds of waiting that count as one step of priority: an item overtakes its caller's
                   earlier ones only if they came at most so long before it for each step of its advantage
        stuck      whether an item can use its place only after other items have left theirs
        turn_over  whether an item has had its place for as long as it may while a caller without one waits
        """
        self.places = places
        self._clock = clock
        self._aging_s = aging_s
        self._stuck = stuck
        self._turn_over = turn_over
        self._numbers = count()
        self._entries: dict[T, tuple[Caller, _Entry]] = {}  # of all items
        self._waiting: dict[Caller, list[tuple[_Entry, T]]] = {}  # sorted
        self._placed: OrderedDict[T, Caller] = OrderedDict()  # the newest place last
        self._place_counts = Counter[Caller]()  # by paths and their beginnings, like the next two
        self._items = Counter[Caller]()
        self._turns: dict[Caller, int] = {}  # when each last had a turn

    def __len__(self) -> int:
        return len(self._entries) - len(self._placed)

    def __iter__(self) -> Iterator[T]:
        """Iterate in the order of :meth:`take`, if nothing is added or ends meanwhile."""
        future = copy(self)
        future._waiting = {caller: list(items) for caller, items in self._waiting.items()}
        future._placed, future._place_counts = self._placed.copy(), self._place_counts.copy()
        future._turns, future._numbers = self._turns.copy(), count(next(self._numbers))
        while future._waiting:
            yield future.take()

    @property
    def items(self) -> list[T]:
        """All items, with and without a place, in the order of their arrival."""
        return list(self._entries)

    @property
    def placed(self) -> list[T]:
        """The items that have a place, the newest place last."""
        return list(self._placed)

    def admits(self, caller: Caller, limit: int) -> bool:
        """Return whether the caller may put an item.

        It may if there are fewer than ``limit`` items, or if at some level the caller has fewer than its share.
        Callers with items share the limit, level by level.
        """
        if len(self._entries) < limit:
            return True
        share = limit
        for prefix in _prefixes(caller):
            beside = {other[:len(prefix)] for other in self._items if len(other) == len(prefix)
                      and other[:-1] == prefix[:-1]}
            share //= len(beside | {prefix})
            if self._items[prefix] < share:
                return True
        return False

    def put(self, caller: Caller, item: T, priority: int = 0) -> None:
        """Queue an item.

        Of one caller's items, those with lower numbers of priority go first. A new caller comes after the callers
        that wait.
        """
        number = next(self._numbers)
        entry = _Entry(self._clock() + priority * self._aging_s, priority, number)
        self._entries[item] = caller, entry
        for prefix in _prefixes(caller):
            self._items[prefix] += 1
            self._turns.setdefault(prefix, number)
        insort(self._waiting.setdefault(caller, []), (entry, item), key=_entry)

    def take(self) -> T:
        """Give the next item a place; IndexError if none waits."""
        if not self._waiting:
            raise IndexError("the queue is empty")
        caller = self._next_caller()
        _, item = self._waiting[caller].pop(0)
        if not self._waiting[caller]:
            del self._waiting[caller]
        self._placed[item] = caller
        turn = next(self._numbers)
        for prefix in _prefixes(caller):
            self._place_counts[prefix] += 1
            self._turns[prefix] = turn
        return item

    def withdraw(self, item: T) -> None:
        """Take the item's place away; the item waits where it waited before."""
        caller = self._release_place(item)
        insort(self._waiting.setdefault(caller, []), (self._entries[item][1], item), key=_entry)

    def has_turn(self) -> bool:
        """Return whether an item waits and can be taken.

        None can while another item is stuck, because the stuck one comes first.
        """
        return bool(self._waiting) and len(self._placed) < self.places and self._first_stuck() is None

    def loser(self) -> T | None:
        """Return the item that has to leave its place, if any.

        It leaves for an item that is stuck, or else, if all places are taken, for one that waits.
        """
        if (stuck := self._first_stuck()) is not None:
            rival = self._rival_of_waiting(_lasts)
            if rival is not None and self.placed.index(rival) >= self.placed.index(stuck):
                return rival  # of items that cannot have begun, the newest leaves first
            return self._rival(self._placed[stuck], self._turn_over, stuck)
        return self._rival_of_waiting(self._turn_over) if len(self._placed) >= self.places else None

    def _rival_of_waiting(self, turn_over: Callable[[T], bool]) -> T | None:
        """Return the rival of the first waiting caller that has one.

        The next caller may have its share already, while a caller behind it has no place at its level.
        """
        for caller in sorted(self._waiting, key=self._rank):
            if (rival := self._rival(caller, turn_over)) is not None:
                return rival
        return None

    def _first_stuck(self) -> T | None:
        return next((item for item in self._placed if self._stuck(item)), None)

    def _rival(self, caller: Caller, turn_over: Callable[[T], bool], stuck: T | None = None) -> T | None:
        """Return the item that gives way to an item of ``caller``.

        The item of ``caller`` is ``stuck``, which has a place, or has no place yet.

        Two callers are compared at the first level where they differ. A caller with two places more than the
        other gives up its newest place; a caller with a single place gives it up, when its turn is over, to a
        caller without one.
        """
        best: tuple[int, int] | None = None
        rival = None
        for age, (item, other) in enumerate(self._placed.items()):
            pairs = zip(_prefixes(caller), _prefixes(other), strict=True)
            paths = next(((prefix, other_prefix) for prefix, other_prefix in pairs if prefix != other_prefix), None)
            if paths is None:
                continue
            held_places = self._place_counts[paths[0]] - (stuck is not None)
            difference = self._place_counts[paths[1]] - held_places
            if difference >= 2:
                rank = difference, age
            elif difference == 1 and held_places == 0 and turn_over(item):
                rank = difference, -age
            else:
                continue
            if best is None or rank > best:
                best, rival = rank, item
        return rival

    def before(self, item: T) -> int | None:
        """Return how many waiting items precede this one if nothing changes; None if it does not wait."""
        if item not in self._entries or item in self._placed:
            return None
        return next(position for position, other in enumerate(self) if other == item)

    def discard(self, item: T) -> bool:
        """Remove an item that waits or has a place; return whether there was one."""
        if item not in self._entries:
            return False
        caller, entry = self._entries[item]
        if item in self._placed:
            self._release_place(item)
        else:
            self._waiting[caller].remove((entry, item))
            if not self._waiting[caller]:
                del self._waiting[caller]
        del self._entries[item]
        for prefix in _prefixes(caller):
            self._items[prefix] -= 1
            if not self._items[prefix]:
                del self._items[prefix], self._turns[prefix]
        return True

    def clear(self) -> list[T]:
        """Remove the items that wait; return them in the order of :meth:`take`."""
        waiting = list(self)
        for item in waiting:
            self.discard(item)
        return waiting

    def _release_place(self, item: T) -> Caller:
        caller = self._placed.pop(item)
        for prefix in _prefixes(caller):
            self._place_counts[prefix] -= 1
            if not self._place_counts[prefix]:
                del self._place_counts[prefix]
        return caller

    def _next_caller(self) -> Caller:
        return min(self._waiting, key=self._rank)

    def _rank(self, caller: Caller) -> list[tuple[int, int]]:
        """Return a caller's place in the order of callers.

        At each level, the caller with the fewest places comes first, and of equals the one whose last turn is
        longest ago.
        """
        return [(self._place_counts[prefix], self._turns[prefix]) for prefix in _prefixes(caller)]


def _prefixes(caller: Caller) -> list[Caller]:
    """Return the caller's prefixes, from its first level alone to the whole caller."""
    return [caller[:end] for end in range(1, len(caller) + 1)]


def _entry(pair: tuple[_Entry, object]) -> _Entry:
    return pair[0]


def _lasts(item: object) -> bool:
    return False
