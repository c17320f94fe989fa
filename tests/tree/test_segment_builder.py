"""The builder's books against what a row must see: its ancestors and the committed text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.messages import unpack_bits
from flowspec_edge.tree.segment_builder import SegmentBuilder


def test_a_prompt_is_a_chain_of_committed_rows() -> None:
    builder = SegmentBuilder()
    parent = -1
    for position in range(3):
        parent = builder.add(50 + position, position, parent, committed=True)
    segment = builder.seal()
    assert segment.numbers.tolist() == [0, 1, 2]
    assert unpack_bits(segment.bits, 3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert segment.committed.tolist() == []
    assert segment.text
    following = builder.seal()
    assert not following.text
    assert following.committed.tolist() == [0, 1, 2]
    assert following.base == 3
    assert len(following.numbers) == 0
    assert following.stop == 3


@given(st.data())
def test_bits_name_exactly_the_uncommitted_ancestors(data: st.DataObject) -> None:
    builder = SegmentBuilder(session=3, epoch=1)
    builder.add(0, 0, committed=True)
    builder.seal()
    path: dict[int, list[int]] = {0: [0]}  # number -> itself and its ancestors
    committed = [0]
    announced: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            # Commit a child chain of the newest committed number, if there is one.
            candidates = [n for n in path if n > committed[-1] and path[n][-2] == committed[-1]]
            if candidates:
                chosen = data.draw(st.sampled_from(candidates))
                builder.commit(chosen)
                committed.append(chosen)
                path = {n: p for n, p in path.items() if chosen in p}
            continue
        rows = []
        for _ in range(data.draw(st.integers(0, 4))):
            parent = data.draw(st.sampled_from([committed[-1], *[n for n in path if n > committed[-1]]]))
            number = builder.add(1, len(path[parent]), parent)
            path[number] = [*path[parent], number]
            rows.append(number)
        segment = builder.seal()
        announced |= set(segment.committed.tolist())
        assert announced == set(committed)
        assert segment.base == committed[-1] + 1
        bits = unpack_bits(segment.bits, builder.next_number - segment.base)
        for row, number in enumerate(rows):
            seen = {segment.base + j for j in np.flatnonzero(bits[row]).tolist()}
            assert seen | set(committed) >= set(path[number])
            assert seen == {n for n in path[number] if n >= segment.base}


def test_prunes_cover_everything_decided_since_the_last_one() -> None:
    builder = SegmentBuilder()
    builder.add(1, 0, committed=True)
    builder.seal()
    builder.skip_prune()
    root = builder.add(2, 1, committed=True)
    a, b = builder.add(3, 2, root), builder.add(4, 2, root)
    c = builder.add(5, 3, a)
    builder.seal()
    builder.commit(a)
    first = builder.prune([a, c])
    assert (first.start, first.stop) == (1, 5)
    assert first.keep.tolist() == [root, a, c]
    assert b not in first.keep
    second = builder.prune([c])
    assert (second.start, second.stop, second.keep.tolist()) == (a + 1, 5, [c])
    assert second.sequence == first.sequence + 1


def test_commits_must_rise_and_be_sent() -> None:
    builder = SegmentBuilder()
    with pytest.raises(ValueError, match="cannot commit"):
        builder.commit(0)
    builder.add(1, 0, committed=True)
    builder.seal()
    with pytest.raises(ValueError, match="cannot commit"):
        builder.commit(0)


def test_a_run_returns_once() -> None:
    builder = SegmentBuilder()
    builder.add(1, 0)
    run = builder.seal().run
    assert builder.in_flight == 1
    numbers, positions = builder.pop_returned(run)
    assert (numbers.tolist(), positions.tolist(), builder.in_flight) == ([0], [0], 0)
    with pytest.raises(KeyError):
        builder.pop_returned(run)


def test_a_sessions_taps_are_asked_of_every_segment() -> None:
    builder = SegmentBuilder(taps=(5, 2))
    assert builder.seal().taps == (2, 5)  # empty segments, too: they are sealed alike
    builder.add(1, 0)
    assert builder.seal((4, 2)).taps == (2, 4, 5)
    assert SegmentBuilder().seal((3,)).taps == (3,)


def test_a_session_may_begin_with_rows() -> None:
    """They have numbers 0 to 4, are committed, and no prune is about them."""
    builder = SegmentBuilder(reused_rows=5)
    assert [builder.add(7, 5, committed=True), builder.add(8, 6, 5)] == [5, 6]
    segment = builder.seal()
    assert (segment.first, segment.base, segment.committed.tolist()) == (5, 5, [])
    assert unpack_bits(segment.bits, 2).tolist() == [[True, False], [True, True]]
    prune = builder.prune([6])
    assert (prune.start, prune.stop, prune.keep.tolist()) == (5, 7, [5, 6])
