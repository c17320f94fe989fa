"""Several sessions on one stage: under any interleaving each gets the results it would get alone.

What every session is sent is drawn as in ``test_interleavings``.  Then segments of all of them are
mixed and share passes, and their hints, Opens and Closes come at any moment: also between the layers of
a pass that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.session_messages import VOCAB, stories
from kits.stage_schedules import SLOTS, STAGES, Control, Step, passed_on, passes, places, play
from kits.stages import engines, windowed

from flowspec_edge.messages import Cancel, Close, Open, Output, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard


@pytest.fixture(scope="module", params=["full", "windows"])
def shards(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
           ) -> Iterator[list[Shard]]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "windows":
            model = windowed(tmp_path_factory.mktemp("windows"), VOCAB, patch)
        yield [load_shard(model, i, STAGES, "fp32") for i in range(STAGES)]


def alone(steps: list[Step], after: list[Control], session: int) -> tuple[list[Step], list[Control]]:
    """The events of one session, in the same order."""
    own_steps: list[Step] = []
    waiting: list[Control] = []
    for step in steps:
        slots = [[m for m in slot if m.session == session] for slot in step.slots]
        segments = [segment for segment in step.segments if segment.session == session]
        if segments:
            own_steps.append(Step(segments, [waiting + slots[0], *slots[1:]]))
            waiting = []
        else:
            waiting += [message for slot in slots for message in slot]
    return own_steps, waiting + [message for message in after if message.session == session]


@st.composite
def mixtures(draw: st.DrawFn, sessions: int) -> list[Step]:
    """Two or three interleaved sessions; some are closed before the end."""
    told = [draw(stories(session)) for session in range(1, sessions + 1)]
    left = [list(story.segments) for story in told]
    segments: list[Segment] = []
    begun = 0
    while any(left):
        s = draw(st.sampled_from([s for s in range(min(begun + 1, sessions)) if left[s]]))
        begun = max(begun, s + 1)
        segments.append(left[s].pop(0))
    steps = draw(passes(segments))
    first = [places(steps, session)[0] for session in range(1, sessions + 1)]
    # Slot by slot, for all steps: moment m is slot m % SLOTS of step m // SLOTS.
    moments = [slot for step in steps for slot in step.slots]
    opened = 0
    for s, start in enumerate(first):
        opened = max(opened, draw(st.integers(max(opened, (start - 1) * SLOTS), start * SLOTS)))
        moments[opened].append(Open(s + 1, 0, 64, concurrent=tuple(range(1, s + 1))))
    for s, (story, start) in enumerate(zip(told, first, strict=True)):
        later = st.integers(start * SLOTS, len(moments) - 1)
        for prune in story.prunes:
            moments[draw(later)].append(prune)
        if draw(st.booleans()):
            moments[draw(later)].append(Cancel(s + 1, 0, (len(story.segments) - 1,)))
        if draw(st.booleans()):
            moments[draw(later)].append(Close(s + 1))
    return steps


def assert_same(one: Segment | Output | None, other: Segment | Output | None) -> None:
    """Up to rounding: matrix products of more rows may add in another order."""
    assert type(one) is type(other)
    if one is None or other is None:
        return
    assert one.run == other.run
    assert one.numbers.tolist() == other.numbers.tolist()
    assert one.hidden is not None
    assert other.hidden is not None
    np.testing.assert_allclose(one.hidden.array, other.hidden.array, atol=1e-5, rtol=1e-4)


@examples(40, quick=15)
@given(data=st.data(), sessions=st.integers(2, 3))
def test_every_session_gets_what_it_gets_alone(shards: list[Shard], data: st.DataObject,
                                               sessions: int) -> None:
    steps, after = data.draw(mixtures(sessions)), list[Control]()
    for shard in shards:
        together = StageEngine(shard)
        played = play(together, steps, after)
        for session in range(1, sessions + 1):
            single = StageEngine(shard)
            expected = [result for [result] in play(single, *alone(steps, after, session))]
            got = [result for step, results in zip(steps, played, strict=True)
                   for segment, result in zip(step.segments, results, strict=True)
                   if segment.session == session]
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert_same(one, other)
            mine, its = together.cache_of(session), single.cache_of(session)
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                assert mine.numbers.tolist() == its.numbers.tolist()
                torch.testing.assert_close(mine.rows(), its.rows(), atol=1e-5, rtol=1e-4)
                assert together.counters_of(session) == single.counters_of(session)
        steps, after = passed_on(steps, played)


def test_a_session_that_an_open_does_not_name_is_dropped(model: Path) -> None:
    """After a restart of D0 nothing of its former sessions is left."""
    [engine] = engines(model, 1, capacity=16)
    for session in (2, 3, 4):
        engine.open(Open(session, 0, 16, concurrent=(session - 1, session - 2)))
    assert engine.sessions == (2, 3, 4)
    engine.open(Open(5, 0, 16, concurrent=(3, 4)))
    assert engine.sessions == (3, 4, 5)
    assert engine.cache_rows == 3 * 16  # in the memory of the second
    engine.open(Open(4, 1, 16, concurrent=(3, 5)))  # again, with a higher epoch
    assert sorted(engine.sessions) == [3, 4, 5]
    engine.open(Open(6, 0, 16))
    assert engine.sessions == (6,)


def test_a_closed_sessions_memory_is_used_again(model: Path) -> None:
    [engine] = engines(model, 1, capacity=16)
    engine.open(Open(2, 0, 16, concurrent=(1,)))
    engine.close(Close(1))
    engine.open(Open(3, 0, 16, concurrent=(2,)))
    assert engine.cache_rows == 32
    engine.close(Close(3))
    engine.open(Open(4, 0, 32, concurrent=(2,)))
    assert engine.cache_rows == 48
    engine.close(Close(4))
    engine.open(Open(5, 0, 16, concurrent=(2,)))
    assert engine.cache_rows == 48
