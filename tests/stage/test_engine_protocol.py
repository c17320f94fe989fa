"""What a stage refuses, drops and counts: stale messages, malformed segments, a full cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.stages import Book, Oracle, admit, assert_cache, assert_rows, engines, random_tokens, through

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Cancel, Close, Open, Output, Payload, Prune, Segment
from flowspec_edge.stage.engine import StageEngine

TEXT = random_tokens(8, 97, seed=2)
I32 = np.int32


@pytest.fixture
def engine(model: Path) -> StageEngine:
    return engines(model, 1, capacity=16)[0]


def held(engine: StageEngine) -> list[int]:
    assert engine.cache_of(1) is not None
    return engine.cache_of(1).numbers.tolist()


def test_stale_messages_are_dropped_and_counted(engine: StageEngine) -> None:
    book = Book()
    segment = book.text(TEXT)
    prune = Prune(1, 0, 0, 0, 8, np.array([0], I32))
    assert engine.admit(replace(segment, session=2)) is None
    assert engine.admit(replace(segment, epoch=1)) is None
    through([engine], segment)
    assert engine.admit(segment) is None  # the same run again
    engine.prune(replace(prune, epoch=-1))
    engine.prune(replace(prune, session=7))
    engine.cancel(Cancel(3, 0, (0,)))
    engine.close(Close(9))
    engine.open(Open(1, 0, 16))  # the same epoch again must not empty the cache
    assert engine.counters["dropped_stale"] == 8
    assert engine.counters["dropped_session"] == 6
    assert held(engine) == list(range(8))


def test_a_closed_stage_drops_everything(engine: StageEngine) -> None:
    engine.close(Close(1))
    assert engine.cache_of(1) is None
    assert engine.retained == {}
    assert engine.admit(Book().text(TEXT)) is None
    engine.prune(Prune(1, 0, 0, 0, 8, np.array([0], I32)))
    assert engine.counters["dropped_stale"] == 2


def test_reopening_starts_afresh_in_the_same_memory(engine: StageEngine, oracle: Oracle) -> None:
    through([engine], Book().text(TEXT))
    memory = engine.cache_rows
    engine.open(Open(1, 1, 16))
    assert engine.cache_rows == memory
    assert held(engine) == []
    assert engine.counters["segments"] == 0
    book = Book(epoch=1)
    assert_rows(through([engine], book.text(TEXT))[1], book, oracle)
    engine.open(Open(2, 0, 32))
    assert engine.cache_bytes == 32 * 4 * 2 * 2 * 8 * 4  # rows, layers, k and v, kv heads, head_dim, fp32


def test_a_prune_between_layers_thins_what_is_passed_on(model: Path, oracle: Oracle) -> None:
    chain = engines(model, 2)
    book = Book()
    through(chain, book.text(TEXT))
    book.builder.skip_prune()
    root = book.committed[-1]
    good, bad = book.add(5, root), book.add(6, root)
    below = book.add(7, bad)
    segment = replace(book.builder.seal(), taps=(0,))
    book.given_up |= {bad, below}
    prune = book.prune()
    admitted = admit(chain[0], segment)
    taps, passed_on, *_ = chain[0].compute([admitted], poll=lambda: chain[0].prune(prune))[0]
    assert isinstance(passed_on, Segment)
    assert passed_on.numbers.tolist() == taps[0].numbers.tolist() == [good]
    assert passed_on.hidden is not None
    assert passed_on.hidden.array.shape == taps[0].hidden.array.shape == (1, 32)
    assert passed_on.bits.shape == (1, 1)
    assert chain[0].counters["rows"] == len(TEXT) + 3
    assert chain[0].counters["pruned_rows"] == chain[0].counters["pruned_cached"] == 2
    _, output = through(chain[1:], passed_on)
    assert_rows(output, book, oracle)
    for engine in chain:
        assert held(engine) == [*range(8), good]
        assert_cache(engine, book, oracle)


def test_a_prune_between_admit_and_compute(engine: StageEngine, oracle: Oracle) -> None:
    book = Book()
    through([engine], book.text(TEXT))
    book.builder.skip_prune()
    good, bad = (book.add(token, book.committed[-1]) for token in (5, 6))
    admitted = admit(engine, book.builder.seal())
    book.given_up.add(bad)
    engine.prune(book.prune())
    _, output, *_ = engine.compute([admitted])[0]
    assert isinstance(output, Output)
    assert output.numbers.tolist() == [good]
    assert_rows(output, book, oracle)
    assert held(engine) == [*range(8), good]
    assert engine.counters["rows"] == len(TEXT) + 1  # the dead row cost nothing


def test_rows_below_the_base_are_decided(engine: StageEngine, oracle: Oracle) -> None:
    """A segment may commit one of its own rows, so that another is dead."""
    book = Book()
    through([engine], book.text(TEXT))
    root = book.committed[-1]
    dead, chosen = book.add(5, root), book.add(6, root)
    below = book.add(7, chosen)
    segment = book.builder.seal()
    base = chosen + 1
    _, output = through([engine], replace(
        segment, base=base, committed=np.array([*range(8), chosen], I32),
        bits=np.array([[0], [0], [1 << (below - base)]], np.uint8)))
    assert dead not in output.numbers
    assert output.numbers.tolist() == [chosen, below]
    assert_rows(output, book, oracle)
    assert held(engine) == [*range(8), chosen, below]


def test_a_failing_poll_leaves_the_stage_usable(engine: StageEngine, oracle: Oracle) -> None:
    book = Book()
    segment = book.text(TEXT)
    admitted = admit(engine, segment)

    def poll() -> None:
        raise ProtocolError("bad frame")

    with pytest.raises(ProtocolError, match="bad frame"):
        engine.compute([admitted], poll)
    assert_rows(engine.compute([admitted])[0][1], book, oracle)  # type: ignore[arg-type]
    engine.prune(Prune(1, 0, 0, 0, 8, np.arange(5, dtype=I32)))
    assert held(engine) == [0, 1, 2, 3, 4]


def test_a_full_cache_is_one_clear_line(engine: StageEngine) -> None:
    through([engine], Book().text(TEXT * 2))
    segment = Segment(1, 0, 1, 16, 17, np.array([16], I32), np.array([16], I32), 16,
                      np.array([[1]], np.uint8), np.arange(16, dtype=I32), np.array([3], I32))
    admitted = admit(engine, segment)
    with pytest.raises(FlowspecError, match="KV cache is full: 16 rows held, 1 more to come, capacity 16"):
        engine.compute([admitted])


@pytest.mark.parametrize(("change", "complaint"), [
    ({"positions": np.zeros(3, I32)}, "2 numbers but positions of shape"),
    ({"positions": np.array([8, -1], I32)}, "a position is negative"),
    ({"bits": np.ones((3, 1), np.uint8)}, "2 rows but bits of shape"),
    ({"bits": np.ones((2, 1), np.int64)}, "2 rows but bits of shape"),
    ({"bits": np.array([[1], [1]], np.uint8)}, "a row does not see itself"),
    ({"bits": np.zeros((2, 0), np.uint8)}, "a row does not see itself"),
    ({"bits": np.array([[3], [3]], np.uint8)}, "a row sees a later one"),
    ({"numbers": np.array([9, 8], I32)}, "numbers do not increase"),
    ({"numbers": np.array([8, 10], I32)}, r"numbers 8 to 10 leave \[8, 10\)"),
    ({"first": 9}, r"numbers 8 to 9 leave \[9, 10\)"),
    ({"numbers": np.array([7, 8], I32), "first": 7}, "number 7 is not above 7, held already"),
    ({"committed": np.array([3, 2], I32)}, "committed numbers do not increase"),
    ({"committed": np.arange(9, dtype=I32)}, "committed number 8 is not below base 8"),
    ({"base": 20, "committed": np.array([12], I32)}, "committed number 12 is not here"),
    ({"base": 3, "committed": np.array([], I32)}, "base 3 is behind 8"),
    ({"run": 3}, "came after segment 1: one is lost"),
    ({"tokens": None}, "the first stage needs one token a row"),
    ({"tokens": np.array([97, 1], I32)}, "a token id is outside the vocabulary of 97"),
    ({"tokens": np.array([-1, 1], I32)}, "a token id is outside the vocabulary of 97"),
])
def test_malformed_segments(engine: StageEngine, change: dict[str, Any], complaint: str) -> None:
    book = Book()
    through([engine], book.text(TEXT))
    through([engine], book.builder.seal())  # brings the commits: base 8
    good = Segment(1, 0, 2, 8, 10, np.array([8, 9], I32), np.array([8, 9], I32), 8,
                   np.array([[1], [3]], np.uint8), np.array([], I32), np.array([5, 6], I32))
    with pytest.raises(ProtocolError, match=complaint) as caught:
        through([engine], replace(good, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("hidden", "complaint"), [
    (None, "this stage needs hidden states"),
    (Payload("float32", np.zeros((2, 32), np.float32)), r"expected float32 \(8, 32\)"),
    (Payload("float32", np.zeros((8, 16), np.float32)), r"expected float32 \(8, 32\)"),
    (Payload("float16", np.zeros((8, 32), np.float16)), r"are float16 .* expected float32"),
])
def test_malformed_hidden_states(model: Path, hidden: Payload | None, complaint: str) -> None:
    second = engines(model, 2)[1]
    with pytest.raises(ProtocolError, match=complaint):
        second.admit(replace(Book().text(TEXT), tokens=None, hidden=hidden))


def test_bad_opens(engine: StageEngine) -> None:
    with pytest.raises(ProtocolError, match="D0 speaks protocol version 99"):
        engine.open(Open(2, 0, 16, version=99))
    with pytest.raises(ProtocolError, match="capacity of 0 rows"):
        engine.open(Open(2, 0, 0))
