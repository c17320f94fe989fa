"""What a cluster of processes tells its observers, held against the requests' own results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kits.chrome_traces import check_trace
from kits.process_clusters import PROMPT

from flowspec_edge.d0.observer import Observer, Observers
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.run_events import (
    DraftDeviceWork,
    HeartbeatArrived,
    RunEvent,
    SegmentSent,
    SessionEnded,
    SessionOpened,
    StageTimes,
)
from flowspec_edge.drivers.observe.chrome_trace import chrome_trace
from flowspec_edge.drivers.observe.timeline import RequestTimeline
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Computed, Heartbeat
from flowspec_edge.sampling.rule import Sampling

STAGES = 2


class Watch(Observer):
    """Notes what the stages and D0 tell; wants times while ``timed``."""

    def __init__(self) -> None:
        self.timed = False
        self.segments: list[SegmentSent] = []
        self.times: list[tuple[Computed, float]] = []
        self.beats: list[Heartbeat] = []
        self.opened_at = 0.0

    @property
    def wants_times(self) -> bool:
        return self.timed

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                self.opened_at = event.at
                self.segments.clear()
                self.times.clear()
            case SegmentSent():
                self.segments.append(event)
            case StageTimes():
                self.times.append((event.times, event.at))
            case HeartbeatArrived():
                self.beats.append(event.beat)


def test_segments_times_add_up_to_the_stages_counters(model: Path) -> None:
    watch = Watch()
    request = Request(PROMPT, "flowspec", max_new_tokens=16)
    trace = RequestTimeline(request)
    with ProcessCluster(ClusterSpec(model, STAGES, threads=1, observer=Observers([trace, watch]))).start() as cluster:
        silent = cluster.generate(replace(request))
        assert watch.times == []
        watch.timed = True
        result = cluster.generate(request)
    check_trace(chrome_trace(trace, STAGES, {}), result)
    assert result.tokens == silent.tokens == PlainDecoder(model).generate(PROMPT, 16, Sampling())[0]
    for stage, counters in enumerate(result.stats.stages, start=1):
        mine = [told for told, _ in watch.times if told.stage == stage]
        # Each segment is told of once, in order; the text may end while the last one is computed.
        assert [told.run for told in mine] == [segment.run for segment in watch.segments][: len(mine)]
        assert 0 <= counters["segments"] - len(mine) <= 1
        assert sum(told.rows for told in mine) == counters["rows"] >= len(PROMPT)
        taken = sum(told.end - told.start for told in mine) / 1e6
        assert taken == pytest.approx(counters["compute_s"], abs=1e-6 * (len(mine) + 1))
    for told, at in watch.times:  # on one machine there is one clock
        assert watch.opened_at * 1e6 - 1 < told.start <= told.end <= told.sent <= at * 1e6 + 1
    alive = [beat.counters for beat in watch.beats]
    assert all(counters["memory_total"] > counters["resident"] > 0 for counters in alive)
    assert max(counters["cache_bytes"] for counters in alive) > 0


class Broken(Observer):
    """Raises at one kind of event, always."""

    def __init__(self, moment: type) -> None:
        self._moment = moment

    def observe(self, event: RunEvent) -> None:
        if isinstance(event, self._moment):
            raise ZeroDivisionError(event)


@pytest.mark.parametrize("moment", [SessionOpened, DraftDeviceWork, SessionEnded])
def test_one_that_raises_ends_nothing_and_is_told_on(
        model: Path, caplog: pytest.LogCaptureFixture, moment: type) -> None:
    requests = [Request(PROMPT, "flowspec", max_new_tokens=n) for n in (4, 16)]
    answer = PlainDecoder(model).generate(PROMPT, 16, Sampling())[0]
    with ProcessCluster(ClusterSpec(model, STAGES, threads=1, observer=Broken(moment))).start() as cluster:
        results = cluster.generate_many(requests)
    assert [result.tokens for result in results] == [answer[:4], answer]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
