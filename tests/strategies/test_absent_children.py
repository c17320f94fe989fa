"""Drafters that know few children, or none: what the strategies do then, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from kits.scripted_strategy import OTHER, ROOT, A, B, C, Children, Device0, tokens

from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import DraftOutput, DraftRequest

DRAFTING = [name for name, chosen in STRATEGIES.items() if chosen.drafter]


def answer(d0: Device0, known: dict[int, Children]) -> list[int]:
    """One pass of a drafter that knows these children alone; the tokens it was asked about."""
    request = d0.strategy.next_draft()
    assert request is not None
    return reply(d0, request, known)


def reply(d0: Device0, request: DraftRequest, known: dict[int, Children]) -> list[int]:
    """The same, to a request that was made already."""
    expansion = DraftOutput.empty(len(request.nodes), request.children)
    for row, node in enumerate(request.nodes):
        for place, (token, confidence) in enumerate(known.get(node.token, [])):
            expansion.tokens[row, place], expansion.scores[row, place] = token, np.log(confidence)
    d0.strategy.on_draft(request, expansion)
    return [node.token for node in request.nodes]


def silence(d0: Device0) -> int:
    """How many passes D0 does when every one of them finds nothing."""
    passes = 0
    while (request := d0.strategy.next_draft()) is not None:
        assert passes < 20
        reply(d0, request, {})
        passes += 1
    return passes


@pytest.mark.parametrize("name", DRAFTING)
def test_without_a_single_draft_it_decodes_plainly(name: str) -> None:
    """One row a segment, one token a segment, and D0 idle in between."""
    d0 = Device0(name, pearl_gamma=3)
    newest = ROOT
    for token in (A, B, C, OTHER):
        silence(d0)
        segment = d0.send()
        assert tokens(segment) == [newest]
        silence(d0)
        assert d0.layer() == []
        assert silence(d0) == 0
        assert d0.back(segment, token) == [(token, False)]
        newest = token
    assert d0.strategy.counters.drafted == 0


def test_pearls_block_is_as_long_as_what_is_known() -> None:
    d0 = Device0("pearl", Pipeline(4, draft_passes=1e9))
    root = d0.send()
    answer(d0, {ROOT: [(A, 0.9)]})
    answer(d0, {A: [(B, 0.9)]})
    assert answer(d0, {}) == [B]  # of 64 that a block may have
    assert d0.asked() == []
    assert d0.layer() == []  # the target still runs on the root
    assert d0.back(root, A) == [(A, True)]
    block = d0.send()
    assert tokens(block) == [A, B]
    assert answer(d0, {}) == [B]  # the next block is empty
    assert d0.back(block, B, C) == [(B, True), (C, False)]
    assert tokens(d0.send()) == [C]


def test_pipeinfer_sends_a_batch_that_could_not_be_filled() -> None:
    d0 = Device0("pipeinfer", pipeinfer_tokens=4)
    d0.send()
    answer(d0, {ROOT: [(A, 0.9)]})
    answer(d0, {})
    assert d0.layer() == [A]


def test_pipeinfer_looks_again_when_the_text_has_grown() -> None:
    """Not before: nothing would be found, and a look-up that costs nothing could go on for ever."""
    d0 = Device0("pipeinfer", pipeinfer_tokens=1, pipeinfer_decay=1.0)
    root = d0.send()
    answer(d0, {ROOT: [(A, 0.9)]})
    run = d0.send()
    assert tokens(run) == [A]
    assert answer(d0, {}) == [A]
    for _ in range(3):  # the cutoff falls below zero
        assert d0.asked() == []
    assert d0.back(root, A) == [(A, True)]
    assert d0.asked() == [A]


@pytest.mark.parametrize("name", ["pipedec", "spd"])
def test_a_layer_holds_what_is_known(name: str) -> None:
    d0 = Device0(name, pipedec_width=4, pipedec_children=3, spd_width=4)
    root = d0.send()
    answer(d0, {ROOT: [(A, 0.6), (B, 0.3)]})
    layer = d0.send()
    assert tokens(layer) == [A, B]
    answer(d0, {B: [(C, 0.5)]})
    last = d0.send()
    assert tokens(last) == [C]
    assert silence(d0) == 1
    assert d0.layer() == []
    assert d0.back(root, A) == [(A, True)]
    assert d0.back(layer, OTHER, OTHER) == [(OTHER, False)]
    assert d0.layer() == [OTHER]


def test_a_static_tree_has_holes_where_nothing_is_known() -> None:
    d0 = Device0("stpp", stpp_branching="2,2")
    answer(d0, {ROOT: [(A, 0.6), (B, 0.3)]})
    answer(d0, {B: [(C, 0.5)]})
    assert sorted(d0.layer()) == [ROOT, A, B, C]
