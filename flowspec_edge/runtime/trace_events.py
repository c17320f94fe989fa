"""A request's trace in Chrome's Trace Event Format, which chrome://tracing and Perfetto show.

Knows the format and what is worth showing: the pipeline of the paper's Figure 2, a process a device,
with arrows that follow each segment.  Does not know how the moments were come by (``trace``) or where
the file goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from flowspec_edge.runtime.trace import Hint, Journey, Part, StageWork, Trace, Work
from flowspec_edge.text import TextStream

Event = dict[str, Any]

REQUEST, DRAFTING, VERIFYING, SENDING, HINTS = range(1, 6)  # D0's tracks
COMPUTING = 1  # a stage's
_TRACKS = {REQUEST: "request", DRAFTING: "draft passes", VERIFYING: "verification",
           SENDING: "segments on their way to V1", HINTS: "prunes and cancels"}
_TRACKS_A_DEVICE = 10  # thread ids are unique in the whole file, as those of a system are
_ONE_CLOCK = "all devices share one clock"
_MAPPED = ("each stage's clock is mapped onto D0's by its quickest message, "
           "which counts as one that took no time")


def chrome_trace(trace: Trace, stages: int, about: dict[str, Any],
                 decode: Callable[[Sequence[int]], str] | None = None, before: Sequence[int] = ()
                 ) -> dict[str, Any]:
    """The object that is the file; times in microseconds since the request began.

    about   is said of the whole trace, beside what it says of itself
    decode  makes text of tokens, ``before`` being those before the first

    Complete events (X) for what devices did; flows (s, t, f) from a segment's sending over the stages to
    its verification; instants (i) for prunes, cancels and losses; counters (C) for tokens of the answer
    and for living draft nodes in flight.
    """
    return _Writer(trace, stages, decode, before).object(about)


class _Writer:
    """Collects the events of one trace."""

    def __init__(self, trace: Trace, stages: int, decode: Callable[[Sequence[int]], str] | None,
                 before: Sequence[int]) -> None:
        self._trace = trace
        self._stages = stages
        self._begun = trace.parts[0].opened_at if trace.parts else 0.0
        self._works = trace.stage_work()
        self._events: list[Event] = []
        self._flows = 0
        self._pieces: list[str] = []
        self._text = TextStream(decode, self._pieces.append, before) if decode else None

    def object(self, about: dict[str, Any]) -> dict[str, Any]:
        """See :func:`chrome_trace`."""
        for index, part in enumerate(self._trace.parts):
            self._part(index, part)
        self._request()
        self._counters()
        for at, reason in self._trace.losses:
            self._instant("the stages were lost", at, REQUEST, {"why": reason})
        self._events.sort(key=lambda event: event["ts"])  # stable: a flow stays behind its slice
        own = {"complete": self._trace.settled_at is not None,
               "clocks": _ONE_CLOCK if self._trace.one_clock else _MAPPED}
        return {"traceEvents": [*self._names(), *self._events], "displayTimeUnit": "ms",
                "otherData": about | own}

    def _names(self) -> Iterator[Event]:
        for device in range(self._stages + 1):
            pid = device + 1
            yield _metadata("process_name", pid, 0, {"name": f"V{device}" if device else "D0"})
            yield _metadata("process_sort_index", pid, 0, {"sort_index": device})
            for track, name in (_TRACKS if not device else {COMPUTING: "computing"}).items():
                yield _metadata("thread_name", pid, _tid(device, track), {"name": name})
                yield _metadata("thread_sort_index", pid, _tid(device, track), {"sort_index": track})

    # ---- what devices did --------------------------------------------------------------------------

    def _part(self, index: int, part: Part) -> None:
        for hint in part.hints:
            if hint.cancelled:
                self._instant("cancel", hint.at, HINTS, {"segments cancelled": list(hint.cancelled)})
            else:
                said = f"{hint.start} to {hint.stop - 1}" if hint.stop > hint.start else "none"
                self._instant("prune", hint.at, HINTS, {"of the numbers": said,
                                                        "kept": len(hint.kept)})
        for work in part.work:
            if work.kind == "draft":
                self._slice("draft pass", "draft", work.start, work.end, 0, DRAFTING,
                            {"tree nodes expanded": work.rows})
        journeys = list(part.journeys.values())
        for journey, following in pairwise([*journeys, None]):
            assert journey is not None
            self._journey(index, journey, following.sent_at if following else None)

    def _journey(self, index: int, journey: Journey, next_sent: float | None) -> None:
        """A segment's slices, and the arrow that joins them."""
        name = f"segment {journey.run}"
        sort = "prompt" if journey.prompt else "draft"
        about = {"segment": journey.run, "rows sent": len(journey.numbers),
                 "rows are": "prompt" if journey.prompt else "draft tokens"}
        if journey.numbers:
            about |= {"numbers": _span(journey.numbers), "positions in the text": _span(journey.positions)}
        works = self._works[index, journey.run]
        begun = works[0].start if works and works[0].stage == 1 else journey.sent_at
        at_v1 = max(journey.sent_at, begun if next_sent is None else min(begun, next_sent))
        slices = [self._slice(f"{name}{'' if journey.numbers else ' (empty)'}", sort, journey.sent_at, at_v1,
                              0, SENDING, about)]
        for work in works:
            slices.append(self._slice(f"{name}{_state(work)}", sort, work.start, work.end, work.stage,
                                      COMPUTING, about | {"rows computed": work.rows,
                                                          "cancelled": work.cancelled}))
        if journey.verified:
            slices.append(self._verified(name, sort, about, journey.verified))
        self._flow([s for s in slices if s["dur"] > 0])  # nothing can be bound to a moment

    def _verified(self, name: str, sort: str, about: dict[str, Any], work: Work) -> Event:
        said = about | {"rows that came back": work.rows, "tokens that became text": len(work.tokens)}
        if self._text and work.tokens:
            self._pieces.clear()
            self._text.push(list(work.tokens))
            said["text"] = "".join(self._pieces)
        return self._slice(f"verify {name}", sort, work.start, work.end, 0, VERIFYING, said)

    def _flow(self, slices: list[Event]) -> None:
        """From the first slice over all others to the last; each arrow's end is bound to its slice."""
        if len(slices) < 2:
            return
        self._flows += 1
        phases = ["s", *["t"] * (len(slices) - 2), "f"]
        for phase, bound in zip(phases, slices, strict=True):
            event = {"name": "segment", "cat": "flow", "ph": phase, "id": self._flows, "ts": bound["ts"],
                     "pid": bound["pid"], "tid": bound["tid"]}
            self._events.append(event | ({"bp": "e"} if phase == "f" else {}))

    # ---- the request as a whole --------------------------------------------------------------------

    def _request(self) -> None:
        """One slice for all of it; in it one up to the first token, and one for the rest."""
        if not self._trace.parts:
            return
        end = self._end()
        request, result = self._trace.request, self._trace.result
        tokens = [work for part in self._trace.parts for work in part.work if work.tokens]
        said: dict[str, Any] = {"strategy": request.strategy, "prompt tokens": len(request.prompt),
                                "answer's tokens": sum(len(work.tokens) for work in tokens),
                                "ended by": result.finish_reason if result else "being broken off"}
        self._slice("request", "request", self._begun, end, 0, REQUEST, said)
        first = tokens[0].end if tokens else end
        self._slice("reading the prompt", "request", self._begun, first, 0, REQUEST, {})
        if tokens:
            self._slice("decoding", "request", first, end, 0, REQUEST, {})

    def _end(self) -> float:
        """When it was answered, or the last that is known of it."""
        if self._trace.settled_at is not None:
            return self._trace.settled_at
        latest = [at for at, _ in self._trace.losses]
        for index, part in enumerate(self._trace.parts):
            latest += [part.opened_at, *(hint.at for hint in part.hints), *(work.end for work in part.work)]
            for run, journey in part.journeys.items():
                latest += [journey.sent_at, journey.returned_at or 0.0,
                           *(work.end for work in self._works[index, run])]
        return max(latest)

    def _counters(self) -> None:
        """Tokens of the answer, and draft nodes that are on their way and not pruned."""
        tokens = 0
        for part in self._trace.parts:
            flight: dict[int, set[int]] = {}
            self._counter("draft nodes in flight", part.opened_at, "nodes", 0)
            changes: list[tuple[float, Journey | Hint]] = [(hint.at, hint) for hint in part.hints]
            for journey in part.journeys.values():
                if not journey.prompt:
                    changes.append((journey.sent_at, journey))
                    changes += [] if journey.returned_at is None else [(journey.returned_at, journey)]
            for at, what in sorted(changes, key=lambda change: change[0]):
                if isinstance(what, Hint):
                    gone = set(range(what.start, what.stop)) - set(what.kept)
                    flight = {run: set() if run in what.cancelled else numbers - gone
                              for run, numbers in flight.items()}
                elif what.run in flight:
                    del flight[what.run]
                else:
                    flight[what.run] = set(what.numbers)
                self._counter("draft nodes in flight", at, "nodes", sum(map(len, flight.values())))
            for work in part.work:
                tokens += len(work.tokens)
                if work.tokens:
                    self._counter("tokens of the answer", work.end, "tokens", tokens)

    # ---- events ------------------------------------------------------------------------------------

    def _slice(self, name: str, sort: str, start: float, end: float, device: int, track: int,
               said: dict[str, Any]) -> Event:
        begin = self._ts(start)
        event = {"name": name, "cat": sort, "ph": "X", "ts": begin, "dur": round(self._ts(end) - begin, 3),
                 "pid": device + 1, "tid": _tid(device, track), "args": said}
        self._events.append(event)
        return event

    def _instant(self, name: str, at: float, track: int, said: dict[str, Any]) -> None:
        self._events.append({"name": name, "cat": "hint", "ph": "i", "s": "t", "ts": self._ts(at), "pid": 1,
                             "tid": _tid(0, track), "args": said})

    def _counter(self, name: str, at: float, series: str, value: int) -> None:
        self._events.append({"name": name, "ph": "C", "ts": self._ts(at), "pid": 1,
                             "tid": _tid(0, REQUEST), "args": {series: value}})

    def _ts(self, moment: float) -> float:
        """Microseconds since the request began."""
        return round((moment - self._begun) * 1e6, 3)


def _metadata(kind: str, pid: int, tid: int, said: dict[str, Any]) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": said}


def _tid(device: int, track: int) -> int:
    return (device + 1) * _TRACKS_A_DEVICE + track


def _span(numbers: Sequence[int]) -> str:
    """The smallest and the largest."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _state(work: StageWork) -> str:
    if work.cancelled:
        return " (cancelled)"
    return "" if work.rows else " (empty)"
