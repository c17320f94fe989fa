"""Turns between callers, who gives way to whom, and the priorities of one caller."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.d0.fair_queue import Caller, FairQueue

AGING = 30.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock | None = None) -> FairQueue[str]:
    return FairQueue(clock or Clock(), AGING)


def made_of_numbers() -> FairQueue[int]:
    return FairQueue(Clock(), AGING)


def test_a_priority_orders_the_requests_of_its_caller_only() -> None:
    queue = made()
    for item, priority in (("a1", 0), ("a2", 3), ("b1", 0), ("a3", -1), ("a4", -1), ("c1", -10)):
        queue.put((item[0],), item, priority)
    assert queue.clear() == ["a3", "b1", "c1", "a4", "a1", "a2"]
    assert len(queue) == 0


def test_waiting_counts_as_priority() -> None:
    """A request goes before those of one step more that come after its 30 s, and not before earlier ones."""
    clock = Clock()
    queue = made(clock)
    queue.put(("one",), "background", 1)
    clock.now = 29.0
    queue.put(("one",), "chat1", 0)
    clock.now = 31.0
    queue.put(("one",), "chat2", 0)
    assert list(queue) == ["chat1", "background", "chat2"]


@given(st.lists(st.integers(-3, 3), max_size=8), st.integers(1, 3))
def test_no_request_waits_for_ever(urgent: list[int], behind: int) -> None:
    """Beside its caller's higher priorities, one of which always waits; there is a place once a second."""
    clock = Clock()
    queue = made(clock)
    for number, priority in enumerate(urgent):
        queue.put(("one",), f"u{number}", priority)
    last = max([0, *urgent]) + behind
    queue.put(("one",), "patient", last)
    taken = 0
    while True:
        clock.now += 1.0
        queue.put(("one",), f"more{taken}", 0)
        if queue.take() == "patient":
            break
        taken += 1
        assert taken <= AGING * last + len(urgent) + 3
    assert taken >= AGING * last - 1  # of two requests that waited alike the urgent one goes first


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.booleans())))
def test_nothing_is_lost_and_a_caller_keeps_its_order(steps: list[tuple[str, int, bool]]) -> None:
    clock = Clock()
    queue: FairQueue[tuple[str, int, int]] = FairQueue(clock, AGING)
    inside: set[tuple[str, int, int]] = set()
    taken: list[tuple[str, int, int]] = []
    for number, (caller, priority, put) in enumerate(steps):
        clock.now += number
        item = (caller, priority, number)
        if put:
            queue.put((caller,), item, priority)
            inside.add(item)
        elif inside:
            some = min(inside)
            if number % 2:
                assert queue.discard(some)
                assert not queue.discard(some)
                inside.remove(some)
            else:
                taken.append(queue.take())
                inside.remove(taken[-1])
        assert len(queue) == len(inside)
    taken += queue.clear()
    for caller in "abc":
        for level in (-1, 0, 1):
            own = [number for who, priority, number in taken if (who, priority) == (caller, level)]
            assert own == sorted(own)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1))), st.integers(0, 5))
def test_how_many_come_before_is_what_taking_them_shows(asked: list[tuple[str, int]], taken: int) -> None:
    clock = Clock()
    queue: FairQueue[int] = FairQueue(clock, AGING)
    for number, (caller, priority) in enumerate(asked):
        clock.now += 7 * number
        queue.put((caller,), number, priority)
    for _ in range(min(taken, len(asked))):
        queue.take()
    before = {number: queue.before(number) for number in range(len(asked))}
    order = [queue.take() for _ in range(len(queue))]
    assert before == {number: order.index(number) if number in order else None
                      for number in range(len(asked))}


CALLERS = st.tuples(st.sampled_from("kl"), st.sampled_from("ab"), st.sampled_from("uvw"))


class Places:
    """The queue's owner: gives places, and takes them away, as the queue says."""

    def __init__(self, places: int, turn_s: float = 1e9) -> None:
        self.clock = Clock()
        self.since: dict[int, float] = {}  # when each item got its place
        self.callers: dict[int, Caller] = {}
        self.changes = 0
        self.places = places
        self.queue: FairQueue[int] = FairQueue(
            self.clock, AGING, places, turn_over=lambda item: self.clock.now - self.since[item] >= turn_s)

    def put(self, caller: Caller, priority: int = 0) -> int:
        item = len(self.callers)
        self.callers[item] = caller
        self.queue.put(caller, item, priority)
        return item

    def settle(self) -> None:
        while True:
            if (loser := self.queue.loser()) is not None:
                self.queue.withdraw(loser)
            if not self.queue.has_turn():
                break
            self.since[self.queue.take()] = self.clock.now
            self.changes += 1
            assert self.changes < 1000

    def held(self, path: Caller) -> int:
        return sum(self.callers[item][:len(path)] == path for item in self.queue.placed)


