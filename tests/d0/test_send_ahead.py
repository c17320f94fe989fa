"""When the first stage falls free, told by made-up durations."""

from __future__ import annotations

import pytest

from flowspec_edge.d0.scheduler import SlotPredictor

SLOT, PASS = 1.0, 0.4


def warm(slot: float = SLOT, rows: int = 16, count: int = 5) -> SlotPredictor:
    """Segments one after the other, each heard of in time, and draft passes; V1 is idle in the end."""
    pace = SlotPredictor()
    for i in range(count):
        pace.record_segment(rows, 10.0 * i)
        pace.segment_done(10.0 * i + slot)
        pace.add_duration("Draft", PASS)
    return pace


def last_moment(pace: SlotPredictor, kind: str = "Draft", start: float = 0.0) -> float:
    """From when on a pass would outlast what V1 has, to a hundredth."""
    moments = [start + i / 100 for i in range(400)]
    outlasts = [pace.outlasts(kind, now) for now in moments]
    assert outlasts == sorted(outlasts)  # once it does, it does
    return moments[outlasts.index(True)]


def test_a_pass_outlasts_a_segment_that_ends_before_it() -> None:
    pace = warm()
    pace.record_segment(16, 100.0)
    assert last_moment(pace, start=100.0) == pytest.approx(100 + SLOT - PASS, abs=0.011)


def test_who_knows_too_little_says_no() -> None:
    pace = SlotPredictor()
    assert not pace.outlasts("Draft", 0.0)
    pace.record_segment(16, 0.0)
    assert not pace.outlasts("Draft", 1e6)  # neither is known
    pace.add_duration("Draft", PASS)
    assert not pace.outlasts("Draft", 1e6)  # how long a segment takes is not
    pace.segment_done(SLOT)
    pace.record_segment(16, 2.0)
    assert pace.outlasts("Draft", 2.0 + SLOT)
    assert not pace.outlasts("Verify", 1e6)  # how long this takes is not
    assert pace.seconds("Verify") is None


def test_an_idle_stage_and_one_with_two_segments_are_left_alone() -> None:
    pace = warm()
    assert not pace.outlasts("Draft", 1e6)
    pace.record_segment(16, 100.0)
    assert pace.outlasts("Draft", 100.9)
    pace.record_segment(16, 100.9)
    assert not pace.outlasts("Draft", 100.95)
    assert not pace.outlasts("Draft", 200.0)


def test_what_was_queued_begins_when_the_one_before_is_through() -> None:
    pace = warm()
    pace.record_segment(16, 100.0)
    pace.record_segment(16, 100.7)
    pace.segment_done(100.0 + SLOT)
    assert last_moment(pace, start=101.0) == pytest.approx(101 + SLOT - PASS, abs=0.011)
    pace.segment_done(101.0 + SLOT)
    assert pace.seconds(("rows", 5)) == pytest.approx(SLOT)  # not 1.3, what it took since it was sent


def test_news_that_come_late_do_not_make_the_next_one_begin_late() -> None:
    """D0 was in a pass when the first one was through at 101.0, and hears of that at 101.3."""
    pace = warm()
    pace.record_segment(16, 100.0)
    pace.record_segment(16, 100.9)
    pace.segment_done(101.3)
    assert pace.outlasts("Draft", 101.65)  # the second one has been there since 101.0
    assert last_moment(pace, start=101.3) == pytest.approx(101 + SLOT - PASS, abs=0.011)


def test_a_segment_that_is_sent_late_begins_when_it_is_sent() -> None:
    """Not when the one before should have been through."""
    pace = warm()
    pace.record_segment(16, 100.0)
    pace.record_segment(16, 101.5)  # V1 should have been through at 101.0
    pace.segment_done(102.0)
    assert last_moment(pace, start=102.0) == pytest.approx(101.5 + SLOT - PASS, abs=0.011)


def test_late_news_and_pruned_segments_now_and_then_mislead_no_estimate() -> None:
    """Of nine segments two take no time, for all of their rows were pruned, and three end unheard of."""
    pace = warm(count=9)
    for turn in range(50):
        took = {2: 0.0, 5: 0.0, 0: 1.4, 3: 2.0, 7: 1.2}.get(turn % 9, SLOT)
        pace.record_segment(16, 1000.0 + 10 * turn)
        pace.segment_done(1000.0 + 10 * turn + took)
        assert pace.seconds(("rows", 5)) == pytest.approx(SLOT)


def test_what_changes_is_learned_anew() -> None:
    pace = warm(count=20)
    for i in range(9):
        pace.record_segment(16, 1000.0 + 10 * i)
        pace.segment_done(1002.5 + 10 * i)
    assert pace.seconds(("rows", 5)) == pytest.approx(2.5)


def test_short_and_long_segments_are_told_apart() -> None:
    pace = warm(slot=1.0, rows=16)
    for i in range(5):
        pace.record_segment(2, 500.0 + 10 * i)
        pace.segment_done(500.25 + 10 * i)
    pace.record_segment(2, 600.0)
    assert pace.outlasts("Draft", 600.0)
    pace.segment_done(600.25)
    pace.record_segment(20, 700.0)  # as good as 16
    assert last_moment(pace, start=700.0) == pytest.approx(700 + SLOT - PASS, abs=0.011)
    pace.segment_done(701.0)
    pace.record_segment(64, 800.0)  # unknown
    assert not pace.outlasts("Draft", 1e6)
