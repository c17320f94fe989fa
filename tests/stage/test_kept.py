"""Rows that a closed session leaves: a session that begins with them computes the same as after a prefill,
whatever else the stage does meanwhile.  The oracle is transformers, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kits.graph_recorder import recorded
from kits.hypothesis_examples import examples
from kits.session_messages import VOCAB, Story, stories
from kits.stage_schedules import LAYERS, SLOTS, STAGES, Control, Step, during, passed_on, passes, places, play
from kits.stages import (
    Book,
    Oracle,
    assert_cache,
    assert_rows,
    engines,
    random_tokens,
    recurring,
    through,
    windowed,
)

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Close, Open, Output, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layer_graphs import LayerGraphs
from flowspec_edge.stage.layers.stage_cache import CacheKind, reusable
from flowspec_edge.stage.shard import Shard, load_shard

ROW = LAYERS * 2 * 2 * 8 * 4  # bytes: layers, key and value, kv heads, head_dim, fp32
TEXT = random_tokens(9, VOCAB, seed=5)


@pytest.fixture(scope="module", params=["one by one", "recorded", "windows", "recurrent"])
def shards(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
           ) -> Iterator[tuple[Path, list[tuple[Shard, dict[int, LayerGraphs]]]]]:
    """The model's directory, and its stages."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "windows":
            model = windowed(tmp_path_factory.mktemp("windows"), VOCAB, patch)
        if request.param == "recurrent":
            model = recurring(tmp_path_factory.mktemp("recurrent"), VOCAB, patch)
        records = request.param in ("recorded", "windows")
        loaded = [load_shard(model, i, STAGES, "fp32", row_step=16 if records else 1) for i in range(STAGES)]
        yield model, [(shard, recorded(shard, 16, 32) if records else {}) for shard in loaded]


@cache
def oracle_of(model: Path) -> Oracle:
    return Oracle(model)


@st.composite
def plays(draw: st.DrawFn, kinds: list[CacheKind]) -> tuple[list[Step], dict[int, Story]]:
    """A session that is closed and leaves rows, one that begins with some of them, one beside both.  The
    first and the second have a snapshot somewhere, or none.

    The Close comes at any moment after the outputs of the rows to be kept, also between the layers of
    a segment of that very session, which may share its pass with one of the session beside it.
    """
    first, beside = draw(stories(1)), draw(stories(2))
    last = draw(st.integers(1, len(first.segments)))  # the first segment whose output D0 has not seen
    seen = {number for segment in first.segments[:last] for number in segment.numbers.tolist()}
    text = first.book.committed
    kept = text[: next((i for i, number in enumerate(text) if number not in seen), len(text))]
    snapshot = draw(st.integers(0, len(text)))
    cuts = [reusable(kinds, len(text), wanted, snapshot) for wanted in range(len(kept) + 1)]
    assume(any(cuts))
    rows = draw(st.sampled_from(sorted({*cuts} - {0})))
    kept = kept[: draw(st.sampled_from([n for n in range(rows, len(kept) + 1) if cuts[n]]))]
    second = draw(stories(3, first.book.paths[kept[rows - 1]]))
    other = list(beside.segments)
    front = _mixed(draw, first.segments, [other.pop(0) for _ in range(draw(st.integers(0, len(other))))])
    before = draw(passes(front))
    steps = [*before, *draw(passes(_mixed(draw, second.segments, other)))]
    own = places(before, 1)
    start = places(steps, 3)[0]
    moments = [slot for step in steps for slot in step.slots]
    earliest = (own[last] if last < len(own) else own[-1] + 1) * SLOTS
    closing = st.integers(earliest, max(earliest, len(before) * SLOTS))
    if inside := [moment for moment in during(before, 1) if moment >= earliest]:
        closing = st.sampled_from(inside) | closing
    closed = draw(closing)
    opened = draw(st.integers(closed, max(closed, start * SLOTS)))
    moments[0] += [Open(1, 0, 64, snapshot=snapshot), Open(2, 0, 64, concurrent=(1,))]
    moments[closed].append(Close(1, tuple(kept)))
    moments[opened].append(Open(3, 0, 80, concurrent=(2,), parent_session=1, rows=rows,
                                snapshot=draw(st.sampled_from([0, rows, rows + 3]))))
    for story, since in ((first, 0), (beside, 0), (second, opened)):
        for prune in story.prunes:
            moments[draw(st.integers(since, len(moments) - 1))].append(prune)
    return steps, {2: beside, 3: second}


