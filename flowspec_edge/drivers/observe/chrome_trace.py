"""A request's timeline in Chrome's Trace Event Format, for chrome://tracing and Perfetto.

Shows the pipeline of the paper's Figure 2: one process per device, and arrows that follow each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec_edge.d0.run_events import (
    Cancelled,
    DraftDeviceWork,
    OutputArrived,
    Pruned,
    SegmentSent,
    SessionOpened,
    StagesLost,
    StageTimes,
)
from flowspec_edge.drivers.observe.timeline import RequestTimeline, StageClocks
from flowspec_edge.messages import Computed
from flowspec_edge.model.text import TextStream

Event = dict[str, Any]

REQUEST, DRAFTING, VERIFYING, SENDING, HINTS = range(1, 6)  # D0's tracks
COMPUTING = 1  # a stage's
_TRACKS = {REQUEST: "request", DRAFTING: "draft passes", VERIFYING: "verification",
           SENDING: "segments on their way to V1", HINTS: "prunes and cancels"}
_TRACKS_PER_DEVICE = 10  # thread ids are unique in the whole file, as in an operating system
_SHARED_CLOCK = "all devices share one clock"
_MAPPED = ("each stage's clock is mapped onto D0's by its quickest message, "
           "which counts as one that took no time")


def chrome_trace(timeline: RequestTimeline, stages: int, about: dict[str, Any],
                 decode: Callable[[Sequence[int]], str] | None = None, before: Sequence[int] = ()
                 ) -> dict[str, Any]:
    """Return the file's JSON object; times are microseconds since the request began.

    about   added to ``otherData``
    decode  text of tokens, of which ``before`` precede the answer

    Phases: X device work; s, t, f a segment from sending to verification; i prunes, cancels and losses; C
    tokens of the answer, and living draft nodes in flight.
    """
    return _Writer(timeline, stages, decode, before).document(about)


@dataclass(eq=False)
class _Segment:
    event: SegmentSent
    prompt: bool  # its rows are text
    next_sent_at: float | None = None  # when the segment after it was sent
    cancelled_at: float | None = None
    times: list[Computed] = field(default_factory=list)
    verified: Event | None = None  # the slice


class _Writer:
    def __init__(self, timeline: RequestTimeline, stages: int, decode: Callable[[Sequence[int]], str] | None,
                 before: Sequence[int]) -> None:
        self._timeline = timeline
        self._stages = stages
        first = timeline.events[0] if timeline.events else None
        self._began_at = first.at if first else 0.0
        self._latest = self._began_at  # the last moment that is known of the request
        self._clocks = StageClocks()
        if not timeline.shares_clock:
            for event in timeline.events:
                if isinstance(event, StageTimes):
                    self._clocks.learn(event.times, event.at)
        self._events: list[Event] = []
        self._flows = 0
        self._pieces: list[str] = []
        self._text = TextStream(decode, self._pieces.append, before) if decode else None
        self._text_rows = 0  # tokens that the newest session reads in
        self._segments: dict[tuple[int, int], _Segment] = {}  # by session and run, as they were sent
        self._newest: _Segment | None = None  # of the session
        self._in_flight: dict[int, set[int]] = {}  # numbers of living draft nodes, by run
        self._first_token_at: float | None = None
        self._tokens = 0

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        for event in self._timeline.events:
            self._latest = max(self._latest, event.at)
            self._add(event)
        for segment in self._segments.values():
            self._draw(segment)
        if self._timeline.events:
            self._draw_request()
        self._events.sort(key=lambda event: event["ts"])  # stable: a flow stays behind its slice
        trace_facts = {"complete": self._timeline.result is not None,
                       "clocks": _SHARED_CLOCK if self._timeline.shares_clock else _MAPPED}
        return {"traceEvents": [*self._names(), *self._events], "displayTimeUnit": "ms",
                "otherData": about | trace_facts}

    def _names(self) -> Iterator[Event]:
        for device in range(self._stages + 1):
            pid = device + 1
            yield _metadata("process_name", pid, 0, {"name": f"V{device}" if device else "D0"})
            yield _metadata("process_sort_index", pid, 0, {"sort_index": device})
            for track, name in (_TRACKS if not device else {COMPUTING: "computing"}).items():
                yield _metadata("thread_name", pid, _tid(device, track), {"name": name})
                yield _metadata("thread_sort_index", pid, _tid(device, track), {"sort_index": track})

    # ---- one event of the timeline -----------------------------------------------------------------

    def _add(self, event: object) -> None:
        match event:
            case SessionOpened():
                self._text_rows, self._newest, self._in_flight = event.text, None, {}
                self._count_in_flight(event.at)
            case SegmentSent():
                self._add_segment(event)
            case Pruned():
                interval = f"{event.start} to {event.stop - 1}" if event.stop > event.start else "none"
                self._instant("prune", event.at, HINTS, {"of the numbers": interval, "kept": len(event.keep)})
                pruned = set(range(event.start, event.stop)) - set(event.keep)
                self._in_flight = {run: numbers - pruned for run, numbers in self._in_flight.items()}
                self._count_in_flight(event.at)
            case Cancelled():
                self._instant("cancel", event.at, HINTS, {"segments cancelled": list(event.runs)})
                for run in event.runs:
                    segment = self._segments.get((event.session, run))
                    if segment and segment.cancelled_at is None:
                        segment.cancelled_at = event.at
                    if run in self._in_flight:
                        self._in_flight[run] = set()
                self._count_in_flight(event.at)
            case StageTimes():
                self._segments[event.session, event.times.run].times.append(event.times)
            case OutputArrived():
                if self._in_flight.pop(event.run, None) is not None:
                    self._count_in_flight(event.at)
            case DraftDeviceWork(kind="draft"):
                self._slice("draft pass", "draft", event.start, event.at, 0, DRAFTING,
                            {"tree nodes expanded": event.rows})
            case DraftDeviceWork():
                self._verified(event)
            case StagesLost():
                self._instant("the stages were lost", event.at, REQUEST, {"why": event.reason})

    def _add_segment(self, event: SegmentSent) -> None:
        prompt = bool(event.positions) and event.positions[-1] < self._text_rows
        if self._newest:
            self._newest.next_sent_at = event.at
        self._newest = self._segments[event.session, event.run] = _Segment(event, prompt)
        if not prompt:
            self._in_flight[event.run] = set(event.numbers)
            self._count_in_flight(event.at)

    def _verified(self, event: DraftDeviceWork) -> None:
        segment = self._segments[event.session, event.run]
        args = _about(segment) | {"rows that came back": event.rows,
                                  "tokens that became text": len(event.tokens)}
        if event.tokens:
            self._tokens += len(event.tokens)
            self._counter("tokens of the answer", event.at, "tokens", self._tokens)
            if self._first_token_at is None:
                self._first_token_at = event.at
            if self._text:
                self._pieces.clear()
                self._text.push(list(event.tokens))
                args["text"] = "".join(self._pieces)
        segment.verified = self._slice(f"verify segment {event.run}", _category(segment), event.start,
                                       event.at, 0, VERIFYING, args)

    def _count_in_flight(self, at: float) -> None:
        self._counter("draft nodes in flight", at, "nodes", sum(map(len, self._in_flight.values())))

    # ---- a segment, and the request as a whole -----------------------------------------------------

    def _draw(self, segment: _Segment) -> None:
        event, about, category = segment.event, _about(segment), _category(segment)
        name = f"segment {event.run}"
        ordered = sorted(segment.times, key=lambda times: times.stage)
        works = [(times, *self._clocks.times(times)) for times in ordered]
        began_at = works[0][1] if works and works[0][0].stage == 1 else event.at
        at_v1 = max(event.at, began_at if segment.next_sent_at is None else min(began_at, segment.next_sent_at))
        state = "" if event.numbers else " (empty)"
        slices = [self._slice(f"{name}{state}", category, event.at, at_v1, 0, SENDING, about)]
        for times, start, end in works:
            cancelled = (bool(event.numbers) and not times.rows
                         and segment.cancelled_at is not None and segment.cancelled_at < end)
            state = " (cancelled)" if cancelled else "" if times.rows else " (empty)"
            slices.append(self._slice(f"{name}{state}", category, start, end, times.stage, COMPUTING,
                                      about | {"rows computed": times.rows, "cancelled": cancelled}))
            self._latest = max(self._latest, end)
        if segment.verified:
            slices.append(segment.verified)
        self._arrow([s for s in slices if s["dur"] > 0])  # nothing can be bound to a moment

    def _arrow(self, slices: list[Event]) -> None:
        """Connect the slices; each end is bound to its slice."""
        if len(slices) < 2:
            return
        self._flows += 1
        phases = ["s", *["t"] * (len(slices) - 2), "f"]
        for phase, bound in zip(phases, slices, strict=True):
            event = {"name": "segment", "cat": "flow", "ph": phase, "id": self._flows, "ts": bound["ts"],
                     "pid": bound["pid"], "tid": bound["tid"]}
            self._events.append(event | ({"bp": "e"} if phase == "f" else {}))

    def _draw_request(self) -> None:
        request, result = self._timeline.request, self._timeline.result
        args: dict[str, Any] = {"strategy": request.strategy, "prompt tokens": len(request.prompt),
                                "answer's tokens": self._tokens,
                                "ended by": result.finish_reason if result else "being broken off"}
        end = self._timeline.events[-1].at if result else self._latest
        first = end if self._first_token_at is None else self._first_token_at
        self._slice("request", "request", self._began_at, end, 0, REQUEST, args)
        self._slice("reading the prompt", "request", self._began_at, first, 0, REQUEST, {})
        if self._first_token_at is not None:
            self._slice("decoding", "request", first, end, 0, REQUEST, {})

    # ---- events of the file ------------------------------------------------------------------------

    def _slice(self, name: str, category: str, start: float, end: float, device: int, track: int,
               args: dict[str, Any]) -> Event:
        begin = self._ts(start)
        event = {"name": name, "cat": category, "ph": "X", "ts": begin,
                 "dur": round(self._ts(end) - begin, 3), "pid": device + 1, "tid": _tid(device, track),
                 "args": args}
        self._events.append(event)
        return event

    def _instant(self, name: str, at: float, track: int, args: dict[str, Any]) -> None:
        self._events.append({"name": name, "cat": "hint", "ph": "i", "s": "t", "ts": self._ts(at), "pid": 1,
                             "tid": _tid(0, track), "args": args})

    def _counter(self, name: str, at: float, series: str, value: int) -> None:
        self._events.append({"name": name, "ph": "C", "ts": self._ts(at), "pid": 1,
                             "tid": _tid(0, REQUEST), "args": {series: value}})

    def _ts(self, moment: float) -> float:
        """Microseconds since the request began."""
        return round((moment - self._began_at) * 1e6, 3)


def _about(segment: _Segment) -> dict[str, Any]:
    event = segment.event
    about: dict[str, Any] = {"segment": event.run, "rows sent": len(event.numbers),
                             "rows are": "prompt" if segment.prompt else "draft tokens"}
    if event.numbers:
        about |= {"numbers": _range(event.numbers), "positions in the text": _range(event.positions)}
    return about


def _category(segment: _Segment) -> str:
    return "prompt" if segment.prompt else "draft"


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _tid(device: int, track: int) -> int:
    return (device + 1) * _TRACKS_PER_DEVICE + track


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
