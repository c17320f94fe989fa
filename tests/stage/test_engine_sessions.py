"""Several sessions on one stage: under any interleaving each gets the results it would get alone.

What every session is sent is drawn as in ``test_interleavings``.  Then segments of all of them are
mixed, and their hints, Opens and Closes come at moments of anybody's: also between the layers of
another session's segment.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from playkit import LAYERS, SLOTS, STAGES, Control, Step, passed_on, play
from propertykit import examples
from stagekit import Book, Oracle, assert_cache, assert_rows, engines, random_tokens, through
from storykit import VOCAB, stories
from tiny import tiny_llama

from flowspec_edge.messages import Cancel, Close, Open, Output, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=LAYERS, hidden=32, vocab=VOCAB)


@pytest.fixture(scope="module")
def shards(model: Path) -> list[Shard]:
    return [load_shard(model, i, STAGES, "fp32") for i in range(STAGES)]


def alone(steps: list[Step], after: list[Control], session: int) -> tuple[list[Step], list[Control]]:
    """The events of one session, in the same order."""
    found: list[Step] = []
    waiting: list[Control] = []
    for step in steps:
        own = [[m for m in slot if m.session == session] for slot in step.slots]
        if step.segment.session != session:
            waiting += [message for slot in own for message in slot]
            continue
        found.append(Step(step.segment, [waiting + own[0], *own[1:]]))
        waiting = []
    return found, waiting + [message for message in after if message.session == session]


@st.composite
def mixtures(draw: st.DrawFn, sessions: int) -> list[Step]:
    """Two or three interleaved sessions; some are closed before the end."""
    told = [draw(stories(session)) for session in range(1, sessions + 1)]
    left = [list(story.segments) for story in told]
    steps: list[Step] = []
    first: list[int] = []  # step of each session's first segment
    while any(left):
        known = [s for s in range(min(len(first) + 1, sessions)) if left[s]]
        s = draw(st.sampled_from(known))
        if s == len(first):
            first.append(len(steps))
        steps.append(Step(left[s].pop(0)))
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


def same(one: Segment | Output | None, other: Segment | Output | None) -> bool:
    if one is None or other is None:
        return one is other
    assert one.hidden is not None
    assert other.hidden is not None
    return (type(one) is type(other) and one.run == other.run and np.array_equal(one.numbers, other.numbers)
            and np.array_equal(one.hidden.array, other.hidden.array))


@examples(40, quick=15)
@given(data=st.data(), sessions=st.integers(2, 3))
def test_every_session_gets_what_it_gets_alone(shards: list[Shard], data: st.DataObject,
                                               sessions: int) -> None:
    steps, after = data.draw(mixtures(sessions)), list[Control]()
    for shard in shards:
        together = StageEngine(shard)
        results = play(together, steps, after)
        for session in range(1, sessions + 1):
            single = StageEngine(shard)
            expected = play(single, *alone(steps, after, session))
            got = [r for r, step in zip(results, steps, strict=True) if step.segment.session == session]
            assert len(got) == len(expected)
            assert all(map(same, got, expected))
            mine, its = together.cache_of(session), single.cache_of(session)
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                assert mine.numbers.tolist() == its.numbers.tolist()
                assert all(map(torch.equal, mine.rows(), its.rows()))
                assert together.counters_of(session) == single.counters_of(session)
        steps, after = passed_on(steps, results)


def test_each_has_its_own_text_cache_and_counters(model: Path) -> None:
    oracle = Oracle(model)
    [engine] = engines(model, 1, capacity=32)
    books = {1: Book(1), 2: Book(2)}
    engine.open(Open(2, 0, 48, concurrent=(1,)))
    texts = {session: random_tokens(9, VOCAB, seed=session) for session in books}
    for part in (slice(0, 4), slice(4, 9)):
        for session, book in books.items():
            assert_rows(through([engine], book.text(texts[session][part]))[1], book, oracle)
    assert engine.sessions == (1, 2)
    assert [engine.cached(session) for session in books] == [9, 9]
    assert engine.counters_of(1)["rows"] == engine.counters_of(2)["rows"] == 9
    assert engine.counters["rows"] == 18
    assert engine.cache_bytes == (32 + 48) * LAYERS * 2 * 2 * 8 * 4
    engine.close(Close(1))
    assert engine.counters["rows"] == 18
    assert engine.cached(1) == 0
    assert_cache(engine, books[2], oracle)


def test_a_session_that_an_open_does_not_name_is_dropped(model: Path) -> None:
    """After a restart of D0 nothing of its former sessions is left."""
    [engine] = engines(model, 1, capacity=16)
    for session in (2, 3, 4):
        engine.open(Open(session, 0, 16, concurrent=(session - 1, session - 2)))
    assert engine.sessions == (2, 3, 4)
    second = engine.cache_of(2)
    engine.open(Open(5, 0, 16, concurrent=(3, 4)))
    assert engine.sessions == (3, 4, 5)
    assert engine.cache_of(5) is second  # the memory
    engine.open(Open(4, 1, 16, concurrent=(3, 5)))  # again, with a higher epoch
    assert sorted(engine.sessions) == [3, 4, 5]
    engine.open(Open(6, 0, 16))
    assert engine.sessions == (6,)


def test_a_closed_sessions_memory_is_used_again_or_freed(model: Path) -> None:
    [engine] = engines(model, 1, capacity=16)
    engine.open(Open(2, 0, 16, concurrent=(1,)))
    kept, closed = engine.cache_of(2), engine.cache_of(1)
    engine.close(Close(1))
    engine.open(Open(3, 0, 16, concurrent=(2,)))
    assert engine.cache_of(3) is closed
    assert engine.cache_of(2) is kept
    engine.close(Close(3))
    engine.open(Open(4, 0, 32, concurrent=(2,)))
    engine.open(Open(5, 0, 16, concurrent=(2, 4)))
    assert engine.cache_of(5) is not closed
