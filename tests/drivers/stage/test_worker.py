"""A stage's loop over in-memory links: order of messages, reports, and errors.

Where it matters when something arrives, the engine is one whose ``compute`` can be held open;
elsewhere it is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from kits.process_clusters import until
from kits.worker_thread import PATIENCE, HeldEngine, Stage, Start, segment

from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.stage.status_sender import format_error
from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import (
    Batch,
    Cancel,
    Close,
    Computed,
    Credit,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Open,
    Output,
    Payload,
    Prune,
    Segment,
    SessionReport,
    Shutdown,
)
from flowspec_edge.stage.engine import Poll, SegmentResult, StageEngine


def test_a_stage_greets_computes_and_reports(start: Start, real: StageEngine) -> None:
    stage = start(real)
    assert stage.hear(Hello) == Hello("v1", 1, 1, (0, 2), "digest")
    stage.tell(Open(1, 0, 64))
    for run in range(3):
        stage.give(segment(run, rows=2))
        output = stage.result()
        assert output.numbers.tolist() == [2 * run, 2 * run + 1]
        assert stage.hear(Credit) == Credit(1, 0, run)
    stage.tell(Close(1))
    last = stage.hear(SessionReport, lambda report: report.session == 1).counters
    assert (last["segments"], last["rows"], last["tokens"]) == (3, 6, 4)
    assert last["bytes_in"] == stage.first.bytes_out
    assert last["bytes_out"] == stage.output.bytes_in
    assert last["compute_s"] > 0
    assert 0 < last["slot_s"] <= last["compute_s"]
    stage.tell(Shutdown("done"))
    assert stage.ended() is None


def test_a_cancelled_segment_is_told_of_as_one_without_rows(start: Start) -> None:
    engine = HeldEngine()
    stage = start(engine)
    stage.tell(Open(1, 0, 64, timed=True))
    stage.give(segment(0, rows=2))
    assert engine.started.wait(PATIENCE)
    stage.tell(Cancel(1, 0, (0,)))
    told = stage.hear(Computed)
    assert (told.run, told.rows) == (0, 0)
    assert told.start < told.end


def test_a_session_that_ends_within_a_segment(start: Start, real: StageEngine) -> None:
    class Ending(StageEngine):
        """D0 closes the session while its second segment is computed."""

        def compute(self, admitted: Sequence[Segment], poll: Poll | None = None) -> list[SegmentResult]:
            if admitted[0].run == 1:
                stage.tell(Close(1))
                until_closed(poll)
            return super().compute(admitted, poll)

    def until_closed(poll: Poll | None) -> None:
        assert poll is not None
        while engine.sessions:
            poll()

    engine = Ending(real.model)
    stage = start(engine)
    stage.tell(Open(1, 0, 64, timed=True))
    for run in range(2):
        stage.give(segment(run, rows=2))
    assert stage.hear(SessionReport, lambda report: report.session == 1).counters["rows"] == 2
    stage.hear(Credit, lambda credit: credit.run == 1)
    beat = stage.hear(Heartbeat).counters
    assert (beat["rows"], beat["since"]) == (2, 1)


def goes_on(stage: Stage, session: int) -> None:
    stage.tell(Open(session, 0, 64))
    stage.give(segment(0, session=session))
    assert stage.result().session == session


def test_two_sessions_each_have_their_own_counters(start: Start, real: StageEngine) -> None:
    """The end of one leaves the other; the last report is on its own share, the others on both."""
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.tell(Open(2, 0, 64, concurrent=(1,)))
    for run in range(2):
        for session, rows in ((1, 2), (2, 3)):
            stage.give(segment(run, rows=rows, session=session))
            output = stage.result()
            assert (output.session, output.run, len(output.numbers)) == (session, run, rows)
    sent = stage.first.bytes_out
    stage.tell(Close(1))
    first = stage.hear(SessionReport, lambda report: report.session == 1).counters
    assert (first["segments"], first["rows"], first["tokens"]) == (2, 4, 2)
    both = stage.hear(Heartbeat).counters
    assert (both["segments"], both["rows"], both["tokens"], both["bytes_in"]) == (4, 10, 5, sent)
    stage.give(segment(2, rows=2, session=1))  # was on its way: no output, but V1 has room again
    stage.hear(Credit, lambda credit: (credit.session, credit.run) == (1, 2))
    stage.give(segment(2, rows=3, session=2))
    assert stage.result().session == 2
    stage.tell(Close(2))
    second = stage.hear(SessionReport, lambda report: report.session == 2).counters
    assert (second["segments"], second["rows"]) == (3, 9)
    assert first["bytes_in"] < sent - first["bytes_in"] < second["bytes_in"]
    assert min(first["compute_s"], second["compute_s"]) > 0


def test_a_stale_segment_is_dropped_without_a_word(start: Start, real: StageEngine) -> None:
    stage = start(real)
    stage.tell(Open(5, 0, 64))
    stage.give(segment(0, session=4))
    stage.hear(Heartbeat, lambda beat: beat.counters["dropped_stale"] == 1)
    stage.give(segment(0, session=5))
    assert stage.result().session == 5


def test_control_is_obeyed_within_a_segment(start: Start) -> None:
    engine = HeldEngine()
    stage = start(engine)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    assert engine.started.wait(PATIENCE)
    for _ in range(3):
        stage.hear(Heartbeat)
    prune = Prune(1, 0, 0, 0, 1, np.array([0], np.int32))
    stage.tell(prune)
    stage.tell(Cancel(1, 0, (0,)))
    assert stage.result().run == 0
    assert [type(call) for call in engine.calls] == [Open, Prune, Cancel]


def test_a_stage_can_be_ended_in_the_middle_of_a_segment(start: Start) -> None:
    engine = HeldEngine()
    stage = start(engine)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    assert engine.started.wait(PATIENCE)
    stage.tell(Shutdown("now"))
    assert stage.ended() is None


NO_ROWS = Output(1, 0, 0, np.empty(0, np.int32), Payload("float32", np.empty((0, 4), np.float32)))


@pytest.mark.parametrize(("link", "wrong", "text"), [
    ("control", Failed("v1", 1, "?"), "D0 sent a Failed"),
    ("control", Open(2, 0, 64, version=99), "D0 speaks protocol version 99"),
    ("control", Open(2, 0, 64, parent_session=1, rows=40), "rows of session 1"),
    ("control", Close(1, (5, 6)), "not all of them are among"),
    ("data", Close(1), "a Close is not a segment"),
    ("data", Batch((NO_ROWS, replace(NO_ROWS, session=2))), "a Batch is not a segment"),
    ("data", replace(segment(0, rows=2), bits=np.zeros((2, 1), np.uint8)), "a row does not see itself"),
    ("data", segment(0, rows=70), "70 rows are more than the session's capacity"),
])
def test_what_is_wrong_ends_the_sessions_and_not_the_stage(start: Start, real: StageEngine, link: str, wrong: Message,
                                                           text: str) -> None:
    """D0 hears of it."""
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    if link == "control":
        stage.tell(wrong)
    else:
        assert stage.first.send(wrong, PATIENCE)
        until(lambda: not real.sessions)
    assert text in stage.hear(Failed).cause
    if isinstance(wrong, Segment):
        stage.hear(Credit)  # V1 has room again
    goes_on(stage, 3)


def test_an_emulated_stage_tells_by_how_much_it_was_too_slow(start: Start, real: StageEngine) -> None:
    stage = start(real, charge=Charge(lambda rows, context, alike: 0.0))
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0, rows=2))
    stage.result()
    stage.tell(Close(1))
    last = stage.hear(SessionReport).counters
    assert 0 < last["late_s"] <= last["compute_s"]


def test_errors_become_one_line() -> None:
    assert format_error(FlowspecError("what\nwhere")) == "what where"
    assert format_error(KeyError("k")) == "KeyError: 'k'"
