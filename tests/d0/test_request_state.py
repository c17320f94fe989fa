"""The table of a request's states: no dead ends, no state that nothing leads to, nothing after the end."""

from __future__ import annotations

import pytest

from flowspec_edge.d0.request_state import TRANSITIONS, RequestEvent, RequestState, next_state


def reached_from(state: RequestState) -> set[RequestState]:
    found, left = set[RequestState](), [state]
    while left:
        for following in TRANSITIONS[left.pop()].values():
            if following not in found:
                found.add(following)
                left.append(following)
    return found


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    assert {RequestState.QUEUED, *reached_from(RequestState.QUEUED)} == set(RequestState)
    for state in set(RequestState) - {RequestState.ENDED}:
        assert RequestState.ENDED in reached_from(state)
        assert RequestEvent.FAILS in TRANSITIONS[state]


def test_an_ended_request_takes_nothing() -> None:
    for event in RequestEvent:
        with pytest.raises(RuntimeError, match=f"ENDED cannot take {event.name}"):
            next_state(RequestState.ENDED, event)


def test_only_a_request_with_a_place_gives_way() -> None:
    assert {state for state in RequestState if RequestEvent.IS_PREEMPTED in TRANSITIONS[state]
            } == {RequestState.PLACED, RequestState.OPEN}
