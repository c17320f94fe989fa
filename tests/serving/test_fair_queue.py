"""Turns between callers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.serving.fair_queue import FairQueue


def test_callers_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert [queue.take() for _ in range(2)] == ["a1", "b1"]
    queue.put("d", "d1")
    assert queue.clear() == ["c1", "a2", "b2", "d1", "a3"]
    with pytest.raises(IndexError):
        queue.take()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_nothing_is_lost_and_nobody_overtakes_himself(steps: list[tuple[str, bool]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    inside: set[tuple[str, int]] = set()
    taken: list[tuple[str, int]] = []
    for number, (caller, put) in enumerate(steps):
        item = (caller, number)
        if put:
            queue.put(caller, item)
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
        own = [number for who, number in taken if who == caller]
        assert own == sorted(own)


def test_somebody_with_many_delays_others_by_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(50):
        queue.put("many", f"many{i}")
    queue.put("one", "mine")
    assert [queue.take() for _ in range(2)][1] == "mine"


@given(st.lists(st.sampled_from("abc")), st.integers(0, 5))
def test_how_many_come_before_is_what_taking_them_shows(callers: list[str], taken: int) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, caller in enumerate(callers):
        queue.put(caller, number)
    for _ in range(min(taken, len(callers))):
        queue.take()
    before = {number: queue.before(number) for number in range(len(callers))}
    order = queue.clear()
    assert before == {number: order.index(number) if number in order else None
                      for number in range(len(callers))}
