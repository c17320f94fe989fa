"""The visibility rule against its definition, read row by row from ``messages``."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowspec_edge.messages import Prune, Segment, pack_bits
from flowspec_edge.stage.rows import PendingPrunes, dead, member, visible


def numbers_of(values: set[int]) -> NDArray[np.int32]:
    return np.array(sorted(values), dtype=np.int32)


@given(base=st.integers(0, 12), gaps=st.sets(st.integers(0, 40)), split=st.integers(0, 40),
       parents=st.lists(st.integers(-1, 40), min_size=40, max_size=40))
def test_visible(base: int, gaps: set[int], split: int, parents: list[int]) -> None:
    """A random tree over the numbers from ``base`` on; some are cached, some arrive, some were dropped."""
    total = 40
    sees = [1 << (n - base) if n >= base else 0 for n in range(total)]
    for n in range(base, total):
        if base <= parents[n] < n:
            sees[n] |= sees[parents[n]]
    gone = {n for n in gaps if n >= base}
    split = max(split, base)
    cached = numbers_of(set(range(split)) - gone)
    own = numbers_of(set(range(split, total)) - gone)
    width = total - base
    segment = Segment(
        session=0, epoch=0, run=0, first=split, stop=total, numbers=own, positions=own, base=base,
        bits=pack_bits([sees[n] for n in own], width), committed=own[:0], tokens=own,
    )
    mask, orphans = visible(segment, cached)
    columns = [*cached.tolist(), *own.tolist()]
    assert mask.shape == (len(own), len(columns))
    for i, row in enumerate(own.tolist()):
        expected = [c < base or bool(sees[row] >> (c - base) & 1) for c in columns]
        assert mask[i].tolist() == expected
        assert orphans[i] == any(sees[row] >> (g - base) & 1 for g in gone)


@given(numbers=st.sets(st.integers(0, 30)), of=st.sets(st.integers(0, 30)))
def test_member(numbers: set[int], of: set[int]) -> None:
    assert member(numbers_of(numbers), numbers_of(of)).tolist() == [n in of for n in sorted(numbers)]


@given(start=st.integers(0, 20), length=st.integers(0, 20), keep=st.sets(st.integers(0, 40)),
       numbers=st.sets(st.integers(0, 40)))
def test_dead(start: int, length: int, keep: set[int], numbers: set[int]) -> None:
    prune = Prune(0, 0, 0, start, start + length, numbers_of(keep))
    expected = [start <= n < start + length and n not in keep for n in sorted(numbers)]
    assert dead(prune, numbers_of(numbers)).tolist() == expected


def test_prunes_are_remembered_while_they_matter() -> None:
    prunes = PendingPrunes()
    first, second = (Prune(0, 0, i, 0, 10 * (i + 1), numbers_of({1})) for i in range(2))
    for prune in (second, first, second):
        prunes.add(prune)
    assert len(prunes) == 2
    assert prunes.dead(np.array([1, 5, 15, 25], np.int32)).tolist() == [False, True, True, False]
    prunes.discard_before(10)
    assert len(prunes) == 1
    assert prunes.dead(np.array([15], np.int32)).tolist() == [True]
    prunes.discard_before(20)
    prunes.add(second)
    assert len(prunes) == 0
