"""What a trace must keep to: the Trace Event Format as it is documented, and the request that it is of."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from flowspec_edge.d0.request import Result

Event = dict[str, Any]

NEEDED = {"X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "i": {"name", "ts", "pid", "tid", "s"},
          "C": {"name", "ts", "pid", "args"}, "M": {"name", "pid", "tid", "args"},
          **{flow: {"name", "cat", "id", "ts", "pid", "tid"} for flow in "stf"}}
NAMES = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
         "thread_sort_index": "sort_index"}
US = 2.0  # stages tell whole microseconds


def check_format(document: dict[str, Any]) -> list[Event]:
    """Hold a trace against the format alone; returns its events as a reader of the file gets them."""
    read = json.loads(json.dumps(document, allow_nan=False))
    events: list[Event] = read["traceEvents"]
    assert read["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    flows = defaultdict(list)
    slices = defaultdict(list)
    for event in events:
        phase = event["ph"]
        assert event.keys() >= NEEDED[phase], event
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        assert isinstance(event.get("ts", 0.0), (int, float))
        match phase:
            case "M":
                assert list(event["args"]) == [NAMES[event["name"]]]
                named.add((event["pid"], event["tid"]))
            case "X":
                assert event["dur"] >= 0
                slices[event["pid"], event["tid"]].append(event)
            case "i":
                assert event["s"] in "gpt"
            case "C":
                assert all(isinstance(value, (int, float)) for value in event["args"].values())
            case _:
                flows[event["name"], event["cat"], event["id"]].append(event)
    assert {(event["pid"], event["tid"]) for event in events} <= named
    for track in slices.values():  # of one track's slices each holds another whole, or not at all
        ends: list[float] = []
        for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
            ends.append(event["ts"] + event["dur"])
    for steps in flows.values():
        phases = "".join(step["ph"] for step in steps)
        assert phases == "s" + "t" * (len(steps) - 2) + "f", "an arrow begins once and ends once"
        assert steps[-1]["bp"] == "e"
        for step in steps:  # bound to a slice that takes time
            assert any(s["ts"] <= step["ts"] < s["ts"] + s["dur"]
                       for s in slices[step["pid"], step["tid"]]), step
        assert all(a["ts"] <= b["ts"] + US for a, b in pairwise(steps))
    return events


def tracks(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """The slices by device and track, in order."""
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[process[event["pid"]], thread[event["tid"]]].append(event)
    return found


def check_trace(document: dict[str, Any], result: Result, pipeline: bool = True) -> list[Event]:
    """Hold a whole request's trace against what came of the request."""
    events = check_format(document)
    found = tracks(events)
    stages = len(result.stats.stages)
    assert {device for device, _ in found} == {"D0", *(f"V{i}" for i in range(1, stages + 1))}
    [whole, reading, decoding] = found["D0", "request"]
    assert (whole["ts"], reading["ts"]) == (0, 0)
    assert document["otherData"]["complete"] is True
    assert whole["args"]["ended by"] == result.finish_reason
    assert reading["dur"] / 1e6 == pytest.approx(result.stats.ttft_s, abs=0.05)
    assert decoding["ts"] + decoding["dur"] == pytest.approx(whole["dur"])
    for event in events:
        if event["ph"] != "M":
            assert -US <= event["ts"] <= event["ts"] + event.get("dur", 0) <= whole["dur"] + US, event
    ends: dict[int, float] = {}
    for index, counters in enumerate(result.stats.stages, start=1):
        computed = found[f"V{index}", "computing"]
        taken = sum(event["dur"] for event in computed)
        assert taken / 1e6 == pytest.approx(counters["compute_s"], abs=US * 1e-6 * (len(computed) + 1))
        assert sum(event["args"]["rows computed"] for event in computed) == counters["rows"]
        runs = [event["args"]["segment"] for event in computed]
        assert runs == list(range(len(runs)))
        for event in computed if pipeline else []:  # a segment is in one stage after another
            run = event["args"]["segment"]
            assert event["ts"] >= ends.get(run, 0.0) - US
            ends[run] = event["ts"] + event["dur"]
    verified = found["D0", "verification"]
    for event in verified if pipeline else []:
        assert event["ts"] >= ends[event["args"]["segment"]] - US
    assert sum(e["args"]["tokens that became text"] for e in verified) == len(result.tokens)
    last = [e for e in events if e["name"] == "tokens of the answer"][-1]
    assert last["args"]["tokens"] == len(result.tokens)
    flight = [e["args"]["nodes"] for e in events if e["name"] == "draft nodes in flight"]
    assert flight[0] == 0 <= min(flight)
    return events
