"""Any interleaving of segments and prunes gives the same surviving cache and the same outputs.

D0's story is drawn once: text, tree segments, commits, misses, prunes.  Then every stage gets
every prune at moments of its own: before the rows it concerns, between admit and compute, between
two layers, after, twice, out of order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stagekit import Book, Oracle, assert_cache, assert_rows, random_tokens
from tiny import tiny_llama

from flowspec_edge.messages import Open, Output, Prune, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard

VOCAB = 97
LAYERS = 4
STAGES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=LAYERS, hidden=32, vocab=VOCAB)


@pytest.fixture(scope="module")
def shards(model: Path) -> list[Shard]:
    return [load_shard(model, i, STAGES, "fp32") for i in range(STAGES)]


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@dataclass
class Story:
    """What D0 sent, and what must be left of it."""

    book: Book = field(default_factory=Book)
    segments: list[Segment] = field(default_factory=list)
    prunes: list[Prune] = field(default_factory=list)

    @property
    def survivors(self) -> list[int]:
        """What the last segment and the last prune leave: the committed and the live numbers."""
        return sorted({*self.book.committed, *self.book.live()})


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """A prompt in up to two chunks, then some rounds of growing, committing, missing, pruning."""
    story = Story()
    book = story.book
    tokens = iter(random_tokens(200, VOCAB, seed=draw(st.integers(0, 3))))
    for size in draw(st.sampled_from([[5], [3, 2], [1, 4]])):
        story.segments.append(book.text([next(tokens) for _ in range(size)]))
    book.ledger.skip_prune()
    for _ in range(draw(st.integers(1, 6))):
        act = draw(st.sampled_from(["grow", "grow", "commit", "miss", "prune"]))
        root = book.committed[-1]
        alive = sorted(book.live())
        children = [n for n in alive if len(book.paths[n]) == len(book.paths[root]) + 1]
        if act == "grow":
            for choice in draw(st.lists(st.integers(0, 30), max_size=5)):
                parents = [root, *sorted(book.live())]
                book.add(next(tokens), parents[choice % len(parents)])
            story.segments.append(book.ledger.seal())
        elif act == "commit" and children:
            book.commit(draw(st.sampled_from(children)))
            story.prunes.append(book.prune())
        elif act == "miss":
            book.add(next(tokens), root, committed=True)
            story.segments.append(book.ledger.seal())
            story.prunes.append(book.prune())
        elif act == "prune" and alive:  # D0 gives up a subtree without a commit
            given_up = book.paths[draw(st.sampled_from(alive))]
            book.given_up |= {n for n in alive if book.paths[n][: len(given_up)] == given_up}
            story.prunes.append(book.prune())
    story.segments.append(book.ledger.seal())  # empty; brings the last commits
    story.prunes.append(book.prune())
    return story


Schedule = list[list[int]]  # per moment, indexes of the prunes that arrive then


@st.composite
def schedules(draw: st.DrawFn, story: Story) -> Schedule:
    """Each prune at one to three of a stage's moments: before, within and after each segment."""
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
        admitted = engine.admit(segment)
        assert admitted is not None
        deliver()
        results.append(engine.compute(admitted, poll=deliver)[1])
        for _ in range(per_segment):  # what was left over because of fewer layers
            deliver()
    arrivals = iter(schedule[-1:])
    deliver()
    return results


@settings(max_examples=150, deadline=None)
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
        assert engine.cache is not None
        assert engine.cache.numbers.tolist() == story.survivors
        assert_cache(engine, story.book, oracle)
    returned: list[int] = []
    for output in messages:
        assert isinstance(output, Output)
        assert_rows(output, story.book, oracle)  # rows that died later came out right as well
        returned += output.numbers.tolist()
    assert returned == sorted(set(returned))
    assert set(story.survivors) <= set(returned)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_prunes_may_never_arrive(shards: list[Shard], oracle: Oracle, data: st.DataObject) -> None:
    """Without them the cache holds more rows, but every commit takes out what it decides."""
    story = data.draw(stories())
    engine = StageEngine(shards[0])
    engine.open(Open(session=1, epoch=0, capacity=64))
    run_stage(engine, story.segments, [], [])
    assert engine.cache is not None
    held = engine.cache.numbers
    base = story.book.ledger.base
    assert held[held < base].tolist() == story.book.committed
    assert set(story.survivors) <= set(held.tolist())
    assert_cache(engine, story.book, oracle)
