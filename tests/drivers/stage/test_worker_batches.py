"""Batches in a stage's loop: one pass, one message, one credit; each session's figures are its own."""

from __future__ import annotations

import pytest
from kits.worker_thread import PATIENCE, Start, segment

from flowspec_edge.messages import (
    Batch,
    Close,
    Computed,
    Credit,
    Heartbeat,
    Message,
    Open,
    Output,
    SessionReport,
)
from flowspec_edge.stage.engine import StageEngine


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
