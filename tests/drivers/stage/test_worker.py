"""A stage's loop over in-memory links: order of messages, reports, errors, batches, and what may be lost.

Where it matters when something arrives, the engine is one whose ``compute`` can be held open;
elsewhere it is the real one.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from kits.process_clusters import until
from kits.worker_thread import PATIENCE, HeldEngine, Stage, Start, segment

from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.stage.status_sender import format_error
from flowspec_edge.errors import FlowspecError, PeerLost
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
from flowspec_edge.stage.engine import StageEngine


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


def test_errors_become_format_error() -> None:
    assert format_error(FlowspecError("what\nwhere")) == "what where"
    assert format_error(KeyError("k")) == "KeyError: 'k'"


def outputs(message: Message | None) -> list[tuple[int, int, int]]:
    """Session, run and rows of each."""
    parts = message.parts if isinstance(message, Batch) else [message]
    return [(part.session, part.run, len(part.numbers)) for part in parts if isinstance(part, Output)]


def test_a_batch_is_one_pass_and_one_message(start: Start, real: StageEngine) -> None:
    stage = start(real)
    stage.tell(Open(1, 0, 64, timed=True))
    stage.tell(Open(2, 0, 64, concurrent=(1,), timed=True))
    stage.give(Batch((segment(0, rows=2), segment(0, rows=5, session=2))))
    assert outputs(stage.output.receive(PATIENCE)) == [(1, 0, 2), (2, 0, 5)]
    assert stage.hear(Credit) == Credit(1, 0, 0)
    reports = [stage.hear(Computed) for _ in range(2)]
    assert [(c.session, c.rows, c.batch_rows) for c in reports] == [(1, 2, 7), (2, 5, 7)]
    assert len({(c.start, c.end) for c in reports}) == 1
    ended = []
    for session in (1, 2):
        stage.tell(Close(session))
        ended.append(stage.hear(SessionReport, lambda report, n=session: report.session == n).counters)
    assert [c["rows"] for c in ended] == [2, 5]
    assert sum(c["bytes_in"] for c in ended) == stage.first.bytes_out
    assert sum(c["bytes_out"] for c in ended) == stage.output.bytes_in
    assert ended[0]["compute_s"] == ended[1]["compute_s"] > 0  # each for the whole pass


@pytest.mark.parametrize("gone", [1, 2])
def test_parts_of_ended_sessions_are_taken_out(start: Start, real: StageEngine, gone: int) -> None:
    """One was on its way when its session ended; D0 knows the batch by its first segment in any case."""
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.tell(Open(2, 0, 64, concurrent=(1,)))
    stage.tell(Close(gone))
    stage.hear(SessionReport)
    stage.give(Batch((segment(0), segment(0, session=2))))
    assert outputs(stage.output.receive(PATIENCE)) == [(3 - gone, 0, 1)]
    assert stage.hear(Credit) == Credit(1, 0, 0)


def test_while_there_is_no_room_only_living_parts_wait(start: Start, real: StageEngine) -> None:
    stage = start(real, data_queue=1)
    stage.tell(Open(1, 0, 64))
    stage.tell(Open(2, 0, 64, concurrent=(1,)))
    for run in range(2):
        stage.give(Batch((segment(run), segment(run, session=2))))
    stage.hear(Heartbeat, lambda beat: beat.counters["segments"] == 4)  # there is no room for the second
    stage.tell(Close(1))
    stage.hear(SessionReport, lambda report: report.session == 1)
    assert outputs(stage.output.receive(PATIENCE)) == [(1, 0, 1), (2, 0, 1)]
    # A part that was being computed when its session was closed goes on without rows; D0 drops it.
    assert [part for part in outputs(stage.output.receive(PATIENCE)) if part[2]] == [(2, 1, 1)]


def test_a_stage_that_d0_started_ends_without_it(start: Start, real: StageEngine) -> None:
    stage = start(real, lost_after_s=0.1, parent=os.getppid())
    stage.hear(Hello)
    stage.hub.close()
    error = stage.ended()
    assert isinstance(error, PeerLost)
    assert "no connection to D0" in str(error)


def test_a_stage_waits_for_another_d0(start: Start, real: StageEngine) -> None:
    stage = start(real, lost_after_s=0.1)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.hub.close()
    until(lambda: not real.sessions)
    assert stage.thread.is_alive()
    stage.hub = stage.network.hub("d0", "another D0")


def test_a_stage_without_a_next_one_lives_on(start: Start, real: StageEngine) -> None:
    """Its sessions may have lost messages; but the shard is loaded, and the next device may be back."""
    stage = start(real, broken_after_s=0.1)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.output.close()
    assert "the connection broke during a session" in stage.hear(Failed).cause
    stage.hear(Heartbeat, lambda beat: beat.isolated)
    stage.give(segment(1))  # of the session that is over
    assert not real.sessions
    stage.output = stage.network.pull("out", "D0 data in")
    stage.hear(Heartbeat, lambda beat: not beat.isolated)
    goes_on(stage, 2)


def test_a_gap_in_a_session_ends_the_session_and_not_the_stage(start: Start, real: StageEngine) -> None:
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.give(segment(2))
    assert "came after segment 0: one is lost" in stage.hear(Failed).cause
    stage.hear(Credit, lambda credit: credit.run == 2)  # V1 has room again
    goes_on(stage, 2)


def test_a_segment_from_before_a_loss_does_not_wait_for_its_open(start: Start, real: StageEngine) -> None:
    """D0 tells a restarted stage how far the session numbers have come."""
    stage = start(real, open_within_s=PATIENCE)
    stage.tell(Close(7))
    stage.give(segment(3, session=7))
    stage.hear(Credit, lambda credit: credit.session == 7)
    goes_on(stage, 8)


def test_a_stage_does_not_outlive_its_parent(start: Start, real: StageEngine) -> None:
    stage = start(real, parent=1 << 22)  # above any process id of this machine's
    assert isinstance(stage.ended(), PeerLost)
