"""What a stage takes from its data link, in which order: a session whose Open is late holds up no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kits.worker_thread import PATIENCE, HeldEngine, Stage, Start, segment

from flowspec_edge.messages import Cancel, Credit, Failed, Heartbeat, Open, Segment
from flowspec_edge.stage.core import (
    QUEUED,
    Arrived,
    Emit,
    Idle,
    Outgoing,
    Pass,
    Passed,
    Reject,
    StageCore,
)
from flowspec_edge.stage.engine import StageEngine


class Reader:
    """A stage's queue, over an engine that computes nothing. ``emitted``, ``rejected``: so far."""

    def __init__(self, within_s: float = PATIENCE) -> None:
        self.engine = HeldEngine()
        self.core = StageCore(self.engine, open_within_s=within_s)
        self.emitted: list[Outgoing] = []
        self.rejected: list[str] = []

    def open(self, session: int, among: Iterable[int]) -> None:
        self.core.feed(Open(session, 0, 64, concurrent=tuple(among)), 0.0)

    def give(self, *segments: Segment, now: float = 0.0) -> None:
        self.core.feed(Arrived(segments, 0), now)

    def take_all(self, now: float = 0.0) -> list[Sequence[Segment]]:
        """The messages that are computed, each in a pass that is cancelled at once."""
        taken: list[Sequence[Segment]] = []
        while not isinstance(action := self.core.next(now), Idle):
            match action:
                case Emit(messages):
                    self.emitted += messages
                case Reject(reason):
                    self.rejected.append(reason)
                case Pass():
                    taken.append(action.received)
                    self.engine.calls += [Cancel(part.session, 0, (part.run,)) for part in action.segments]
                    action.compute(lambda: None)
                    self.core.feed(Passed(now, now), now)
        return taken


# Each step opens the next session, or sends a message with the next segments of some sessions (1 to 4).
steps = st.lists(st.none() | st.sets(st.integers(1, 4), min_size=1, max_size=3), max_size=30)


@given(steps)
@example([None, None, None, {2, 4}, {2, 3}, {3}])  # the last may not pass the one before it
def test_a_sessions_segments_keep_their_order_and_none_is_lost(script: list[set[int] | None]) -> None:
    reader, opened, runs = Reader(), 0, dict.fromkeys(range(1, 5), 0)
    sent: list[list[tuple[int, int]]] = []
    taken: list[list[tuple[int, int]]] = []

    def open_next() -> None:
        nonlocal opened
        opened += 1
        reader.open(opened, range(1, opened))

    def take() -> None:
        for segments in reader.take_all():
            assert all(part.session <= opened for part in segments)
            taken.append([(part.session, part.run) for part in segments])

    for step in script:
        if step is None and opened < 4:
            open_next()
        elif step:
            parts = [segment(runs[session], session=session) for session in sorted(step)]
            reader.give(*parts)
            sent.append([(part.session, part.run) for part in parts])
            for session in step:
                runs[session] += 1
        take()
        if all(session <= opened for message in sent for session, _ in message):
            assert len(taken) == len(sent)
    while opened < 4:
        open_next()
    take()
    assert sorted(taken) == sorted(sent)
    for session in runs:
        own = [run for message in taken for which, run in message if which == session]
        assert own == sorted(own)
    assert reader.take_all(PATIENCE) == []
    assert reader.rejected == []


def test_segments_of_unknown_sessions_make_room_for_others() -> None:
    reader = Reader()
    reader.open(1, ())
    for number in range(2, QUEUED + 2):
        assert reader.core.has_room
        reader.give(segment(0, session=number))
    assert not reader.core.has_room
    assert reader.take_all() == []
    [reason] = reader.rejected
    assert f"session 2, but no Open for it while {QUEUED} messages came" in reason
    assert reader.emitted == [Credit(2, 0, 0)]
    reader.give(segment(0, session=1))
    assert [part.session for segments in reader.take_all() for part in segments] == [1]
    assert len(reader.rejected) == 1


def test_segments_do_not_wait_for_ever() -> None:
    reader = Reader(within_s=3.0)
    for session, now in ((4, 1.0), (5, 2.0)):
        reader.give(segment(0, session=session), now=now)
    assert reader.take_all(4.0) == []
    assert reader.rejected == []
    assert reader.take_all(4.1) == []
    [reason] = reader.rejected
    assert "session 4, but no Open for it within 3 s" in reason
    reader.open(5, ())
    assert [part.session for segments in reader.take_all() for part in segments] == [5]


@pytest.mark.parametrize("session", [1, 7])
def test_a_stage_that_waits_for_room_reads_what_it_can_hold(
        start: Start, real: StageEngine, session: int) -> None:
    stage = start(real, data_queue=1)
    stage.tell(Open(1, 0, 4096))
    for run in range(3):  # the second result has no room: the stage waits
        stage.give(segment(run))
    stage.hear(Heartbeat, lambda beat: beat.counters["segments"] == 2)
    for number in range(QUEUED - 1):
        assert stage.first.send(segment(3 + number, session=session), PATIENCE)
    for _ in range(2):
        stage.hear(Heartbeat)
    held = 0
    while stage.first.send(segment(3 + QUEUED + held, session=session), 0.1):
        held += 1
    assert held <= 1  # the queue's own place
    assert [stage.result().run for _ in range(3)] == [0, 1, 2]


def test_a_refused_message_gives_its_place_back(start: Start) -> None:
    engine = HeldEngine()
    stage: Stage = start(engine, open_within_s=0.1)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0, session=1))
    assert engine.started.wait(PATIENCE)
    stage.give(segment(0, session=9))
    stage.tell(Cancel(1, 0, (0,)))
    stage.hear(Credit, lambda credit: credit.session == 9)
    assert "session 9" in stage.hear(Failed).cause
