"""Look-up against brute force over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.text_lookup import brute_force

from flowspec_edge.tree.text_index import TextIndex

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
lengths = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


@given(text=texts, below=st.lists(st.integers(0, 3), max_size=5), lengths=lengths)
@examples(150, quick=30)
def test_candidates_are_those_of_brute_force(text: list[int], below: list[int], lengths: list[int]) -> None:
    shortest, longest = lengths
    index = TextIndex(longest, shortest)
    for token in text:
        index.append(token)
    path = text + below
    expected = brute_force(text, path, longest, shortest)
    found = index.candidates(path, 10)
    assert dict(found) == pytest.approx(expected)
    assert sum(p for _, p in found) < 1
    values = [p for _, p in found]
    assert values == sorted(values, reverse=True)
    assert index.candidates(path, 2) == found[:2]


def test_a_context_with_many_followers_offers_the_newest() -> None:
    """So that a look-up takes no longer in a text that has gone on from one token in many ways."""
    index = TextIndex(1, 1)
    for follower in range(1, 40):
        index.append(0)
        index.append(follower)
    found = [token for token, _ in index.candidates([0], 40)]
    assert found == list(range(39, 0, -1))
    assert [token for token, _ in index.candidates([0], 3)] == [39, 38, 37]


@given(text=texts, kept=st.integers(0, 40), lengths=lengths)
@examples(60, quick=24)
def test_a_rewound_index_is_one_that_has_seen_no_more(text: list[int], kept: int, lengths: list[int]) -> None:
    shortest, longest = lengths
    rewound, fresh = (TextIndex(longest, shortest) for _ in range(2))
    for token in text:
        rewound.append(token)
    rewound.rewind(kept)
    for token in text[:kept]:
        fresh.append(token)
    assert (rewound.length, rewound.newest) == (fresh.length, fresh.newest)
    for path in (text[:kept], text[-3:], [0, 1]):
        assert rewound.candidates(path, 10) == fresh.candidates(path, 10)
    rewound.reset()
    assert (rewound.length, rewound.newest, rewound.candidates(text, 10)) == (0, (), [])
