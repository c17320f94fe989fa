"""The trace of a request in virtual time, held against the format and the request's own figures.

Over processes it is tested in test_observer.py, beside what it is made of, and here where a stage is lost.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from kits.chrome_traces import check_format, check_trace, tracks
from kits.process_clusters import PATIENCE, PROMPT, on_third
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import OnTokens, Request, Result
from flowspec_edge.d0.run_events import RunEvent, SessionOpened, StageTimes
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.observe.chrome_trace import chrome_trace
from flowspec_edge.drivers.observe.timeline import RequestTimeline
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling

STAGES = 3
PROFILE = load_profile("paper-7b")


def traced(model: Path, strategy: str, profile: Profile = PROFILE, tokens: int = 16,
           on_tokens: OnTokens | None = None) -> tuple[RequestTimeline, Result]:
    request = Request(list(range(3, 40)), strategy, tokens, Sampling(1.0, seed=3))
    trace = RequestTimeline(request)
    result = VirtualCluster(model, STAGES, profile, observer=trace).generate(request, on_tokens)
    return trace, result


def openings(trace: RequestTimeline) -> list[SessionOpened]:
    return [event for event in trace.events if isinstance(event, SessionOpened)]


@pytest.mark.parametrize("strategy", ["flowspec", "pipedec", "autoregressive", "megatron"])
def test_a_trace_agrees_with_the_figures(tiny_model: Path, strategy: str) -> None:
    trace, result = traced(tiny_model, strategy)
    check_trace(chrome_trace(trace, STAGES, {}), result, pipeline=strategy != "megatron")


def test_watching_changes_nothing(tiny_model: Path) -> None:
    _, watched = traced(tiny_model, "flowspec")
    request = Request(list(range(3, 40)), "flowspec", 16, Sampling(1.0, seed=3))
    assert VirtualCluster(tiny_model, STAGES, PROFILE).generate(request) == watched


def test_it_is_the_cluster_s_own_spans(tiny_model: Path) -> None:
    """The same run as who was busy when, which the drawn timelines are of."""
    request = Request(list(range(3, 40)), "flowspec", 16)
    trace = RequestTimeline(request)
    cluster = VirtualCluster(tiny_model, STAGES, PROFILE, observer=trace)
    cluster.generate(request)
    found = tracks(check_format(chrome_trace(trace, STAGES, {})))
    assert trace.result is not None
    tracks_of = {("D0", "draft passes"): (0, "draft"), ("D0", "verification"): (0, "verify"),
                 **{(f"V{i}", "computing"): (i, "compute") for i in range(1, STAGES + 1)}}
    for track, what in tracks_of.items():
        spans = [s for s in cluster.spans
                 if (s.device, s.kind) == what and s.start < s.end <= trace.events[-1].at]
        shown = [event for event in found[track] if event["dur"]]
        assert len(shown) == len(spans) > 0
        for event, span in zip(shown, spans, strict=True):
            assert event["ts"] == pytest.approx(span.start * 1e6, abs=2)
            assert event["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=2)
            assert event["args"].get("segment", -1) == span.run


def test_cancelled_and_empty_segments_are_shown_as_such(tiny_model: Path) -> None:
    trace, result = traced(tiny_model, "pipeinfer", tokens=24)
    events = check_trace(chrome_trace(trace, STAGES, {}), result)
    cancels = [e for e in events if e["name"] == "cancel"]
    runs = {run for e in cancels for run in e["args"]["segments cancelled"]}
    shown = [e for e in events if e["ph"] == "X" and e["args"].get("cancelled")]
    assert shown
    assert {e["args"]["segment"] for e in shown} <= runs
    assert all(e["name"].endswith("(cancelled)") and not e["args"]["rows computed"] for e in shown)
    trace, result = traced(tiny_model, "flowspec", tokens=24)
    events = check_trace(chrome_trace(trace, STAGES, {}), result)
    empty = [e for e in events if e["ph"] == "X" and e["name"].endswith("(empty)")]
    assert empty
    assert not any(e["args"].get("rows computed", 0) for e in empty)
    prunes = [e for e in events if e["name"] == "prune"]
    assert prunes
    assert all(e["args"]["kept"] >= 0 for e in prunes)


def test_what_there_is_of_an_interrupted_request_is_marked(tiny_model: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    request = Request(list(range(3, 40)), "flowspec", 50)
    trace = RequestTimeline(request)
    cluster = VirtualCluster(tiny_model, STAGES, PROFILE, observer=trace)
    with pytest.raises(KeyboardInterrupt):
        cluster.generate(request, on_third(interrupt))
    document = chrome_trace(trace, STAGES, {})
    found = tracks(check_format(document))
    assert document["otherData"]["complete"] is False
    [whole, *_] = found["D0", "request"]
    assert whole["args"]["ended by"] == "being broken off"
    assert whole["args"]["answer's tokens"] >= 3
    assert max(e["ts"] + e["dur"] for events in found.values() for e in events) <= whole["dur"] + 1


def test_other_requests_are_passed_over(tiny_model: Path) -> None:
    watched, other = Request([1, 2, 3], "flowspec", 6), Request([1, 2, 3], "flowspec", 6)
    trace = RequestTimeline(watched)
    cluster = VirtualCluster(tiny_model, STAGES, PROFILE, observer=trace)
    cluster.generate(other)
    assert trace.events == []
    assert check_format(chrome_trace(trace, STAGES, {}))
    result, _ = cluster.generate_many([watched, other])
    assert len(openings(trace)) == 1
    check_trace(chrome_trace(trace, STAGES, {}), result)


def test_clocks_elsewhere_are_mapped_by_the_quickest_message(tiny_model: Path) -> None:
    """Stages whose clocks are minutes off, and whose messages take from 1 ms to 3 ms."""
    request = Request(list(range(3, 40)), "flowspec", 16)

    class Elsewhere(RequestTimeline):
        def observe(self, event: RunEvent) -> None:
            if isinstance(event, StageTimes):
                times = event.times
                off, way = times.stage * 100_000_000, 0.001 + 0.001 * (times.run % 3)
                event = event._replace(at=event.at + way, times=replace(
                    times, start=times.start - off, end=times.end - off, sent=times.sent - off))
            super().observe(event)

    here, there = RequestTimeline(request), Elsewhere(request, shares_clock=False)
    for trace in (here, there):
        VirtualCluster(tiny_model, STAGES, PROFILE, observer=trace).generate(request)
    shown, mapped = (tracks(check_format(chrome_trace(trace, STAGES, {}))) for trace in (here, there))
    for stage in range(1, STAGES + 1):
        for mine, told in zip(shown[f"V{stage}", "computing"], mapped[f"V{stage}", "computing"], strict=True):
            assert told["ts"] == pytest.approx(mine["ts"] + 1000, abs=2)
            assert told["dur"] == pytest.approx(mine["dur"], abs=2)
            assert told["args"] == mine["args"]


@pytest.mark.soak
def test_a_request_that_lost_a_stage_is_one_trace(tmp_path: Path) -> None:
    """Over processes: what it read in anew, and what it did from there, follows what it did before."""
    model = tiny_model_dir(tmp_path, layers=2)
    request = Request(PROMPT, "flowspec", 24)
    trace = RequestTimeline(request)
    with ProcessCluster(ClusterSpec(model, 2, threads=1, rejoin_within=PATIENCE, observer=trace)).start() as cluster:
        result = cluster.generate(request, on_third(lambda: os.kill(cluster.pids[1], signal.SIGKILL)))
    assert result.tokens == PlainDecoder(model).generate(PROMPT, 24, Sampling())[0]
    assert len(openings(trace)) == 2
    document = chrome_trace(trace, 2, {})
    events = check_format(document)
    assert document["otherData"]["complete"] is True
    [lost] = [e for e in events if e["name"] == "the stages were lost"]
    assert "V2 was killed" in lost["args"]["why"]
    read = [e for e in tracks(events)["V1", "computing"] if e["args"]["rows are"] == "prompt"]
    assert [e["ts"] > lost["ts"] for e in read] == sorted(e["ts"] > lost["ts"] for e in read)
    again = [e["args"]["rows computed"] for e in read if e["ts"] > lost["ts"]]
    assert sum(again) == openings(trace)[1].text > len(PROMPT)
    assert [e["args"]["tokens"] for e in events if e["name"] == "tokens of the answer"][-1] == 24
