"""Any interleaving of segments and prunes gives the same surviving cache and the same outputs.

D0's story is drawn once: text, tree segments, commits, misses, prunes.  Then every stage gets
every prune at moments of its own: before the rows it concerns, between admit and compute, between
two layers, after, twice, out of order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.session_messages import VOCAB, Story, stories
from kits.stages import Oracle, admit, assert_cache, assert_rows, recurring, windowed
from kits.tiny_models import tiny_llama

from flowspec_edge.messages import Open, Output, Prune, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard

LAYERS = 4
STAGES = 2


@pytest.fixture(scope="module", params=["full", "windows", "recurrent"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("model")
        yield (windowed(path, VOCAB, patch) if request.param == "windows" else
               recurring(path, VOCAB, patch) if request.param == "recurrent" else
               tiny_llama(path, layers=LAYERS, hidden=32, vocab=VOCAB))


@pytest.fixture(scope="module")
def shards(model: Path) -> list[Shard]:
    return [load_shard(model, i, STAGES, "fp32") for i in range(STAGES)]


Schedule = list[list[int]]  # per moment, indexes of the prunes that arrive then


@st.composite
def schedules(draw: st.DrawFn, story: Story) -> Schedule:
    """Each prune at one to three moments of a stage: before, during and after each segment."""
    moments = len(story.segments) * (3 + LAYERS) + 1
    schedule: Schedule = [[] for _ in range(moments)]
    for i in range(len(story.prunes)):
        for moment in draw(st.lists(st.integers(0, moments - 1), min_size=1, max_size=3)):
            schedule[moment].append(i)
    return schedule


def run_stage(engine: StageEngine, segments: list[Segment], prunes: list[Prune], schedule: Schedule
              ) -> list[Segment | Output]:
    """Feed one stage: its segments in order, the prunes as scheduled."""
    arrivals: Iterator[list[int]]

    def deliver() -> None:
        for i in next(arrivals, []):
            engine.prune(prunes[i])

    results = []
    per_segment = 3 + LAYERS
    for k, segment in enumerate(segments):
        arrivals = iter(schedule[k * per_segment : (k + 1) * per_segment])
        deliver()
        admitted = admit(engine, segment)
        deliver()
        results.append(engine.compute([admitted], poll=deliver)[0][1])
        for _ in range(per_segment):  # what was left over because of fewer layers
            deliver()
    arrivals = iter(schedule[-1:])
    deliver()
    return results


@examples(150, quick=24)
@given(data=st.data())
def test_any_interleaving_gives_the_same_cache(shards: list[Shard], oracle: Oracle, data: st.DataObject
                                               ) -> None:
    story = data.draw(stories())
    messages: list[Segment | Output] = list(story.segments)
    for shard in shards:
        engine = StageEngine(shard)
        engine.open(Open(session=1, epoch=0, capacity=64))
        segments = [m for m in messages if isinstance(m, Segment)]
        messages = run_stage(engine, segments, story.prunes, data.draw(schedules(story)))
        assert engine.cache_of(1) is not None
        assert engine.cache_of(1).numbers.tolist() == story.survivors
        assert_cache(engine, story.book, oracle)
    returned: list[int] = []
    for output in messages:
        assert isinstance(output, Output)
        assert_rows(output, story.book, oracle)  # rows that died later came out right as well
        returned += output.numbers.tolist()
    assert returned == sorted(set(returned))
    assert set(story.survivors) <= set(returned)


@examples(30, quick=12)
@given(data=st.data())
def test_prunes_may_never_arrive(shards: list[Shard], oracle: Oracle, data: st.DataObject) -> None:
    """Without prunes the cache holds more rows, but every commit removes the rows it decides."""
    story = data.draw(stories())
    engine = StageEngine(shards[0])
    engine.open(Open(session=1, epoch=0, capacity=64))
    run_stage(engine, story.segments, [], [])
    assert engine.cache_of(1) is not None
    held = engine.cache_of(1).numbers
    base = story.book.builder.base
    assert held[held < base].tolist() == story.book.committed
    assert set(story.survivors) <= set(held.tolist())
    assert_cache(engine, story.book, oracle)


@examples(60, quick=10)
@given(data=st.data())
def test_a_lost_stage_is_told_the_text_again(shards: list[Shard], oracle: Oracle, data: st.DataObject
                                             ) -> None:
    """After any segment one stage is replaced: another session begins with the text, everywhere."""
    first = data.draw(stories())
    whole = first.book.paths[first.book.committed[-1]]
    second = data.draw(stories(2, text=whole[: data.draw(st.integers(1, len(whole)))]))
    before: list[Segment | Output] = list(first.segments[: data.draw(st.integers(1, len(first.segments)))])
    after: list[Segment | Output] = list(second.segments)
    lost = data.draw(st.integers(0, STAGES - 1))
    for i, shard in enumerate(shards):
        engine = StageEngine(shard)
        engine.open(Open(session=1, epoch=0, capacity=64))
        told = [m for m in before if isinstance(m, Segment)]
        before = run_stage(engine, told, first.prunes, data.draw(schedules(first)))
        if i == lost:
            engine = StageEngine(shard)
        engine.open(Open(session=2, epoch=0, capacity=96))
        told = [m for m in after if isinstance(m, Segment)]
        after = run_stage(engine, told, second.prunes, data.draw(schedules(second)))
        held = engine.cache_of(2)
        assert held is not None
        assert held.numbers.tolist() == second.survivors
        assert_cache(engine, second.book, oracle)
    for output in after:
        assert isinstance(output, Output)
        assert_rows(output, second.book, oracle)
