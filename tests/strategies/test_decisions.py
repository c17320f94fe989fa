"""What PipeDec, SPD, PEARL and the static baselines decide, event by event."""

from __future__ import annotations

import pytest
from kits.scripted_strategy import OTHER, ROOT, A, B, C, D, Device0, E, F, G, H, tokens

from flowspec_edge.messages import Prune, Segment
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.segment_builder import SegmentBuilder

# ---- PipeDec and SPD -----------------------------------------------------------------------------


def two_layers() -> tuple[Device0, Segment, Segment]:
    """Root and A, B are in the pipeline; A and B have been expanded."""
    d0 = Device0("pipedec", 3, pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    first = d0.send()
    d0.draft({A: [(C, 0.6), (D, 0.4)], B: [(E, 0.5), (F, 0.5)]})
    return d0, root, first


def test_a_layer_is_the_best_by_cumulative_probability() -> None:
    d0, root, first = two_layers()
    assert (tokens(root), tokens(first)) == ([ROOT], [A, B])
    assert d0.layer() == [C, D]  # .36 and .24; E and F have .2, though .5 of their parent's
    assert d0.asked() == [C, D]


def test_only_the_newest_sent_layer_is_drafted_on() -> None:
    d0 = Device0("pipedec", pipedec_width=2, pipedec_children=2)
    assert d0.asked() == []
    d0.send()
    assert d0.asked() == [ROOT]
    assert d0.layer() == []
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    assert d0.asked() == []
    d0.send()
    assert d0.asked() == [A, B]


def test_survivors_take_the_places_of_the_dead() -> None:
    """PipeDec, section 3.3.4: one more update after the pruning."""
    d0, root, _ = two_layers()
    assert d0.back(root, B) == [(B, True)]
    assert d0.layer() == [E, F]


def test_dead_nodes_are_not_drafted_on() -> None:
    d0 = Device0("pipedec", pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    d0.send()
    d0.back(root, B)
    assert d0.asked() == [B]


def test_a_layer_that_died_waits_for_the_miss() -> None:
    d0, root, first = two_layers()
    d0.send()
    d0.back(root, B)
    assert (d0.asked(), d0.layer()) == ([], [])
    assert d0.back(first, C, OTHER) == [(OTHER, False)]
    assert d0.layer() == [OTHER]


def test_a_candidate_that_was_not_sent_is_a_hit() -> None:
    d0 = Device0("pipedec", 1, pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    assert d0.back(root, B) == [(B, True)]
    assert d0.layer() == [B]
    assert d0.asked() == [B]


def test_a_miss_empties_the_pipeline() -> None:
    d0, root, first = two_layers()
    assert d0.back(root, OTHER) == [(OTHER, False)]
    hint, = d0.strategy.controls()
    assert isinstance(hint, Prune)
    assert not set(first.numbers.tolist()) & set(hint.keep.tolist())
    assert hint.start <= first.numbers[0]
    assert first.numbers[-1] < hint.stop
    assert d0.layer() == [OTHER]


@pytest.mark.parametrize("name", ["flowspec", "flowspec_no_sbd"])
def test_an_unsent_root_is_one_of_its_segments_rows(name: str) -> None:
    d0 = Device0(name, segment=3, width=4, tree_size=8, depth=2)
    d0.draft({ROOT: [(A, 0.5), (B, 0.3), (C, 0.1), (D, 0.05)]})
    assert d0.layer() == [ROOT, A, B]
    assert d0.layer()[:2] == [C, D]


@pytest.mark.parametrize(("width", "children"), [(1, 1), (2, 4), (4, 4)])
def test_spd_keeps_the_best_of_four_children(width: int, children: int) -> None:
    d0 = Device0("spd", Pipeline(2, (4, 8)), spd_width=width)
    root = d0.send()
    request = d0.strategy.next_draft()
    assert request is not None
    assert request.children == children
    d0.draft({ROOT: [(A, 0.4), (B, 0.3), (C, 0.2), (D, 0.1)]})
    layer = d0.send()
    assert tokens(layer) == [A, B, C, D][:width]
    assert root.taps == layer.taps == (2, 4)


# ---- PEARL and plain speculation -----------------------------------------------------------------


def test_a_block_is_gamma_rows_and_is_sent_when_it_is_complete() -> None:
    d0 = Device0("pearl", pearl_gamma=3)
    root = d0.send()
    assert tokens(root) == [ROOT]
    d0.chain(ROOT, A)
    assert d0.layer() == []  # one verification at a time
    assert d0.back(root, A) == [(A, True)]
    assert d0.layer() == []
    d0.chain(A, B, C)
    assert d0.asked() == []
    block = d0.send()
    assert tokens(block) == [A, B, C]
    d0.chain(C, D, E, F)
    assert d0.asked() == []
    assert d0.back(block, B, C, D) == [(B, True), (C, True), (D, True)]
    assert d0.layer() == [D, E, F]


def test_a_rejection_leads_back_to_pre_verify() -> None:
    d0 = Device0("pearl", pearl_gamma=3)
    root = d0.send()
    d0.chain(ROOT, A, B, C)
    d0.back(root, A)
    block = d0.send()
    d0.chain(C, D)
    assert d0.back(block, B, OTHER, D) == [(B, True), (OTHER, False)]
    again = d0.send()
    assert tokens(again) == [OTHER]
    assert d0.asked() == [OTHER]
    d0.draft({OTHER: [(G, 0.9)]})
    assert d0.back(again, H) == [(H, False)]  # rejected at once: stay
    assert d0.layer() == [H]


@pytest.mark.parametrize(("passes", "gamma"), [(7.3, 7), (7.6, 8), (0.2, 1), (1e9, 64)])
def test_the_default_block_is_the_speed_ratio(passes: float, gamma: int) -> None:
    strategy = STRATEGIES["pearl"](Params(), SegmentBuilder(), Pipeline(4, (), passes))
    assert strategy.gamma == gamma  # type: ignore[attr-defined]


def test_a_chain_is_sent_when_it_is_complete() -> None:
    d0 = Device0("speculative", speculative_gamma=2)
    for parent, child in ((ROOT, A), (A, B)):
        assert d0.layer() == []
        d0.chain(parent, child)
    assert d0.asked() == []
    chain = d0.send()
    assert tokens(chain) == [ROOT, A, B]
    assert d0.back(chain, A, OTHER, G) == [(A, True), (OTHER, False)]
    assert d0.asked() == [OTHER]


def test_every_node_of_a_static_level_is_expanded() -> None:
    d0 = Device0("stpp", stpp_branching="2,1,2")
    d0.draft({ROOT: [(A, 0.9), (B, 1e-9)]})
    assert d0.asked() == [A, B]
    d0.draft({A: [(C, 0.9)], B: [(D, 1e-9)]})
    assert d0.asked() == [C, D]
    assert d0.layer() == []
    d0.draft({C: [(E, 0.9), (F, 0.1)], D: [(G, 0.9), (H, 0.1)]})
    assert sorted(d0.layer()) == [ROOT, A, B, C, D, E, F, G, H]
