"""Priorities, and turns between callers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.serving.fair_queue import FairQueue

AGING = 30.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock | None = None) -> FairQueue[str]:
    return FairQueue(clock or Clock(), AGING)


def test_callers_take_turns() -> None:
    queue = made()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert [queue.take() for _ in range(2)] == ["a1", "b1"]
    queue.put("d", "d1")
    assert queue.clear() == ["c1", "a2", "b2", "d1", "a3"]
    with pytest.raises(IndexError):
        queue.take()


def test_a_higher_priority_goes_first_and_callers_take_turns_within_one() -> None:
    queue = made()
    for item, priority in (("a1", 0), ("a2", 3), ("b1", 0), ("a3", -1), ("a4", -1), ("c1", -1)):
        queue.put(item[0], item, priority)
    assert queue.clear() == ["a3", "c1", "a4", "a1", "b1", "a2"]
    assert len(queue) == 0


def test_waiting_counts_as_priority() -> None:
    """A request goes before those of one step more that come after its 30 s, and not before earlier ones."""
    clock = Clock()
    queue = made(clock)
    queue.put("old", "background", 1)
    clock.now = 29.0
    queue.put("new", "chat1", 0)
    clock.now = 31.0
    queue.put("new", "chat2", 0)
    assert list(queue) == ["chat1", "background", "chat2"]


@given(st.lists(st.integers(-3, 3), max_size=8), st.integers(1, 3))
def test_no_request_waits_for_ever(urgent: list[int], behind: int) -> None:
    """Beside a higher priority that always has a request waiting, and gets the place once a second."""
    clock = Clock()
    queue = made(clock)
    for number, priority in enumerate(urgent):
        queue.put("urgent", f"u{number}", priority)
    last = max([0, *urgent]) + behind
    queue.put("patient", "patient", last)
    taken = 0
    while True:
        clock.now += 1.0
        queue.put(f"caller{taken % 3}", f"more{taken}", 0)
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
            queue.put(caller, item, priority)
            inside.add(item)
        elif inside:
            some = min(inside)
            if number % 2:
                assert queue.remove(some)
                assert not queue.remove(some)
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


def test_a_caller_with_many_delays_others_by_one() -> None:
    queue = made()
    for i in range(50):
        queue.put("many", f"many{i}")
    queue.put("one", "mine")
    assert [queue.take() for _ in range(2)][1] == "mine"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1))), st.integers(0, 5))
def test_how_many_come_before_is_what_taking_them_shows(asked: list[tuple[str, int]], taken: int) -> None:
    clock = Clock()
    queue: FairQueue[int] = FairQueue(clock, AGING)
    for number, (caller, priority) in enumerate(asked):
        clock.now += 7 * number
        queue.put(caller, number, priority)
    for _ in range(min(taken, len(asked))):
        queue.take()
    before = {number: queue.before(number) for number in range(len(asked))}
    order = [queue.take() for _ in range(len(queue))]
    assert before == {number: order.index(number) if number in order else None
                      for number in range(len(asked))}