def _mixed(draw: st.DrawFn, one: list[Segment], other: list[Segment]) -> list[Segment]:
    left = [list(one), list(other)]
    return [left[i].pop(0) for i in draw(st.permutations([0] * len(one) + [1] * len(other)))]


@examples(40, quick=15)
@given(data=st.data())
def test_kept_rows_are_as_good_as_read_in(shards: tuple[Path, list[tuple[Shard, dict[int, LayerGraphs]]]],
                                          data: st.DataObject) -> None:
    model, stages = shards
    kinds = [kind for shard, _ in stages for kind in shard.kinds]
    (steps, told), after, oracle = data.draw(plays(kinds)), list[Control](), oracle_of(model)
    for shard, graphs in stages:
        engine = StageEngine(shard)
        engine.graphs |= graphs
        played = play(engine, steps, after)
        for session, story in told.items():
            held = engine.cache_of(session)
            assert held is not None
            assert held.numbers.tolist() == story.survivors
        assert_cache(engine, told[3].book, oracle)
        assert engine.retained == {}
        for result in chain.from_iterable(played):
            if isinstance(result, Output) and result.session in told:
                assert_rows(result, told[result.session].book, oracle)
        steps, after = passed_on(steps, played)


def left(engine: StageEngine, session: int, capacity: int, keep: int) -> None:
    """Open a session, prefill the text, and leave ``keep`` rows; rows of other sessions stay."""
    engine.open(Open(session, 0, capacity, concurrent=engine.sessions, retained=tuple(engine.retained)))
    through([engine], Book(session).text(TEXT))
    engine.close(Close(session, tuple(range(keep))))


def test_only_kept_rows_keep_memory(model: Path) -> None:
    [engine] = engines(model, 1, capacity=16)
    for session, keep, held in ((2, 9, 16 + 32), (3, 1, 16 + 9 + 32), (4, 5, 16 + 9 + 1 + 32)):
        left(engine, session, 32, keep)
        assert engine.cache_rows == held
    assert engine.retained == {2: 9, 3: 1, 4: 5}
    engine.open(Open(5, 0, 40, concurrent=(1,), retained=(2, 4), parent_session=4, rows=3))
    assert engine.retained == {2: 9}
    assert engine.cached(5) == 3
    assert engine.cache_rows == 16 + 9 + 40
    assert engine.cache_bytes == (16 + 9 + 40) * ROW
    engine.open(Open(6, 0, 17, concurrent=(1, 5)))  # a new D0, or one that has forgotten
    assert engine.retained == {}
    engine.close(Close(5))
    assert engine.retained == {}
    assert engine.cache_rows == 16 + 17 + 40


def test_rows_that_are_not_there(model: Path) -> None:
    [engine] = engines(model, 1)
    left(engine, 2, 16, 6)
    for after, rows in ((2, 7), (2, 0), (7, 3)):
        held = {2: 6}.get(after, 0)
        with pytest.raises(ProtocolError, match=f"with {rows} rows of session {after}, of which {held} are"):
            engine.open(Open(3, 0, 16, retained=(2,), parent_session=after, rows=rows))
        assert engine.retained == {2: 6}
    engine.open(Open(3, 0, 16, retained=(2,)))
    through([engine], Book(3).text(TEXT))
    with pytest.raises(ProtocolError, match="is to keep 2 rows, but not all of them are among the 9"):
        engine.close(Close(3, (8, 9)))


def test_a_session_has_room_for_the_rows_it_begins_with(model: Path) -> None:
    [engine] = engines(model, 1)
    left(engine, 2, 16, 6)
    rows = engine.cache_rows
    with pytest.raises(ProtocolError, match="a capacity of 5 rows"):
        engine.open(Open(3, 0, 5, parent_session=2, rows=6))
    engine.open(Open(4, 0, rows))  # all of them are free again
    assert engine.cache_rows == rows
