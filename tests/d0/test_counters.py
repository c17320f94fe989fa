"""Growth from heartbeat to heartbeat adds up to what a stage did, however its counting began anew."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.d0.counters import HeartbeatCounters, increase

SESSIONS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=5)


@given(SESSIONS)
def test_growth_adds_up_to_what_was_done(sessions: list[list[int]]) -> None:
    beats: list[HeartbeatCounters] = [{}]
    for number, done in enumerate(sessions):
        beats += [{"since": number, "rows": sum(done[: i + 1])} for i in range(len(done))]
    added = [increase(before, after, ("rows",))["rows"] for before, after in pairwise(beats)]
    assert added == [rows for done in sessions for rows in done]