@given(st.lists(st.one_of(CALLERS, st.integers(0, 7)), max_size=40), st.integers(1, 6))
def test_no_caller_has_two_places_more_than_one_that_waits(steps: list[Caller | int], places: int) -> None:
    """At the first level where they differ, after any sequence of arrivals and ends."""
    it = Places(places)
    inside = set[int]()
    for step in steps:
        if isinstance(step, tuple):
            inside.add(it.put(step, priority=len(inside) % 21 - 10))
        elif it.queue.placed:
            ends = it.queue.placed[step % len(it.queue.placed)]
            it.queue.discard(ends)
            inside.remove(ends)
        it.settle()
        assert len(it.queue.placed) == min(places, len(inside))
        assert {*it.queue, *it.queue.placed} == inside
        for waits in map(it.callers.__getitem__, it.queue):
            for runs in map(it.callers.__getitem__, it.queue.placed):
                level = next((n for n in range(1, 4) if waits[:n] != runs[:n]), None)
                if level is not None:
                    assert it.held(runs[:level]) <= it.held(waits[:level]) + 1


@given(st.lists(CALLERS, min_size=1, max_size=30), st.integers(1, 4))
def test_callers_take_turns_although_no_request_ends(asked: list[Caller], places: int) -> None:
    """With k keys a request of each has run after k turns; of each address and user after all their turns."""
    it = Places(places, turn_s=1.0)
    for caller in asked:
        it.put(caller)
    it.settle()
    ran = {caller[:1]: it.held(caller[:1]) for caller in asked}
    for _ in range(len({caller[:1] for caller in asked})):
        it.clock.now += 1.0
        it.settle()
        ran = {path: count + it.held(path) for path, count in ran.items()}
    assert all(ran.values())


@given(st.lists(CALLERS, max_size=200), st.integers(1, 20))
def test_a_caller_below_its_share_is_admitted(asked: list[Caller], limit: int) -> None:
    queue = made_of_numbers()
    counts = Counter[str]()
    for number, caller in enumerate(asked):
        key, *_ = caller
        keys = len({*counts, key})
        first = not any(other[:1] == caller[:1] for other in map(asked.__getitem__, queue))
        if queue.admits(caller, limit):
            queue.put(caller, number)
            counts[key] += 1
        else:
            assert len(queue) >= limit
            assert not first or keys > limit
    assert len(queue) <= limit * 2  # there are two keys


@given(st.lists(CALLERS, max_size=200), st.integers(20, 30))
def test_a_caller_with_nothing_here_is_admitted_beside_any_flood(asked: list[Caller], limit: int) -> None:
    """There are twelve callers at most: each has a share of one at least."""
    queue = made_of_numbers()
    for number, caller in enumerate([("k", "a", "u")] * 50 + asked):
        nothing = caller not in [asked[other - 50] for other in queue if other >= 50] and number >= 50
        if queue.admits(caller, limit):
            queue.put(caller, number)
        else:
            assert caller == ("k", "a", "u") or not nothing
    assert len(queue) <= 4 * limit


def test_an_item_that_is_stuck_gets_the_room_of_a_greedy_caller() -> None:
    stuck = set[str]()
    queue: FairQueue[str] = FairQueue(Clock(), AGING, 3, stuck=stuck.__contains__)
    for item in ("a1", "a2", "b1"):
        queue.put((item[0],), item)
        queue.take()
    stuck.add("b1")
    assert queue.loser() == "a2"
    queue.withdraw("a2")
    assert not queue.has_turn()  # b1 comes first
    assert queue.loser() is None
    stuck.clear()
    assert queue.has_turn()


def test_all_that_got_places_behind_a_stuck_one_give_way() -> None:
    stuck = {"a2"}
    queue: FairQueue[str] = FairQueue(Clock(), AGING, 4, stuck=stuck.__contains__)
    for item in ("a1", "a2", "a3", "a4"):
        queue.put((item[0],), item)
        queue.take()
    queue.put(("b",), "b1")
    for item in ("a4", "a3", "a2"):
        assert not queue.has_turn()
        assert queue.loser() == item
        queue.withdraw(item)
    assert queue.has_turn()
    assert queue.take() == "b1"
