"""What FlowSpec+ decides, event by event: what it sends, what it drafts, and what each idea adds."""

from __future__ import annotations

import numpy as np
import pytest
from kits.scripted_strategy import OTHER, ROOT, A, B, C, D, Device0, E, F, G, tokens

from flowspec_edge.messages import Prune
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.flowspec_plus import FlowSpecPlus
from flowspec_edge.tree.draft_api import DraftOutput

LIKELY = {ROOT: [(A, 0.9), (B, 0.05)]}


def drafted(**params: int | str) -> Device0:
    """The root is in the pipeline; A is likely after it, and C after A."""
    d0 = Device0("flowspec_plus", **params)  # type: ignore[arg-type]
    d0.send()
    d0.draft(LIKELY)
    d0.draft({A: [(C, 0.9)]})
    return d0


# ---- what is sent --------------------------------------------------------------------------------


def test_a_root_goes_at_once() -> None:
    d0 = Device0("flowspec_plus")
    assert d0.layer() == [ROOT]
    assert d0.layer() == []  # nothing is known, and it goes once


def test_a_root_takes_along_what_is_known() -> None:
    d0 = Device0("flowspec_plus", segment=3)
    d0.draft(LIKELY)
    assert d0.layer() == [ROOT, A, B]


def test_the_likeliest_are_sent_whatever_their_depth() -> None:
    d0 = drafted(segment=2)
    assert d0.layer() == [A, C]  # .9 and .81
    d0 = drafted(segment=3)
    assert d0.layer() == [A, C, B]  # B has .05
    assert ROOT not in d0.layer()


# ---- what is drafted -----------------------------------------------------------------------------


def test_a_pass_takes_as_many_as_it_may() -> None:
    d0 = Device0("flowspec_plus", plus_width=3)
    d0.draft({ROOT: [(A, 0.5), (B, 0.3), (C, 0.1), (D, 0.05)]})
    assert d0.asked() == [A, B, C]


@pytest.mark.parametrize(("segment", "expected"), [
    (2, [C]),  # the last row sent is C, of 0.36: nodes of at least half of that
    (4, [C, D]),  # D, of 0.12
    (5, [C, D, F, E]),  # F, of 0.045; E has 0.03
    (9, [C, D, F, E]),  # there was room for more
])
def test_far_less_likely_nodes_are_not_drafted(segment: int, expected: list[int]) -> None:
    d0 = Device0("flowspec_plus", segment=segment)
    d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.3)]})
    d0.draft({A: [(C, 0.6), (D, 0.2), (E, 0.05)], B: [(F, 0.15)]})
    d0.send()
    assert d0.asked() == expected


# ---- what comes back -----------------------------------------------------------------------------


def test_the_tree_survives_a_commit() -> None:
    """Nothing that lives on is sent or asked for again, but the root is: its true features are here."""
    d0 = Device0("flowspec_plus", segment=3, plus_width=1)
    root = d0.send()
    d0.draft(LIKELY)
    d0.draft({A: [(C, 0.9), (D, 0.05)]})
    d0.draft({C: [(E, 0.9)]})
    first = d0.send()
    assert tokens(first) == [A, C, E]
    assert d0.back(root, A) == [(A, True)]
    [prune] = d0.strategy.controls()
    assert isinstance(prune, Prune)
    assert set(first.numbers.tolist()) <= set(prune.keep.tolist())
    assert A not in d0.layer()  # it is the root, and on its way
    assert d0.asked() == [A]  # expanded before, without the target's features
    assert d0.asked() == [A]  # no answer has come
    d0.draft({A: [(C, 0.9), (D, 0.05)]})
    assert d0.asked() == [E]  # and no node below it a second time
    assert d0.back(first, C, E, G) == [(C, True), (E, True), (G, False)]


def test_a_miss_begins_a_new_tree_at_once() -> None:
    d0 = Device0("flowspec_plus", segment=2)
    root = d0.send()
    d0.draft(LIKELY)
    stale = d0.send()
    assert d0.back(root, OTHER) == [(OTHER, False)]
    [prune] = d0.strategy.controls()
    assert isinstance(prune, Prune)
    assert not set(stale.numbers.tolist()) & set(prune.keep.tolist())
    assert d0.asked() == [OTHER]
    assert d0.layer() == [OTHER]
    assert d0.back(stale, C, D) == []
    assert d0.strategy.counters.rounds == 1


def test_an_unsent_child_that_came_true_goes_at_once() -> None:
    d0 = drafted(segment=1)
    root = d0.strategy.builder.next_number - 1
    assert d0.strategy.on_verified(0, [root], [B])[0].token == B  # not even A has been sent
    assert d0.layer() == [B]
    assert d0.asked()[0] == B


