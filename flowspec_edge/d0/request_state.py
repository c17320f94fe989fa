"""The states of a request and what leads from one to the next; everything that moves a request is here.

    QUEUED ──is placed──▶ PLACED ──opens──▶ OPEN ──completes──▶ CLOSING ──is answered──▶ ENDED
      ▲                     │               │  ▲
      ╰──────gives way──────┴───────────────╯  ╰──opens── SUSPENDED ◀──loses its stages── OPEN

What a request gets in a state is the core's (``core``); that it may get it is checked here.
"""

from __future__ import annotations

from enum import Enum, auto


class RequestState(Enum):
    QUEUED = auto()  # it waits for a place: it has not begun, or gave way to others
    PLACED = auto()  # it has a place, and waits for room in the stages' caches
    OPEN = auto()  # the stages have a session for it
    CLOSING = auto()  # its answer is complete; the stages' reports are awaited
    SUSPENDED = auto()  # its stages are lost; it continues in another session when they are back
    ENDED = auto()  # its handle has a result or an error


class RequestEvent(Enum):
    IS_PLACED = auto()  # it gets a place, also beside the queue
    OPENS = auto()  # a session begins
    IS_PREEMPTED = auto()  # its place goes to another one
    LOSES_STAGES = auto()
    COMPLETES = auto()  # no more tokens: the last one, or a cancel
    IS_ANSWERED = auto()
    FAILS = auto()


TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    RequestState.QUEUED: {
        RequestEvent.IS_PLACED: RequestState.PLACED,
        RequestEvent.LOSES_STAGES: RequestState.QUEUED,
        RequestEvent.COMPLETES: RequestState.CLOSING,  # cancelled, with the tokens of its earlier sessions
        RequestEvent.IS_ANSWERED: RequestState.ENDED,  # cancelled, without tokens
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.PLACED: {
        RequestEvent.OPENS: RequestState.OPEN,
        RequestEvent.IS_PREEMPTED: RequestState.QUEUED,
        RequestEvent.LOSES_STAGES: RequestState.PLACED,
        RequestEvent.COMPLETES: RequestState.CLOSING,
        RequestEvent.IS_ANSWERED: RequestState.ENDED,
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.OPEN: {
        RequestEvent.IS_PREEMPTED: RequestState.QUEUED,
        RequestEvent.LOSES_STAGES: RequestState.SUSPENDED,
        RequestEvent.COMPLETES: RequestState.CLOSING,
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.CLOSING: {
        RequestEvent.LOSES_STAGES: RequestState.CLOSING,  # the reports that have not come are lost
        RequestEvent.IS_ANSWERED: RequestState.ENDED,
        RequestEvent.FAILS: RequestState.ENDED,  # the stages' figures are absurd
    },
    RequestState.SUSPENDED: {
        RequestEvent.OPENS: RequestState.OPEN,
        RequestEvent.LOSES_STAGES: RequestState.SUSPENDED,
        RequestEvent.COMPLETES: RequestState.CLOSING,
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.ENDED: {},
}


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the state after ``event``; RuntimeError, a fault of this program, if it cannot happen in ``state``."""
    if event not in TRANSITIONS[state]:
        raise RuntimeError(f"a request that is {state.name} cannot take {event.name}")
    return TRANSITIONS[state][event]
