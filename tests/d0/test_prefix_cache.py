"""The pool of cache rows against a plain list of what was left, and what the rule says about it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.d0.capacity import cache_rows, session_rows, tentative_rows
from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.prefix_cache import MIN_ROWS, PrefixCache
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.layers.kv_cache import SLACK
from flowspec_edge.stage.layers.stage_cache import reusable
from flowspec_edge.strategies.autoregressive import Autoregressive
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params

LIMIT = 100
# Few texts, many beginnings in common: a stem, and another end from some place on.
texts = st.builds(lambda length, cut, end: [1] * min(cut, length) + [end] * max(length - cut, 0),
                  st.integers(1, 60), st.integers(0, 60), st.integers(2, 3))


def ended(session: int, text: list[int]) -> DraftSession:
    """One that knows rows of ``text``, all but the last, and goes away before it reads that in."""
    request = Request(text, "autoregressive")
    return DraftSession(request, lambda builder: Autoregressive(request.params, builder, Pipeline(1)), None,
                        LmHead(torch.empty(0, 0)), lambda: 0.0, session, cached_rows=len(text) - 1)


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def best(left: list[tuple[int, list[int]]], prompt: list[int], odd: bool) -> tuple[int, int] | None:
    """(session, rows) of those that are left, which ``odd`` ones may use if theirs is odd."""
    found = [(common(text, prompt) - 1, place, session) for place, (session, text) in enumerate(left)
             if session % 2 == odd]
    found = [item for item in found if item[0] >= 16 and 2 * item[0] >= len(left[item[1]][1])]
    return (max(found)[2], max(found)[0]) if found else None


@examples(100, quick=18)
@given(data=st.data())
def test_any_coming_and_going(data: st.DataObject) -> None:
    pool = PrefixCache(LIMIT)
    left: list[tuple[int, list[int]]] = []  # the one left longest ago first
    running: dict[int, tuple[list[int], int]] = {}
    for session in range(1, data.draw(st.integers(2, 12))):
        prompt, odd = data.draw(texts), data.draw(st.booleans())
        rows = len(prompt) + data.draw(st.integers(0, 70))
        while not pool.fits(rows):  # the requests here end, until there is room
            assert running
            assert rows + sum(r for _, r in running.values()) > LIMIT
            gone = data.draw(st.sampled_from(sorted(running)))
            text, _ = running.pop(gone)
            numbers = pool.retain(ended(gone, text))
            assert numbers == (tuple(range(len(text) - 1)) if len(text) - 1 > MIN_ROWS else ())
            left += [(gone, text[:-1])] if numbers else []
        assert not running or rows + sum(r for _, r in running.values()) <= LIMIT
        reuse = pool.find(prompt, lambda prefix, odd=odd: prefix.session % 2 == odd)
        assert (reuse and (reuse.prefix.session, reuse.rows)) == best(left, prompt, odd)
        held = pool.begin(session, rows, reuse.prefix.session if reuse else -1)
        running[session] = (prompt, rows)
        left = [item for item in left if not reuse or item[0] != reuse.prefix.session]
        taken = sum(r for _, r in running.values())
        while left and taken + sum(len(text) for _, text in left) > LIMIT:
            left.pop(0)
        assert held == pool.retained == tuple(item[0] for item in left)
        assert pool.rows == taken + sum(len(text) for _, text in left)
        assert pool.rows <= max(LIMIT, rows if len(running) == 1 else 0)


def test_a_loss_takes_all() -> None:
    pool = PrefixCache(LIMIT)
    for session in (1, 2):
        assert pool.begin(session, 40) == ()
    pool.retain(ended(1, [1] * 30))
    assert pool.retained == (1,)
    assert pool.rows == 40 + 29
    pool.clear()
    assert pool.rows == 0
    assert pool.fits(LIMIT)
    assert pool.find([1] * 30, lambda prefix: True) is None


def test_without_a_limit_everybody_fits_and_nothing_is_kept() -> None:
    pool = PrefixCache()
    for session in range(1, 9):
        assert pool.fits(10**9)
        assert pool.begin(session, 10**9) == ()
    assert pool.retain(ended(3, [1] * 30)) == ()
    assert pool.find([1] * 30, lambda prefix: True) is None


def test_of_equals_the_one_left_last() -> None:
    pool = PrefixCache(LIMIT)
    for session in (1, 2):
        pool.begin(session, 30)
    for session in (2, 1):
        pool.retain(ended(session, [1] * 30))
    reuse = pool.find([1] * 25, lambda _: True)
    assert reuse is not None
    assert (reuse.prefix.session, reuse.rows) == (1, 24)


def test_a_budget_counts_what_sessions_take() -> None:
    """Texts and as many drafts as there are sessions: what a plan reserves is what requests need."""
    params = Params(tree_size=400)
    requests = [Request([1] * 300, max_new_tokens=200, params=params),
                Request([1] * 700, max_new_tokens=300, params=params)]
    assert sum(session_rows(request, 3) for request in requests) == cache_rows(1500, 2, params, 3)
    assert cache_rows(1500, 1, params, 3) == 1500 + tentative_rows(params, 3)


def test_layers_with_a_window_limit_where_a_text_is_cut() -> None:
    """They hold the window before the end of a text and ``SLACK`` rows more, or a short text whole."""
    kinds = [KeysValues(1, 1, 8), KeysValues(1, 1, 8, window=20)]
    for length, expected in ((19 + 2 * SLACK, [16, 40, 100]), (200, [0, 0, 0, 200 - SLACK])):
        text = [*range(length)]
        pool = PrefixCache(1000)
        pool.suit(kinds, 2)
        pool.begin(1, length)
        assert len(pool.retain(ended(1, text))) == length - 1
        for shared, rows in zip((16, 40, 100, length - SLACK), expected, strict=False):
            hit = pool.find([*text[: shared + 1], -1], lambda _: True)
            assert (hit.rows if hit else 0) == (rows if 2 * rows >= length - 1 else 0)
    assert reusable(kinds, 1000, 1000 - SLACK - 1) == 0
    assert [reusable(kinds, 1000, rows, 500) for rows in (499, 500, 900, 940)] == [0, 500, 500, 940]


def test_windows_limit_how_many_prefixes_stay() -> None:
    for window, stay in ((None, (1, 2, 3)), (20, (3,))):
        pool = PrefixCache(1000)
        pool.suit([KeysValues(1, 1, 8, window=window)], 2)
        for session in (1, 2, 3):
            pool.begin(session, 50)
            pool.retain(ended(session, [session] * 50))
        assert pool.begin(4, 50) == stay