def test_an_answer_that_the_text_left_behind_is_harmless() -> None:
    d0 = Device0("flowspec_plus")
    root = d0.send()
    d0.draft(LIKELY)
    request = d0.strategy.next_draft()
    assert request is not None
    d0.back(root, OTHER)
    d0.strategy.on_draft(request, DraftOutput(np.full((2, 10), C, np.int32), np.full((2, 10), -0.1)))
    assert d0.layer() == [OTHER]
    assert d0.asked() == [OTHER]


# ---- the ideas -----------------------------------------------------------------------------------


IDEAS = ("ahead", "curve", "learn", "lookup")
others = pytest.mark.parametrize("others", ["", *IDEAS])  # what else is left out changes nothing


def after_a_repeat(without: str) -> list[int]:
    """The first segment after the second A of a text that begins with A B C D; nothing was drafted."""
    d0 = Device0("flowspec_plus", text=[A, B, C, D], segment=4, plus_without=without)
    d0.back(d0.send(), A)
    return d0.layer()


@others
def test_what_the_text_had_before_goes_into_the_first_segment(others: str) -> None:
    assert after_a_repeat(f"lookup,{others}") == [A]
    if others != "lookup":
        assert after_a_repeat(others) == [A, B, C, D]


def test_below_a_drafted_node_the_text_is_looked_up_too() -> None:
    d0 = Device0("flowspec_plus", text=[A, B, C, D], segment=3)
    d0.send()
    d0.draft({ROOT: [(E, 0.6), (A, 0.3)]})
    d0.draft({})
    assert d0.layer() == [E, A, B]


@others
def test_a_draft_model_that_is_often_wrong_is_believed_less(others: str) -> None:
    def worth(without: str) -> float:
        """Of a child with confidence .9, after thirty others that did not come true."""
        d0 = Device0("flowspec_plus", plus_without=without)
        for turn in range(30):
            root = d0.send()
            d0.draft({tokens(root)[0]: [(1000 + turn, 0.9)]})
            d0.back(root, 2000 + turn)
        root = d0.send()
        d0.draft({tokens(root)[0]: [(A, 0.9)]})
        assert isinstance(d0.strategy, FlowSpecPlus)
        [a] = d0.strategy.tree.pop_unsent(1)
        return d0.strategy.tree.probability(a)

    assert worth(f"learn,{others}") == pytest.approx(0.9)
    if others != "learn":
        assert worth(others) < 0.8


def flat(until: int) -> Pipeline:
    """A slot takes a second up to so many rows, and ten more for each row after them."""
    return Pipeline(4, slot_seconds=lambda rows: 1.0 + 10 * max(0, rows - until))


def rows(pipeline: Pipeline, **params: int | str) -> int:
    """Of a segment that could have 110: ten children of the root, and ten of each of these."""
    d0 = Device0("flowspec_plus", pipeline, **params)  # type: ignore[arg-type]
    d0.send()
    first = range(1000, 1010)
    d0.draft({ROOT: [(token, 0.09) for token in first]})
    d0.draft({token: [(100 * token + i, 0.09) for i in range(10)] for token in first})
    return len(d0.layer())


@others
def test_a_segment_is_as_long_as_brings_the_most_tokens_a_second(others: str) -> None:
    assert rows(flat(8), plus_without=f"curve,{others}") == 16  # ``segment``
    if others != "curve":
        assert rows(flat(8), plus_without=others) == 8
        assert rows(flat(32), plus_without=others) == 32


def test_rows_without_a_curve_and_with_a_limit() -> None:
    assert rows(Pipeline(4)) == 16
    assert rows(Pipeline(4), segment=5) == 5
    assert rows(Pipeline(4), plus_rows=20) == 20
    assert rows(flat(32), plus_rows=20) == 20
    assert rows(flat(8), plus_rows=20) == 8
    assert rows(flat(1000)) == 64  # the longest that is planned for


def test_a_root_shares_its_slot_with_as_many_as_are_free() -> None:
    """Seven beside it in a slot that is flat to eight rows."""
    d0 = Device0("flowspec_plus", flat(8))
    d0.draft({ROOT: [(1000 + i, 0.09) for i in range(10)]})
    assert d0.layer() == [ROOT, *range(1000, 1007)]


def test_a_root_goes_alone_where_rows_cost_more_than_they_bring() -> None:
    d0 = Device0("flowspec_plus", flat(1))
    d0.draft({ROOT: [(A, 0.09), (B, 0.09)]})
    assert d0.layer() == [ROOT]
    assert d0.layer() == [A]  # a slot that would be idle


@others
def test_segments_go_ahead(others: str) -> None:
    assert Device0("flowspec_plus", plus_without=others).strategy.allows_early_send == (others != "ahead")
