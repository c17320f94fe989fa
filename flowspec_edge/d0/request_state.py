"""The states of a request on D0 and what leads from one to the next; everything that moves a request is here.

    QUEUED ──opens──▶ OPEN ──completes──▶ CLOSING ──is answered──▶ ENDED
                      │  ▲ ▲
           gives way  ▼  │ │ opens
                   PAUSED┘ └─SUSPENDED ◀──loses its stages── OPEN

What a request gets in a state is the core's (``core``); that it may get it is checked here.
"""

from __future__ import annotations

from enum import Enum, auto


class RequestState(Enum):
    QUEUED = auto()  # no session yet; it waits for a place and for room in the stages' caches
    OPEN = auto()  # the stages have a session for it
    CLOSING = auto()  # its answer is complete; the stages' reports are awaited
    SUSPENDED = auto()  # its stages are lost; it continues in another session when they are back
    PAUSED = auto()  # it gave way to others; it continues in another session
    ENDED = auto()  # its handle has a result or an error


class RequestEvent(Enum):
    OPENS = auto()  # a session begins
    GIVES_WAY = auto()
    LOSES_STAGES = auto()
    COMPLETES = auto()  # no more tokens: the last one, or a cancel
    IS_ANSWERED = auto()
    FAILS = auto()


TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    RequestState.QUEUED: {
        RequestEvent.OPENS: RequestState.OPEN,
        RequestEvent.LOSES_STAGES: RequestState.QUEUED,
        RequestEvent.IS_ANSWERED: RequestState.ENDED,  # cancelled, without tokens
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.OPEN: {
        RequestEvent.GIVES_WAY: RequestState.PAUSED,
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
    RequestState.PAUSED: {
        RequestEvent.OPENS: RequestState.OPEN,
        RequestEvent.LOSES_STAGES: RequestState.PAUSED,
        RequestEvent.COMPLETES: RequestState.CLOSING,
        RequestEvent.FAILS: RequestState.ENDED,
    },
    RequestState.ENDED: {},
}


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the state after ``event``; RuntimeError, a fault of this program, if it cannot happen in
    ``state``."""
    if event not in TRANSITIONS[state]:
        raise RuntimeError(f"a request that is {state.name} cannot take {event.name}")
    return TRANSITIONS[state][event]
